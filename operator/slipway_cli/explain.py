"""Explains a service as plain data: its state, its last scaling decision, its memory and cost. Pure.

`main` prints the same data as tables for people and as JSON for `-o json`.
"""

from typing import Any, Final

from slipway_api.conditions import ConditionType, find_condition
from slipway_api.engine_fields import SLIPWAY
from slipway_api.gpu_catalogue import GPUFacts, find_gpu
from slipway_api.inference_service import InferenceService, InferenceServiceSpec
from slipway_api.memory import GIB, DoesNotFit, Fits, footprint
from slipway_api.runtime_spec import Dtype
from slipway_api.types import parse_quantity
from slipway_api.words import count
from slipway_operator.core.profiles import apply_profile
from slipway_operator.core.service.model.fit import check_fit, missing_on_host, model_shape, needs_of, planned_dtype
from slipway_operator.core.service.status.advice import find_advice

HOURS_OF_A_MONTH: Final = 730


def explain_status(service: InferenceService) -> dict[str, Any]:
    """Where a service stands: conditions, replicas, revisions and their shares of the traffic."""
    status = service.status
    ready = find_condition(status.conditions, ConditionType.READY)
    return {
        "name": service.metadata.name,
        "model": status.served_name or service.served_name,
        "url": status.url,
        "ready": ready.status.value if ready else "Unknown",
        "reason": ready.reason if ready else "NotObserved",
        "message": ready.message if ready else "the operator has not looked at it yet",
        "upToDate": status.observed_generation == service.metadata.generation,
        "replicas": {
            "desired": status.desired_replicas,
            "ready": status.ready_replicas,
            "draining": status.draining_replicas,
            "all": status.replicas,
        },
        "revisions": [
            {
                "hash": one.hash,
                "role": _role(one.hash, status.current_revision, status.update_revision),
                "weight": one.weight,
                "ready": one.ready,
                "image": one.image,
            }
            for one in status.revisions
        ],
        "inherits": [one.to_json() for one in status.templates],
        "slo": _explain_slo(service),
        "cost": status.cost.to_json() if status.cost is not None else None,
        "conditions": [
            {"type": one.type, "status": one.status.value, "reason": one.reason, "message": one.message}
            for one in status.conditions
        ],
        "pendingUpgrade": status.pending_upgrade.to_json() if status.pending_upgrade else None,
    }


def _explain_slo(service: InferenceService) -> dict[str, Any] | None:
    """The objectives and what is measured of them, without the counts behind; None: the spec has none."""
    slo, found = service.spec.slo, service.status.slo
    if slo is None:
        return None
    condition = find_condition(service.status.conditions, ConditionType.WITHIN_SLO)
    measured = found.to_json() if found is not None else {}
    measured.pop("periods", None)
    return {**measured, "windowDays": slo.window_days, "state": condition.reason if condition else "NotObserved"}


def explain_scaling(service: InferenceService) -> dict[str, Any]:
    """Why a service has the number of replicas that it has: the last decision, its numbers, and its limits."""
    status, policy = service.status, service.spec.autoscaling
    condition = find_condition(status.conditions, ConditionType.SCALING_ACTIVE)
    decided = status.autoscaling
    return {
        "name": service.metadata.name,
        "desired": status.desired_replicas,
        "decidedBy": "autoscaling" if service.fixed_replicas is None else "spec.replicas",
        "limits": {"min": policy.min_replicas, "max": policy.max_replicas} if policy else None,
        "state": condition.reason if condition else "",
        "because": condition.message if condition else f"spec.replicas asks for {service.fixed_replicas}",
        "recommended": decided.recommended_replicas if decided else None,
        "limitedBy": decided.limited_by if decided else "",
        "metrics": [
            {
                "type": signal.type,
                "value": str(signal.value) if signal.value is not None else None,
                "target": str(signal.target),
                "replicas": signal.samples,
            }
            for signal in (decided.signals if decided else ())
        ],
        "history": [
            {"time": one.time.isoformat(), "from": one.from_, "to": one.to, "reason": one.reason}
            for one in (decided.history if decided else ())
        ],
    }


