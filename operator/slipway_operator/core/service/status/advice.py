"""Finds what works and is likely to be regretted; each becomes an event, Advice.

About a setting of the spec it comes once for each generation. About the way in which a model was loaded (weights that
were rounded twice, for example) it comes with each start that is measured, and the recorder counts repetitions.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from slipway_api import names
from slipway_api.conditions import EventReason
from slipway_api.gpu_catalogue import find_gpu
from slipway_api.inference_service import InferenceService, InferenceServiceSpec
from slipway_api.inference_status import InferenceServiceStatus
from slipway_api.memory import utilization_warning
from slipway_operator.core.actions import Event
from slipway_operator.core.health import Member
from slipway_operator.core.service.model.model_access import draft_model_uri
from slipway_operator.core.service.status.performance import newest_cold_start

SLOW_TOKEN_SECONDS: Final = 0.1  # between two tokens; twice what a reader notices
_SHARED_RESOURCE: Final = ".shared"  # nvidia.com/gpu.shared: time slices, named so by the device plugin


def find_advice(service: InferenceService) -> tuple[Event, ...]:
    """Advice about a spec that was not looked at before; nothing about one that the status already follows."""
    if service.status.observed_generation == service.metadata.generation:
        return ()
    return tuple(
        Event(reason=EventReason.ADVICE, action="Plan", message=sentence) for sentence in _sentences(service.spec)
    )


def find_load_advice(
    before: InferenceServiceStatus, after: InferenceServiceStatus, members: Sequence[Member]
) -> tuple[Event, ...]:
    """What the replica warns of whose cold start is in the status since this pass."""
    newest = newest_cold_start(members)
    if newest is None or before.performance == after.performance:
        return ()
    replica, capacity = newest
    return tuple(
        Event(reason=EventReason.ADVICE, action="Load", message=f"spec.model.uri: {sentence}", pod=replica.name)
        for sentence in capacity.warnings
    )


def _sentences(spec: InferenceServiceSpec) -> Iterator[str]:
    model, runtime, gpu = spec.model, spec.runtime, spec.resources.gpu
    draft = draft_model_uri(runtime)
    for field, uri in (("spec.model.uri", model.uri), (names.DRAFT_MODEL_FIELD, draft)):
        if not uri.startswith("hf://") or "@" in uri:
            continue
        yield (
            f"{field} {uri} names no revision: a replica that starts later may load another model; "
            "append @ and a commit"
        )
    if runtime.image and "@sha256:" not in runtime.image and _tag(runtime.image) in ("", "latest"):
        yield (
            f"spec.runtime.image {runtime.image} has no fixed tag: replicas that start later may run another version; "
            "name a version or a digest"
        )
    if gpu.count:
        warning = utilization_warning(float(runtime.kv_cache.gpu_memory_utilization))
        if warning:
            yield f"spec.runtime.kvCache: {warning}"
        facts = find_gpu(gpu.product) if gpu.product else None
        if gpu.resource_name.endswith(_SHARED_RESOURCE) or (facts is not None and facts.shared):
            yield (
                "spec.resources.gpu asks for a time-sliced GPU: other processes take turns and memory on it, so "
                "latencies have no bound; use a whole GPU or a MIG slice where they matter"
            )
    longest = runtime.max_output_tokens * SLOW_TOKEN_SECONDS
    if longest > spec.drain.timeout_seconds:
        yield (
            f"spec.drain.timeoutSeconds {spec.drain.timeout_seconds} is shorter than an answer of "
            f"spec.runtime.maxOutputTokens ({runtime.max_output_tokens}) at {SLOW_TOKEN_SECONDS:g}s a token "
            f"({longest:.0f}s): a drain would have to interrupt it"
        )


def _tag(image: str) -> str:
    """The tag of an image; empty: none. A colon before the last slash belongs to the registry's port."""
    return image.rpartition("/")[2].partition(":")[2]
