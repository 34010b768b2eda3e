"""A simulated base with replicas around one adapter, in virtual time: it executes plans, and fails on demand.

Calls end a second after they begin. The laws are checked after every pass: requests for the adapter are routed only to
replicas that answer as it, and an adapter that is to be unloaded is off the route before.
"""

from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from slipway_api.adapter_conditions import CONDITIONS, EVENTS
from slipway_api.lora_adapter import LoRAAdapter
from slipway_api.runtime_api import AdapterInfo
from slipway_operator.core.actions import AddFinalizer, Event, RemoveFinalizer
from slipway_operator.core.adapter.calls import (
    ListAdapters,
    LoadAdapter,
    ProbeAdapter,
    RouteAdapter,
    UnloadAdapter,
    UnrouteAdapter,
)
from slipway_operator.core.adapter.observed import (
    AdapterObserved,
    AdapterPod,
    Base,
    Listing,
    OnDemandAdapter,
    Outcome,
    Rival,
)
from slipway_operator.core.adapter.plan import AdapterPlan, plan
from tests.builders import T0

TICK = timedelta(seconds=1)
DOCUMENTED = {(kind.value, status.value, reason.value) for kind, status, reason, _ in CONDITIONS}


@dataclass
class SimulatedReplica:
    """One pod with a runtime."""

    name: str
    uid: str
    boot: int = 0
    ready: bool = True
    unready_since: datetime | None = None
    answers: bool = True
    refuses: str = ""
    broken_probe: bool = False
    routed: bool = False
    has: dict[str, AdapterInfo] = field(default_factory=dict)
    # What the operator knows.
    listing: Listing | None = None
    silent_since: datetime | None = None
    outcome: Outcome | None = None
    probed: frozenset[tuple[str, str]] = frozenset()
    call: Any = None
    list_call: Any = None

    @property
    def boot_id(self) -> str:
        return f"{self.uid}-{self.boot}"


