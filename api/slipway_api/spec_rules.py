"""The rules between fields of `spec`: as CEL for the API server, and in Python where a field may come from a template.

The API server sees a service without its ServiceTemplates. If `spec.baseRefs` is set, it skips each rule that reads a
block which the service leaves out, and the operator checks the rule after it has merged the templates. Rules inside one
block need no second form: a block comes whole from one object, whose definition has checked it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from slipway_api.model_source import PRE_PULL_RULE
from slipway_api.types import Rule, parse_quantity

if TYPE_CHECKING:
    from slipway_api.inference_service import InferenceServiceSpec

_GPUS: Final = "(has(self.resources) ? self.resources.gpu.count : 1)"
_MOST_REPLICAS: Final = (
    "(has(self.autoscaling) ? self.autoscaling.maxReplicas : has(self.replicas) ? self.replicas : 1)"
)
_NO_MEMORY_LIMIT: Final = (
    "!has(self.resources) || !has(self.resources.limits) || !('memory' in self.resources.limits) || "
    "!isQuantity(string(self.resources.limits['memory']))"
)
_MEMORY_LIMIT: Final = "quantity(string(self.resources.limits['memory']))"


@dataclass(frozen=True, slots=True)
class MergedRule:
    """A rule over blocks that a service may inherit."""

    rule: Rule
    """For a service that inherits none of `blocks` from a template."""
    blocks: tuple[str, ...]
    """The inheritable blocks that the rule reads."""
    holds: "Callable[[InferenceServiceSpec], bool]"
    """The same for the merged spec."""

    def for_api_server(self) -> Rule:
        """The rule of the definition: it holds if a template may supply a block that it reads."""
        skipped = " || ".join(f"!has(self.{block})" for block in self.blocks)
        inherits = f"has(self.baseRefs) && size(self.baseRefs) > 0 && ({skipped})"
        return self.rule._replace(expression=f"{inherits} || ({self.rule.expression})")


def find_broken_rules(spec: "InferenceServiceSpec", blocks: Iterable[str]) -> list[MergedRule]:
    """The rules that a merged spec breaks, of those that read one of these blocks."""
    inherited = set(blocks)
    return [one for one in MERGED_RULES if inherited.intersection(one.blocks) and not one.holds(spec)]


def _is_below_memory_limit(text: str, spec: "InferenceServiceSpec") -> bool:
    """Whether a number of bytes is below resources.limits.memory; absent or unreadable values pass, as in CEL."""
    limit = spec.resources.limits.get("memory")
    if not text or limit is None:
        return True
    try:
        return parse_quantity(text) < parse_quantity(limit)
    except ValueError:
        return True


def _fits_matrix(spec: "InferenceServiceSpec") -> bool:
    return spec.resources.gpu.count in (0, spec.runtime.tensor_parallel_size)


def _pool_fits(spec: "InferenceServiceSpec") -> bool:
    return spec.resources.gpu.count != 0 or _is_below_memory_limit(spec.runtime.kv_cache.bytes, spec)


def _host_cache_fits(spec: "InferenceServiceSpec") -> bool:
    return _is_below_memory_limit(spec.runtime.kv_cache.host_bytes, spec)


def _has_one_scaler(spec: "InferenceServiceSpec") -> bool:
    scaling = spec.autoscaling
    return scaling is None or scaling.mode.value in ("External", "Advisory") or spec.replicas is None


def _budget_allows_a_replica(spec: "InferenceServiceSpec") -> bool:
    limit = spec.budget.max_gpus if spec.budget is not None else None
    return limit is None or spec.resources.gpu.count <= limit


def _budget_allows_replicas(spec: "InferenceServiceSpec") -> bool:
    limit = spec.budget.max_gpus if spec.budget is not None else None
    if limit is None or spec.autoscaling is not None or spec.replicas is None:
        return True
    return spec.replicas * spec.resources.gpu.count <= limit


def _surge_is_a_full_set(spec: "InferenceServiceSpec") -> bool:
    if spec.rollout.strategy.value != "BlueGreen":
        return True
    fixed = 1 if spec.replicas is None else spec.replicas
    most = spec.autoscaling.max_replicas if spec.autoscaling is not None else fixed
    return spec.rollout.rolling_update.max_surge >= most


def _quantized_has_gates(spec: "InferenceServiceSpec") -> bool:
    if spec.rollout.strategy.value not in ("Canary", "BlueGreen") or spec.runtime.quantization.value == "none":
        return True
    gates = spec.rollout.gates
    return gates is not None and (gates.golden is not None or bool(gates.smoke))


def _embeds_without_gates(spec: "InferenceServiceSpec") -> bool:
    return spec.runtime.task.value != "embed" or spec.rollout.gates is None


MERGED_RULES: Final = (
    MergedRule(
        Rule(
            f"{_GPUS} == 0 || self.runtime.tensorParallelSize == {_GPUS}",
            "resources.gpu.count must be 0 (CPU) or equal runtime.tensorParallelSize",
            ".resources.gpu.count",
        ),
        ("resources",),
        _fits_matrix,
    ),
    MergedRule(
        Rule(
            f"{_NO_MEMORY_LIMIT} || self.resources.gpu.count != 0 || !has(self.runtime.kvCache.bytes) || "
            f"!isQuantity(self.runtime.kvCache.bytes) || "
            f"quantity(self.runtime.kvCache.bytes).isLessThan({_MEMORY_LIMIT})",
            "runtime.kvCache.bytes must be below resources.limits.memory, because without a GPU the KV cache is "
            "part of the container's memory",
            ".runtime.kvCache.bytes",
        ),
        ("resources",),
        _pool_fits,
    ),
    MergedRule(
        Rule(
            f"{_NO_MEMORY_LIMIT} || !has(self.runtime.kvCache.hostBytes) || "
            f"!isQuantity(self.runtime.kvCache.hostBytes) || "
            f"quantity(self.runtime.kvCache.hostBytes).isLessThan({_MEMORY_LIMIT})",
            "runtime.kvCache.hostBytes must be below resources.limits.memory, because it is part of the container's "
            "memory",
            ".runtime.kvCache.hostBytes",
        ),
        ("resources",),
        _host_cache_fits,
    ),
    MergedRule(
        Rule(
            "!has(self.autoscaling) || self.autoscaling.mode in ['External', 'Advisory'] || !has(self.replicas)",
            "replicas must be absent where autoscaling decides; set one of the two, or autoscaling.mode: External or "
            "Advisory",
            ".replicas",
        ),
        ("autoscaling",),
        _has_one_scaler,
    ),
    MergedRule(
        Rule(
            f"!has(self.budget) || !has(self.budget.maxGPUs) || {_GPUS} <= self.budget.maxGPUs",
            "budget.maxGPUs must allow one replica: at least resources.gpu.count",
            ".budget.maxGPUs",
        ),
        ("budget", "resources"),
        _budget_allows_a_replica,
    ),
    MergedRule(
        Rule(
            "!has(self.budget) || !has(self.budget.maxGPUs) || has(self.autoscaling) || !has(self.replicas) || "
            f"self.replicas * {_GPUS} <= self.budget.maxGPUs",
            "replicas times resources.gpu.count must not exceed budget.maxGPUs",
            ".replicas",
        ),
        ("budget", "resources", "autoscaling"),
        _budget_allows_replicas,
    ),
    MergedRule(
        Rule(
            "!has(self.rollout) || self.rollout.strategy != 'BlueGreen' || "
            f"self.rollout.rollingUpdate.maxSurge >= {_MOST_REPLICAS}",
            "strategy BlueGreen starts a second full set: rollingUpdate.maxSurge must be at least the number of "
            "replicas (with autoscaling: maxReplicas)",
            ".rollout.rollingUpdate",
        ),
        ("rollout", "autoscaling"),
        _surge_is_a_full_set,
    ),
    MergedRule(
        Rule(
            "!has(self.rollout) || !(self.rollout.strategy in ['Canary', 'BlueGreen']) || "
            "self.runtime.quantization == 'none' || "
            "(has(self.rollout.gates) && (has(self.rollout.gates.golden) || "
            "(has(self.rollout.gates.smoke) && size(self.rollout.gates.smoke) > 0)))",
            "a quantized revision is promoted only with a gate result: add rollout.gates.smoke or rollout.gates.golden",
            ".rollout.gates",
        ),
        ("rollout",),
        _quantized_has_gates,
    ),
    MergedRule(
        Rule(
            "!has(self.rollout) || self.runtime.task != 'embed' || !has(self.rollout.gates)",
            "rollout.gates ask for text, which a service with runtime.task embed does not generate",
            ".rollout.gates",
        ),
        ("rollout",),
        _embeds_without_gates,
    ),
)

CANARY_RENAME: Final = (
    "strategy Canary cannot change model.servedName: requests are split between two revisions of one name; "
    "change the name with another strategy"
)

SPEC_RULES: Final = (
    *(one.for_api_server() for one in MERGED_RULES),
    Rule(
        "!has(self.model.shape) || self.model.shape.heads % self.runtime.tensorParallelSize == 0 && ("
        "self.model.shape.kvHeads % self.runtime.tensorParallelSize == 0 || "
        "self.runtime.tensorParallelSize % self.model.shape.kvHeads == 0)",
        "runtime.tensorParallelSize must divide model.shape.heads, and divide model.shape.kvHeads or be a multiple "
        "of it: each GPU holds whole heads, or a copy of one key-value head",
        ".runtime.tensorParallelSize",
    ),
    PRE_PULL_RULE,
    Rule(
        "self.runtime.engine == 'slipway' || !has(self.warmPool)",
        "warmPool is only for runtime.engine slipway: the pods of a pool run Slipway's runtime",
        ".warmPool",
    ),
    Rule(
        "self.runtime.engine == 'slipway' || !has(self.prePull)",
        "prePull is only for runtime.engine slipway: the pods that pull run Slipway's runtime",
        ".prePull",
    ),
    # With an inherited rollout, the operator compares with the record of the present revision.
    Rule(
        "!has(self.rollout) || self.rollout.strategy != 'Canary' || "
        "(has(self.model.servedName) ? self.model.servedName : '') == "
        "(has(oldSelf.model.servedName) ? oldSelf.model.servedName : '')",
        CANARY_RENAME,
        ".model.servedName",
    ),
)
