"""The operator's table of contents: what to do about one service, given all that is seen of it and the time."""

from dataclasses import dataclass
from datetime import datetime

from slipway_api.inference_service import InferenceServiceStatus
from slipway_operator.core.actions import Action, Event
from slipway_operator.core.observed import Observed, PastRecommendation


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the shell shall do, in this order: actions (the first failure stops the list), status, events."""

    actions: tuple[Action, ...] = ()
    status: InferenceServiceStatus | None  # the whole status; None: write none (the service is gone). Write on change
    events: tuple[Event, ...] = ()
    requeue_after: float | None = None  # seconds until something changes by time alone; None: sleep until woken
    recommendations: tuple[PastRecommendation, ...] = ()  # hand back in the next `Observed`


def plan(observed: Observed, now: datetime) -> Plan:
    """Decide everything about one service. `now` is timezone-aware UTC."""
    raise NotImplementedError
