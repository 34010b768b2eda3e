"""Chooses the engine that the revision of a spec pins: by the Engine as it is now, or by the stored revision. Pure.

While the Engine is missing or unreadable, nothing new is decided about it: a revision that is stored goes on, with its
lost replicas rebuilt from the record, and no other takes its place.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from slipway_api.conditions import Reason
from slipway_api.engine_fields import SLIPWAY
from slipway_operator.core.engines import PinnedEngine, describe_missing, find_lacking
from slipway_operator.core.installation import Defaults
from slipway_operator.core.observed import Observed
from slipway_operator.core.profiles import apply_profile
from slipway_operator.core.service.rollout.revision import Revision, find_stored


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenEngine:
    """The engine of the revision that the spec asks for."""

    pinned: PinnedEngine | None = None
    """None: our own runtime, or there is a fault."""
    fault: str = ""
    """Why the Engine cannot be followed; empty: it can."""
    reason: Reason = Reason.ENGINE_NOT_FOUND
    """The reason of conditions for the fault."""
    is_recorded: bool = False
    """Whether the engine comes from a stored revision, because there is a fault."""

    @property
    def stops(self) -> str:
        """The fault, if nothing may be changed because of it; empty: the plan goes on."""
        return "" if self.is_recorded else self.fault

    def reason_of(self, fault: str) -> Reason:
        """The reason of conditions for a fault of the service."""
        return self.reason if fault == self.fault else Reason.INVALID_SPEC


def choose_engine(observed: Observed, stored: Sequence[Revision]) -> ChosenEngine:
    """Choose it; `stored` are the revisions whose records can be read."""
    spec, seen = observed.service.spec, observed.engine
    name = spec.runtime.engine
    if name == SLIPWAY:
        return ChosenEngine()
    recorded = find_stored(observed.service, stored)
    if seen is None or seen.spec is None:
        pinned = recorded.engine if recorded is not None else None
        if plain := find_plain_engine(pinned, observed.defaults):
            return ChosenEngine(fault=plain, reason=Reason.ENGINE_WITHOUT_TLS)
        return ChosenEngine(pinned=pinned, fault=describe_missing(name, seen), is_recorded=pinned is not None)
    agent_image = observed.defaults.agent_image
    if not agent_image:
        fault = f"the installation names no image of slipway-agent, which engine {name} needs: set agent.image"
        return ChosenEngine(fault=fault, reason=Reason.INVALID_SPEC)
    pinned = PinnedEngine(name=name, spec=seen.spec, agent_image=agent_image)
    if plain := find_plain_engine(pinned, observed.defaults):
        return ChosenEngine(fault=plain, reason=Reason.ENGINE_WITHOUT_TLS)
    if lacking := find_lacking(apply_profile(spec), pinned):
        return ChosenEngine(fault=lacking, reason=Reason.INVALID_SPEC)
    return ChosenEngine(pinned=pinned)


def find_engine_fault(chosen: ChosenEngine, target: Revision, defaults: Defaults) -> tuple[Reason, str] | None:
    """Why the Engine cannot be followed, or why the revision that is rolled to gets no replica."""
    if chosen.fault:
        return chosen.reason, chosen.fault
    plain = find_plain_engine(target.engine, defaults)
    return (Reason.ENGINE_WITHOUT_TLS, plain) if plain else None


def find_plain_engine(engine: PinnedEngine | None, defaults: Defaults) -> str:
    """Why no replica of this engine may be created while internal TLS is on; empty: it may.

    An engine answers on the serving port itself, and without `spec.tls` it would answer in plain text.
    """
    if engine is None or engine.spec.tls is not None or not defaults.internal_tls:
        return ""
    return (
        f"internalTLS.enabled of the chart is true, and Engine {engine.name} of this revision has no spec.tls: it "
        "would answer in plain text. Add to the Engine the flags for certificate and key, use the engine slipway, or "
        "serve it by a release without internalTLS"
    )
