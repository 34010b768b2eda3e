"""Reads the annotation by which a user starts a service that is scaled to zero, before any request comes. Pure.

`slipway.dev/wake` holds a moment. From then on, and for idleSeconds, the service counts as in use: at zero it starts
minReplicas or one, and it does not go to zero. After that the annotation is stale, and has no effect.
"""

from datetime import datetime, timedelta

from slipway_api import names
from slipway_api.inference_service import InferenceService
from slipway_api.moments import read_moment


def woken_at(service: InferenceService, now: datetime) -> datetime | None:
    """The moment, while it has an effect."""
    moment, policy = _moment(service), service.spec.autoscaling
    if moment is None or policy is None or policy.scale_to_zero is None:
        return None
    return moment if moment <= now < moment + timedelta(seconds=policy.scale_to_zero.idle_seconds) else None


def wakes_at(service: InferenceService, now: datetime) -> datetime | None:
    """The moment, where it is still to come."""
    moment = _moment(service)
    return moment if moment is not None and moment > now else None


def _moment(service: InferenceService) -> datetime | None:
    return read_moment(service.metadata.annotations.get(names.ANNOTATION_WAKE))
