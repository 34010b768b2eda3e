"""Decides under which name the gateway serves a service: its served name, unless an older service has it already.

The gateway orders services by the same function; the condition RouteReady informs the owner of the younger service.
"""

from slipway_api.conditions import ConditionStatus, Reason
from slipway_api.seniority import older_first
from slipway_operator.core.observed import Observed


def route_condition(observed: Observed, ready: int) -> tuple[ConditionStatus, Reason, str]:
    """Status, reason and message of the condition RouteReady."""
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
    sentence = f"the gateway serves it as {served_name!r}"
    if ready:
        return ConditionStatus.TRUE, Reason.ROUTED, sentence
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
