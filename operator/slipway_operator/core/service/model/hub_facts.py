"""The sizes of an `hf://` model before its first replica: asked of its hub once, kept in status.model. Pure.

| known                                              | memory is planned with             |
|----------------------------------------------------|------------------------------------|
| spec.model.shape                                   | that; no hub is asked              |
| status.model of the same address and hub           | that                               |
| the hub has answered                               | that, and status keeps it          |
| it is being asked, for less than HOLD, first start | nothing yet: no pod is created     |
| it did not answer, or must not be asked            | nothing: the first replica tells   |

A hub is asked only where the answer could refuse a model: where a GPU of the catalogue, or a memory limit and the size
of the KV cache, say how much memory there is.
"""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

from slipway_api.gpu_catalogue import find_gpu
from slipway_api.inference_service import InferenceServiceSpec
from slipway_api.inference_status import ModelFacts
from slipway_operator.core.actions import AskHub, Steps
from slipway_operator.core.health import Member
from slipway_operator.core.observed import Observed

HOLD: Final = timedelta(seconds=10)  # a hub that is slow, or far down the queue, keeps no service from starting


def known_facts(observed: Observed) -> ModelFacts | None:
    """The sizes that status keeps; None where the spec has them, or nobody knows them."""
    model, before, hub = observed.service.spec.model, observed.service.status.model, observed.hub
    if model.shape is not None:
        return None
    endpoint = model.network.hub_endpoint
    if before is not None and (before.uri, before.hub_endpoint) == (model.uri, endpoint):
        return before
    if hub is None or hub.shape is None:
        return None
    return ModelFacts(uri=model.uri, hub_endpoint=endpoint, shape=hub.shape)


def with_known_shape(observed: Observed) -> Observed:
    """The same snapshot with the known sizes in `spec.model.shape`, where everything that plans memory reads them."""
    facts, service = known_facts(observed), observed.service
    if facts is None:
        return observed
    model = service.spec.model.model_copy(update={"shape": facts.shape})
    spec = service.spec.model_copy(update={"model": model})
    return replace(observed, service=service.model_copy(update={"spec": spec}))


def ask_hub(observed: Observed) -> Steps:
    """Ask the hub, where that may help and has not been done."""
    hub, spec = observed.hub, observed.service.spec
    if hub is None or hub.asked_at is not None or known_facts(observed) is not None or not _is_useful(spec):
        return Steps()
    endpoint, uri = spec.model.network.hub_endpoint, spec.model.uri
    return Steps(actions=(AskHub(uri=uri, endpoint=endpoint, reason="memory is planned before the first replica"),))


def hold_until(observed: Observed, members: Sequence[Member], now: datetime) -> datetime | None:
    """Until when the first pod waits for the hub's answer at most; None: it does not."""
    hub, status = observed.hub, observed.service.status
    if hub is None or hub.asked_at is None or hub.is_done or members or status.capacity is not None:
        return None
    until = hub.asked_at + HOLD
    return until if now < until else None


def _is_useful(spec: InferenceServiceSpec) -> bool:
    if not spec.model.uri.startswith("hf://") or spec.model.shape is not None:
        return False
    # A variable names another hub, perhaps by a Secret: the name of a private model must not go to the public one.
    containers = spec.template.spec.containers
    variables = [*spec.runtime.env, *(one for container in containers for one in container.env)]
    if any(variable["name"] == "HF_ENDPOINT" for variable in variables):
        return False
    gpu, pool = spec.resources.gpu, spec.runtime.kv_cache.fixed_bytes
    if gpu.count:
        return bool(gpu.product) and find_gpu(gpu.product) is not None and pool is None
    return pool is not None and "memory" in spec.resources.limits
