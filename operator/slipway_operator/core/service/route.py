"""Decides under which name the gateway serves a service, and whether a gateway is there to serve it.

The name is the served name, unless an older service has it already.

The gateway orders services by the same function; the condition RouteReady informs the owner of the younger service.
"""

from slipway_api.conditions import ConditionStatus, Reason
from slipway_api.seniority import older_first
from slipway_operator.core.observed import Observed
from slipway_operator.core.words import count


def route_condition(observed: Observed, ready: int, stalled: str = "") -> tuple[ConditionStatus, Reason, str]:
    """Status, reason and message of the condition RouteReady; `stalled`: why no replica can start, as Stalled says."""
    service = observed.service
    # Of a spec that cannot be read, the name that status recorded before still counts.
    served_name = (observed.fault and service.status.served_name) or service.served_name
    full_name = str(service.key)
    if (older := _older_namesake(observed)) is not None:
        return (
            ConditionStatus.FALSE,
            Reason.NAME_CONFLICT,
            f"the older InferenceService {older} is served as {served_name!r}, and this one only as {full_name!r}, "
            "except to tenants that may not use the older one; give one of the two another spec.model.servedName",
        )
    gateways = observed.gateways
    if gateways is not None and not gateways.answering:
        return (
            ConditionStatus.FALSE,
            Reason.NO_GATEWAY,
            f"0 of {count(gateways.running, 'running gateway')} answer the operator, so no client reaches the service; "
            f"see kubectl get pods -n {gateways.namespace} -l {gateways.selector}",
        )
    sentence = f"the gateway serves it as {served_name!r}"
    if ready:
        return ConditionStatus.TRUE, Reason.ROUTED, sentence
    if stalled:
        return ConditionStatus.FALSE, Reason.NO_READY_REPLICAS, f"{sentence} once a replica is ready; {stalled}"
    autoscaling = service.spec.autoscaling
    if autoscaling is not None and autoscaling.scale_to_zero is not None:
        return ConditionStatus.TRUE, Reason.ROUTED, f"{sentence}, and holds requests until a replica is ready"
    return ConditionStatus.FALSE, Reason.NO_READY_REPLICAS, f"{sentence} once a replica is ready"


def _older_namesake(observed: Observed) -> str | None:
    """The service that has the name already, or None when it is this one."""
    own, created_at = observed.service.key, observed.service.metadata.creation_timestamp
    seniority = {one.key: older_first(one.created_at, *one.key) for one in observed.namesakes}
    seniority[own] = older_first(created_at, *own)
    oldest = min(seniority, key=seniority.__getitem__)
    if oldest == own:
        return None
    return oldest.name if oldest.namespace == own.namespace else str(oldest)