def explain_plan(
    service: InferenceService, *, gpu_hour_cost: float = 0.0, replicas: int | None = None
) -> dict[str, Any]:
    """Memory, concurrency and cost of a manifest, by the arithmetic that the operator uses before the first pod.

    The arithmetic describes our own runtime. For another engine the plan has the replicas, GPUs and cost only.
    """
    spec = apply_profile(service.spec)
    gpu = spec.resources.gpu
    facts = find_gpu(gpu.product) if gpu.product else None
    shape = model_shape(spec)
    fit = check_fit(spec)
    least, most = _range(service, replicas)
    is_ours = spec.runtime.engine == SLIPWAY
    result: dict[str, Any] = {
        "name": service.metadata.name,
        "fits": _fits(spec, fit),
        "message": _verdict(service, fit),
        "dtype": planned_dtype(spec).value if is_ours else None,
        "gpu": {"product": facts.name if facts else gpu.product, "perReplica": gpu.count},
        "maxNumSeqs": spec.runtime.max_num_seqs,
        "maxNumBatchedTokens": spec.runtime.max_num_batched_tokens,
        "advice": [event.message for event in find_advice(service)],
    }
    if shape is not None and is_ours:
        taken = footprint(shape, needs_of(spec))
        result["memoryGiB"] = {
            "weights": round(taken.weights / GIB, 2),
            "adapters": round(taken.adapters / GIB, 2),
            "reserve": round(taken.reserve / GIB, 2),
            "of": _memory_gib(spec, facts),
        }
    if isinstance(fit, Fits):
        result["kvCache"] = {
            "bytesPerToken": fit.bytes_per_token,
            "tokens": fit.kv_tokens,
            "requestsOfFullLength": fit.max_sequences,
        }
    result["replicas"] = {"min": least, "max": most}
    if gpu_hour_cost and gpu.count:
        a_month = gpu_hour_cost * gpu.count * HOURS_OF_A_MONTH
        result["costPerMonth"] = {"min": round(a_month * least, 2), "max": round(a_month * most, 2)}
    return result


def _fits(spec: InferenceServiceSpec, fit: Fits | DoesNotFit | None) -> bool | None:
    """Whether the model fits; None: too little is known. On a CPU nothing more than that can be said before a pod."""
    if spec.runtime.engine != SLIPWAY:
        return None
    if fit is None and not spec.resources.gpu.count and not missing_on_host(spec):
        return True
    return None if fit is None else isinstance(fit, Fits)


def _verdict(service: InferenceService, fit: Fits | DoesNotFit | None) -> str:
    if isinstance(fit, DoesNotFit):
        return fit.message
    if isinstance(fit, Fits):
        requests = count(fit.max_sequences, "concurrent request")
        return f"fits: {requests} of {count(service.spec.runtime.max_model_len, 'token')}"
    if (engine := service.spec.runtime.engine) != SLIPWAY:
        return (
            f"not calculated: engine {engine} plans its own memory; "
            "start one replica, and read the size of its KV cache in its log"
        )
    if not service.spec.resources.gpu.count:
        return _verdict_on_cpu(service.spec)
    return (
        "not known before the first pod: it needs spec.model.shape, spec.runtime.maxModelLen and "
        "a spec.resources.gpu.product of the catalogue"
    )


def _verdict_on_cpu(spec: InferenceServiceSpec) -> str:
    missing = missing_on_host(spec)
    if missing:
        return f"not known before the first pod: on a CPU it needs {' and '.join(f'spec.{field}' for field in missing)}"
    dtype = planned_dtype(spec)
    message = f"weights and KV cache fit spec.resources.limits.memory in {dtype.value}"
    if spec.runtime.dtype is Dtype.AUTO and dtype is Dtype.BF16:
        return f"{message}; a processor without AVX2 or NEON computes in fp32, which takes twice as much"
    return message


def _memory_gib(spec: InferenceServiceSpec, facts: GPUFacts | None) -> float | None:
    """The memory of one GPU, or without GPUs of the container; None: unknown."""
    if facts is not None:
        return round(facts.memory_bytes / GIB, 2)
    limit = None if spec.resources.gpu.count else spec.resources.limits.get("memory")
    return round(int(parse_quantity(str(limit))) / GIB, 2) if limit is not None else None


def _range(service: InferenceService, replicas: int | None) -> tuple[int, int]:
    if replicas is not None:
        return replicas, replicas
    if service.fixed_replicas is not None or service.spec.autoscaling is None:
        return service.fixed_replicas or 0, service.fixed_replicas or 0
    return service.spec.autoscaling.min_replicas, service.spec.autoscaling.max_replicas


def _role(hash: str, current: str, update: str) -> str:
    if hash == update:
        return "serving" if hash == current else "update"
    return "stable" if hash == current else "old"
