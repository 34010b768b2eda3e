"""Describes whether the gateway serves a service under its served name: the conditions RouteReady and Ready.

Who answers a name is decided by `slipway_api.model_names`, for operator and gateway alike.
"""

from slipway_api.conditions import ConditionStatus, Reason
from slipway_api.model_names import namespace_of
from slipway_operator.core.observed import Observed
from slipway_operator.core.words import count


def route_condition(observed: Observed, ready: int, stalled: str = "") -> tuple[ConditionStatus, Reason, str]:
    """Status, reason and message of the condition RouteReady; `stalled`: why no replica can start, as Stalled says.

    The gateway refuses requests immediately while the reason is CannotStart: they would wait in vain.
    """
    service = observed.service
    # Of a spec that cannot be read, the name that status recorded before still counts.
    served_name = (observed.fault and service.status.served_name) or service.served_name
    if sentence := name_conflict(observed):
        return ConditionStatus.FALSE, Reason.NAME_CONFLICT, sentence
    gateways = observed.gateways
    if gateways is not None and not gateways.answering:
        return (
            ConditionStatus.FALSE,
            Reason.NO_GATEWAY,
            f"0 of {count(gateways.running, 'running gateway answers', 'running gateways answer')} the operator, "
            "so no client reaches the service; "
            f"see kubectl get pods -n {gateways.namespace} -l {gateways.selector}",
        )
    sentence = f"the gateway serves it as {served_name!r}"
    if ready:
        return _with_fallback(observed, sentence)
    if stalled:
        return ConditionStatus.FALSE, Reason.CANNOT_START, f"requests are refused until a replica can start: {stalled}"
    autoscaling = service.spec.autoscaling
    if autoscaling is not None and autoscaling.scale_to_zero is not None:
        return _with_fallback(observed, f"{sentence}, and holds requests until a replica is ready")
    return ConditionStatus.FALSE, Reason.NO_READY_REPLICAS, f"{sentence} once a replica is ready"


def _with_fallback(observed: Observed, sentence: str) -> tuple[ConditionStatus, Reason, str]:
    """A service without its fallback serves; whoever counts on the fallback learns that there is none."""
    fallback = observed.service.spec.routing.fallback
    if fallback is None or not observed.lacks_fallback:
        return ConditionStatus.TRUE, Reason.ROUTED, sentence
    missing = f"{observed.service.key.namespace}/{fallback.service}"
    return (
        ConditionStatus.TRUE,
        Reason.FALLBACK_NOT_FOUND,
        f"{sentence}, but its fallback {missing} does not exist; create it, or correct or remove spec.routing.fallback",
    )


def name_conflict(observed: Observed) -> str:
    """Why the gateway does not serve the service under its served name, and the remedy; empty: it does."""
    conflict, own = observed.name_conflict, str(observed.service.key)
    if conflict is None:
        return ""
    if conflict.namespace:
        return (
            f"the name {conflict.name!r} belongs to the namespace {conflict.namespace}: only its objects answer it; "
            f"this service is served only as {own!r}; set another spec.model.servedName"
        )
    is_near = _is_near(observed)
    holder = conflict.key.partition("/")[2] if is_near else conflict.key
    exception = "" if is_near else ", except to tenants that may not use the older one"
    return (
        f"the older {conflict.kind} {holder} is served as {conflict.name!r}, and this service only as {own!r}"
        f"{exception}; set another spec.model.servedName, or rename the older one"
    )


def answers_nobody(observed: Observed) -> bool:
    """Whether no caller reaches the service under its served name.

    A tenant that may not use the object with the name does: for it, the name is this service's.
    """
    conflict = observed.name_conflict
    if conflict is None:
        return False
    return bool(conflict.namespace) or _is_near(observed) or not observed.defaults.has_tenants


def _is_near(observed: Observed) -> bool:
    """Whether the object with the name is in the service's own namespace."""
    conflict = observed.name_conflict
    return conflict is not None and namespace_of(conflict.key) == observed.service.key.namespace
