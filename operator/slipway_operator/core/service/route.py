"""Under which name the gateway leads to a service: its served name, unless an older service has it already.

The gateway follows the same rule of seniority; this is where the younger one's owner hears of it.
"""

from datetime import UTC, datetime
from typing import Final

from slipway_api.conditions import ConditionStatus, Reason
from slipway_operator.core.observed import Observed

# The API server always says when; without, an object is as old as can be.
LONG_AGO: Final = datetime.min.replace(tzinfo=UTC)


def route(observed: Observed, ready: int) -> tuple[ConditionStatus, Reason, str]:
    """What the condition RouteReady says."""
    service = observed.service
    # Of a spec that cannot be read, the name that the gateway was told before still counts.
    served_name = (observed.fault and service.status.served_name) or service.served_name
    full_name = str(service.key)
    if (elder := _elder(observed)) is not None:
        return (
            ConditionStatus.FALSE,
            Reason.NAME_CONFLICT,
            f"the older InferenceService {elder} is served as {served_name!r}, and this one only as {full_name!r}; "
            "give one of the two another spec.model.servedName",
        )
    sentence = f"the gateway serves it as {served_name!r}"
    if ready:
        return ConditionStatus.TRUE, Reason.ROUTED, sentence
    return ConditionStatus.FALSE, Reason.NO_READY_REPLICAS, f"{sentence} once a replica is ready"


def _elder(observed: Observed) -> str | None:
    """The service that has the name; of two created in the same second, the first by namespace and name."""
    mine = observed.service.key
    own = (observed.service.metadata.creation_timestamp or LONG_AGO, mine)
    first = min(((one.created_at or LONG_AGO, one.key) for one in observed.namesakes), default=own)
    if first >= own:
        return None
    elder = first[1]
    return elder.name if elder.namespace == mine.namespace else str(elder)
