"""Decides whether a service is planned while its ServiceTemplates cannot be applied. Pure.

Its stored revisions go on with what was inherited: lost replicas are rebuilt, and it scales. A revision that is not
stored waits, because a part of its spec is not known.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from slipway_api.conditions import Reason
from slipway_api.rollout_spec import RolloutStrategy
from slipway_api.spec_rules import CANARY_RENAME
from slipway_operator.core.engines import PinnedEngine
from slipway_operator.core.observed import Observed
from slipway_operator.core.service.rollout.revision import Revision, resolve


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedTemplates:
    """What the templates of a service forbid."""

    stops: str = ""
    """The fault because of which nothing may be changed; empty: the plan goes on."""
    reason: Reason = Reason.TEMPLATE_NOT_FOUND
    """The reason of conditions for the fault."""
    runs_on: tuple[Reason, str] | None = None
    """The fault while the service runs on with what it has inherited before."""


def check_templates(observed: Observed, stored: Sequence[Revision], engine: PinnedEngine | None) -> CheckedTemplates:
    """Check them; `stored` are the revisions whose records can be read."""
    service, found = observed.service, observed.inheritance
    if found.fault:
        image = observed.defaults.runtime_image if engine is None else engine.spec.image
        asked = resolve(service, image, stored, engine)
        if found.is_recorded and asked.spec is not None:
            return CheckedTemplates(runs_on=(found.reason, found.fault))
        return CheckedTemplates(stops=found.fault, reason=found.reason)
    if "rollout" in (found.blocks or ()) and service.spec.rollout.strategy is RolloutStrategy.CANARY:
        stable = next((one.spec for one in stored if one.hash == service.status.current_revision), None)
        if stable is not None and stable.model.served_name != service.spec.model.served_name:
            (name,) = (one.name for one in found.templates if "rollout" in one.blocks)
            fault = f"{CANARY_RENAME} (spec.rollout is from ServiceTemplate {name}): set spec.rollout in the service"
            return CheckedTemplates(stops=fault, reason=Reason.INVALID_SPEC)
    return CheckedTemplates()
