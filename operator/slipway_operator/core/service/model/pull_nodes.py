"""Decides which nodes may run a replica, by the rules of the scheduler that a spec can use. Pure.

| of the pod                                  | of the node                                                    |
|---------------------------------------------|----------------------------------------------------------------|
| nodeSelector, resources.gpu.product         | its labels                                                     |
| required nodeAffinity                       | its labels and its name                                        |
| tolerations                                 | taints NoSchedule and NoExecute, without those of Kubernetes   |
| resources.gpu                               | the resource that a device plugin offers there at all          |

What changes from minute to minute (free memory, free GPUs, readiness) does not count: a node keeps what it has pulled.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from slipway_api import names
from slipway_api.inference_service import InferenceServiceSpec
from slipway_api.types import parse_quantity
from slipway_operator.core.installation import PlacementDefaults
from slipway_operator.core.pulls import PullNode
from slipway_operator.core.service.replicas.placement import fill_placement

_CONDITION_TAINTS: Final = "node.kubernetes.io/"  # of the node lifecycle: not ready, under pressure, cordoned


def nodes_for(
    spec: InferenceServiceSpec, nodes: Sequence[PullNode], defaults: PlacementDefaults
) -> tuple[PullNode, ...]:
    """The nodes on which a replica of this spec may be placed, by name."""
    gpu, overlay = spec.resources.gpu, fill_placement(spec.template.spec, defaults)
    selector = dict(overlay.node_selector)
    if gpu.count and gpu.product:
        selector[names.GPU_PRODUCT_LABEL] = gpu.product
    tolerations = pull_tolerations(spec, defaults)
    fit = [
        node
        for node in nodes
        if not node.is_leaving
        and all(node.labels.get(key) == value for key, value in selector.items())
        and (not gpu.count or _offered(node, gpu.resource_name) >= gpu.count)
        and _matches_affinity(node, overlay.affinity or {})
        and _is_tolerated(node, tolerations)
    ]
    return tuple(sorted(fit, key=lambda node: node.name))


def pull_tolerations(spec: InferenceServiceSpec, defaults: PlacementDefaults) -> list[dict[str, Any]]:
    """The tolerations of a pod that pulls: those of a replica, and the one that asking for a GPU adds to a pod."""
    gpu = spec.resources.gpu
    of_gpu = [{"key": gpu.resource_name, "operator": "Exists", "effect": "NoSchedule"}] if gpu.count else []
    return [*fill_placement(spec.template.spec, defaults).tolerations, *of_gpu]


def _is_tolerated(node: PullNode, tolerations: Sequence[Mapping[str, Any]]) -> bool:
    return all(
        any(_tolerates(toleration, key, value, effect) for toleration in tolerations)
        for key, value, effect in node.taints
        if effect in ("NoSchedule", "NoExecute") and not key.startswith(_CONDITION_TAINTS)
    )


def _offered(node: PullNode, resource: str) -> int:
    amount = node.allocatable.get(resource, "0")
    try:
        return int(amount) if amount.isdecimal() else int(parse_quantity(amount))
    except ValueError:
        return 0


def _tolerates(toleration: Mapping[str, Any], key: str, value: str, effect: str) -> bool:
    if toleration.get("effect") not in (None, "", effect):
        return False
    if toleration.get("operator") == "Exists":
        return toleration.get("key") in (None, "", key)
    return toleration.get("key") == key and (toleration.get("value") or "") == value


def _matches_affinity(node: PullNode, affinity: Mapping[str, Any]) -> bool:
    """Terms are alternatives, the expressions of one term are not."""
    required = (affinity.get("nodeAffinity") or {}).get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    terms = required.get("nodeSelectorTerms") or ()
    if not terms:
        return True
    fields = {"metadata.name": node.name}
    return any(
        (term.get("matchExpressions") or term.get("matchFields"))
        and all(_matches(one, node.labels) for one in term.get("matchExpressions") or ())
        and all(_matches(one, fields) for one in term.get("matchFields") or ())
        for term in terms
    )


def _matches(expression: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    value = labels.get(str(expression.get("key")))
    values = [str(one) for one in expression.get("values") or ()]
    match expression.get("operator"):
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt":
            return _number(value) > _number(values[0]) if value is not None and values else False
        case "Lt":
            return _number(value) < _number(values[0]) if value is not None and values else False
    return False


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.lstrip("-").isdecimal() else 0
