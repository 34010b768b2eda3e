"""The adapters of a service: the boot list that its replicas load before they are ready, and counts for its status.

The boot list is a ConfigMap that every pod mounts, and may do without: it is no part of a revision, and a change
restarts nothing. It has the adapters that every replica loads; one that needs credentials gets them with the operator's
load call.
"""

from collections.abc import Sequence
from typing import Any, Final

from slipway_api import names
from slipway_api.conditions import ConditionStatus, Reason
from slipway_api.inference_service import InferenceService
from slipway_api.inference_status import AdaptersStatus
from slipway_api.runtime_api import BootList, LoadAdapterRequest
from slipway_api.words import count
from slipway_operator.core.adapter.observed import AttachedAdapter

VOLUME: Final = "slipway-adapters"


def config_map_name(service: str) -> str:
    """The ConfigMap with the boot list."""
    return f"{service}-adapters"


def boot_list(adapters: Sequence[AttachedAdapter]) -> str:
    """The content of the ConfigMap."""
    requests = tuple(
        LoadAdapterRequest(name=one.name, uri=one.uri, digest=one.digest, pinned=one.pinned, version=one.version)
        for one in adapters
        if one.boots
    )
    return BootList(adapters=requests).model_dump_json(
        by_alias=True, exclude={"adapters": {"__all__": {"credentials"}}}
    )


def volumes(service: InferenceService) -> list[dict[str, Any]]:
    """The boot list, where the spec makes room for adapters. A pod starts without it, too."""
    if service.spec.runtime.lora is None:
        return []
    return [{"name": VOLUME, "configMap": {"name": config_map_name(service.metadata.name), "optional": True}}]


def mounts(service: InferenceService) -> list[dict[str, Any]]:
    """The mount of the boot list."""
    if service.spec.runtime.lora is None:
        return []
    return [{"name": VOLUME, "mountPath": names.ADAPTERS_DIRECTORY, "readOnly": True}]


def adapters_status(adapters: Sequence[AttachedAdapter]) -> AdaptersStatus | None:
    """The counts for the service's status; None: it has no adapters."""
    if not adapters:
        return None
    return AdaptersStatus(desired=len(adapters), ready=sum(one.is_ready for one in adapters))


def adapters_condition(adapters: Sequence[AttachedAdapter]) -> tuple[ConditionStatus, Reason, str] | None:
    """The condition AdaptersReady; None: it has no adapters."""
    if not adapters:
        return None
    missing = [one.name for one in adapters if not one.is_ready]
    if not missing:
        answer = count(len(adapters), "adapter answers", "adapters answer")
        return ConditionStatus.TRUE, Reason.ADAPTERS_LOADED, f"{len(adapters)} of {answer}"
    shown = ", ".join(missing[:5]) + (" and others" if len(missing) > 5 else "")
    of_all = count(len(adapters), "adapter does", "adapters do")
    sentence = f"{len(missing)} of {of_all} not answer: {shown}"
    return ConditionStatus.FALSE, Reason.ADAPTERS_MISSING, sentence