class Simulation:
    """The world around one adapter."""

    def __init__(self, adapter: LoRAAdapter, replicas: int = 3) -> None:
        self.now = T0
        self.adapter: LoRAAdapter | None = adapter
        self.replicas: dict[str, SimulatedReplica] = {}
        self.base_is_there = True
        self.rival: Rival | None = None
        self.events: list[Event] = []
        self.told: set[tuple[str, str, str]] = set()
        self.writes = 0
        self.room = 0  # adapters that a replica keeps in memory; 0: not reported
        self.waiting = 0  # requests for the adapter, in mode OnDemand
        self.calls = 0
        self.memory: AdapterPlan | None = None
        self.due: datetime | None = T0
        self._number = 0
        for _ in range(replicas):
            self.add()

    def add(self) -> SimulatedReplica:
        self._number += 1
        name = f"chat-{self._number}"
        self.replicas[name] = SimulatedReplica(name, f"uid-{name}")
        self.wake()
        return self.replicas[name]

    def remove(self, name: str) -> None:
        del self.replicas[name]
        self.wake()

    def restart(self, name: str) -> None:
        one = self.replicas[name]
        one.boot += 1
        one.has.clear()
        one.call = one.list_call = None
        self.wake()

    def set_ready(self, name: str, ready: bool) -> None:
        one = self.replicas[name]
        one.ready, one.unready_since = ready, None if ready else self.now
        self.wake()

    def restart_operator(self) -> None:
        """All that was in memory is lost."""
        self.memory = None
        for one in self.replicas.values():
            one.listing = one.outcome = one.silent_since = one.call = one.list_call = None
            one.probed = frozenset()
        self.wake()

    def edit(self, **spec: Any) -> None:
        assert self.adapter is not None
        raw = self.adapter.model_dump(mode="json", by_alias=True, exclude_none=True)
        raw["spec"] |= spec
        raw["metadata"]["generation"] += 1
        self.adapter = LoRAAdapter.model_validate(raw)
        self.wake()

    def delete(self) -> None:
        assert self.adapter is not None
        metadata = self.adapter.metadata.model_copy(update={"deletion_timestamp": self.now})
        self.adapter = self.adapter.model_copy(update={"metadata": metadata})
        self.wake()

    def wake(self) -> None:
        self.due = self.now

    def run(self, seconds: int) -> None:
        """Let time pass."""
        for _ in range(seconds):
            self.now += TICK
            self._end_calls()
            for _ in range(20):
                if self.adapter is None or self.due is None or self.due > self.now:
                    break
                self._one_pass()

    def observed(self) -> AdapterObserved:
        assert self.adapter is not None
        memory = self.memory
        base = Base(name="chat", uid="s", desired=len(self.replicas), has_room=True)
        return AdapterObserved(
            adapter=self.adapter,
            base=base if self.base_is_there else None,
            rival=self.rival,
            on_demand=(OnDemandAdapter(name=self.adapter.adapter_name, waiting=self.waiting),),
            pods=tuple(self._pod(one) for one in self.replicas.values()) if self.base_is_there else (),
            entries=memory.entries if memory else None,
            counted=memory.counted if memory else {},
            unrouted=memory.unrouted if memory else {},
            written_at=memory.written_at if memory else None,
        )

    @property
    def serving(self) -> set[str]:
        return {name for name, one in self.replicas.items() if one.routed}

    def _pod(self, one: SimulatedReplica) -> AdapterPod:
        return AdapterPod(
            name=one.name,
            uid=one.uid,
            ready=one.ready,
            unready_since=one.unready_since,
            restarts=one.boot,
            routed=one.routed,
            listing=one.listing,
            silent_since=one.silent_since,
            probed=one.probed,
            outcome=one.outcome,
            busy=one.call is not None,
            is_listing=one.list_call is not None,
        )

    def _one_pass(self) -> None:
        observed = self.observed()
        made = plan(observed, self.now)
        assert made == plan(observed, self.now), "the same facts must give the same plan"
        self.due = None if made.requeue_after is None else self.now + timedelta(seconds=made.requeue_after)
        assert self.adapter is not None
        for action in made.actions:
            match action:
                case AddFinalizer(finalizer=finalizer):
                    metadata = self.adapter.metadata.model_copy(update={"finalizers": (finalizer,)})
                    self.adapter = self.adapter.model_copy(update={"metadata": metadata})
                case RemoveFinalizer():
                    self.adapter = None
                    self.events += made.events
                    return
                case ListAdapters():
                    self.replicas[action.name].list_call = action
                case _:
                    assert self.replicas[action.name].call is None, "one call at once"
                    self.replicas[action.name].call = action
                    self.calls += 1
        if made.status is not None:
            status = type(made.status).model_validate_json(
                made.status.model_dump_json(by_alias=True, exclude_none=True)
            )
            if status != self.adapter.status:
                self.writes += 1
                self.adapter = self.adapter.model_copy(update={"status": status})
            self.told |= {(one.type, one.status.value, one.reason) for one in status.conditions}
            assert self.told <= DOCUMENTED, self.told - DOCUMENTED
        self.events += made.events
        assert {event.reason for event in made.events} <= set(EVENTS)
        self.memory = made

    def _end_calls(self) -> None:
        for one in self.replicas.values():
            if one.list_call is not None:
                one.list_call = None
                if one.answers:
                    one.silent_since = None
                    one.listing = Listing(
                        at=self.now,
                        boot_id=one.boot_id,
                        restarts=one.boot,
                        adapters=dict(one.has),
                        max_cpu_adapters=self.room,
                    )
                else:
                    one.silent_since = one.silent_since or self.now
                self.wake()
            call, one.call = one.call, None
            if call is not None:
                self._end(one, call)
                self.wake()

    def _end(self, one: SimulatedReplica, call: Any) -> None:
        match call:
            case RouteAdapter():
                name = call.adapter
                assert name in one.has or one.listing is None or one.boot != one.listing.restarts, "it answers"
                one.routed = True
                return
            case UnrouteAdapter():
                one.routed = False
                return
        if not one.answers:
            if isinstance(call, LoadAdapter | ProbeAdapter):
                one.outcome = Outcome(at=self.now, version=call.version, ok=False, message="no answer")
            return
        match call:
            case LoadAdapter():
                if one.refuses:
                    one.outcome = Outcome(
                        at=self.now, version=call.version, ok=False, reason=one.refuses, message="refused"
                    )
                    return
                one.has[call.load_as] = AdapterInfo(
                    name=call.load_as,
                    state="host",
                    digest=f"sha256:{call.version}",
                    uri=call.uri,
                    version=call.version,
                    pinned=call.pinned,
                )
                one.outcome = Outcome(at=self.now, version=call.version, ok=True, seconds=1.0)
            case ProbeAdapter():
                if one.broken_probe:
                    one.outcome = Outcome(
                        at=self.now, version=call.version, ok=False, reason="EngineRejected", message="500"
                    )
                elif call.probed_as in one.has:
                    one.probed |= {(call.boot_id, call.digest)}
            case UnloadAdapter():
                is_last = call.unloaded_as == call.adapter
                assert not (is_last and one.routed), "off the route before it is unloaded"
                one.has.pop(call.unloaded_as, None)
        if one.listing is not None:
            one.listing = replace(one.listing, adapters=dict(one.has))
