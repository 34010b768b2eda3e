"""The adapters of a service: the boot list that its replicas load before they are ready, and its condition and counts.

The boot list is a ConfigMap that every pod mounts, and may do without: it is no part of a revision, and a change
restarts nothing. It has the adapters that every replica loads; one that needs credentials gets them with the operator's
load call.

An adapter of `--adapter` in spec.runtime.args has no object whose status could report a failed load, and the replica
gets ready without it. So the condition of the service reports it.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

from slipway_api import names
from slipway_api.conditions import ConditionStatus, Reason
from slipway_api.inference_service import InferenceService
from slipway_api.inference_status import AdaptersStatus
from slipway_api.runtime_api import BootList, LoadAdapterRequest
from slipway_api.words import count
from slipway_operator.core.adapter.observed import AttachedAdapter
from slipway_operator.core.health import Member

VOLUME: Final = "slipway-adapters"
FLAG: Final = "--adapter"
REPLICAS_SHOWN: Final = 3


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


def adapters_condition(
    adapters: Sequence[AttachedAdapter], members: Sequence[Member], service: InferenceService
) -> tuple[ConditionStatus, Reason, str] | None:
    """The condition AdaptersReady; None: the service has no adapters, as far as is known.

    `members` are the replicas of the present revision, and `service` has its spec.
    """
    if failed := _describe_failed(members, service.spec.runtime.args):
        return ConditionStatus.FALSE, Reason.ADAPTERS_FAILED, failed
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


def static_adapters(arguments: Sequence[str]) -> Iterator[str]:
    """The names that spec.runtime.args gives to adapters: `--adapter NAME=URI` or `--adapter=NAME=URI`."""
    for position, argument in enumerate(arguments):
        flag, is_joined, joined = argument.partition("=")
        if flag != FLAG:
            continue
        following = arguments[position + 1] if position + 1 < len(arguments) else ""
        yield (joined if is_joined else following).partition("=")[0]


def _describe_failed(members: Sequence[Member], arguments: Sequence[str]) -> str:
    """The static adapters that ready replicas could not load, with the runtime's reasons; empty: none."""
    static = set(static_adapters(arguments))
    failed: dict[tuple[str, str], list[str]] = {}
    for member in members:
        sample = member.replica.sample
        if not member.is_ready or sample is None or sample.capacity is None:
            continue
        for name, reason, message in sample.capacity.failed_adapters:
            if name in static:
                cause = f"{reason}: {message}" if reason else message
                failed.setdefault((name, cause), []).append(member.replica.name)
    sentences = [f"{_some(replicas)} could not load {name}: {cause}" for (name, cause), replicas in failed.items()]
    if not sentences:
        return ""
    remedy = f"correct {FLAG} in spec.runtime.args, or create a LoRAAdapter instead, which is tried again"
    return f"{'; '.join(sorted(sentences))}; {remedy}"


def _some(replicas: Sequence[str]) -> str:
    shown = sorted(replicas)[:REPLICAS_SHOWN]
    hidden = len(replicas) - len(shown)
    return ", ".join(shown) + (f" and {count(hidden, 'other replica')}" if hidden else "")
