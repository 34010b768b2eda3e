"""The next step of an adapter on one replica, for everything that the replica may say."""

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from slipway_api import names
from slipway_api.lora_adapter import AdapterPodStatus, LoRAAdapter, PodState
from slipway_api.runtime_api import AdapterInfo
from slipway_operator.core.adapter.calls import (
    ListAdapters,
    LoadAdapter,
    ProbeAdapter,
    RouteAdapter,
    UnloadAdapter,
    UnrouteAdapter,
)
from slipway_operator.core.adapter.observed import AdapterObserved, AdapterPod, Base, Listing, Outcome
from slipway_operator.core.adapter.plan import plan
from slipway_operator.core.adapter.steps import MOST_ATTEMPTS, backoff, counted, unwanted_step, wanted_step
from tests.builders import T0

NOW = T0 + timedelta(seconds=30)


def an_adapter(uri: str = "file:///sailor", *, deleted_at: datetime | None = None, **spec: Any) -> LoRAAdapter:
    return LoRAAdapter.model_validate(
        {
            "metadata": {
                "name": "sailor",
                "namespace": "demo",
                "uid": "u",
                "generation": 1,
                "finalizers": [names.FINALIZER],
                "deletionTimestamp": deleted_at,
            },
            "spec": {"baseRef": {"name": "chat"}, "source": {"uri": uri}, **spec},
        }
    )


def info(state: str = "host", name: str = "sailor", version: str | None = None, **facts: Any) -> AdapterInfo:
    version = an_adapter().version if version is None else version
    return AdapterInfo(name=name, state=state, digest="sha256:d", version=version, uri="file:///sailor", **facts)


def a_pod(*infos: AdapterInfo, lists: bool = True, **facts: Any) -> AdapterPod:
    listing = Listing(at=NOW, boot_id="boot", restarts=0, adapters={one.name: one for one in infos})
    return AdapterPod(**{"name": "chat-0", "uid": "p", "ready": True, "listing": listing if lists else None} | facts)


def seen(*pods: AdapterPod, adapter: LoRAAdapter | None = None, **facts: Any) -> AdapterObserved:
    base = Base(name="chat", uid="s", desired=1, has_room=True)
    return AdapterObserved(**{"adapter": adapter or an_adapter(), "base": base, "pods": pods} | facts)


def entry(state: PodState = PodState.LOADING, **facts: Any) -> AdapterPodStatus:
    return AdapterPodStatus(name="chat-0", state=state, **facts)


NEXT = f"sailor.next-{an_adapter().version}"
OLD = info(version="00000000")
PROBED = frozenset({("boot", "sha256:d")})

TABLE = [
    ("its list is not known", a_pod(lists=False), ListAdapters),
    ("the container was restarted since it listed", a_pod(info(), restarts=1), ListAdapters),
    ("a newer sample has another boot id", a_pod(info(), boot_id="new", sampled_at=NOW + timedelta(1)), ListAdapters),
    ("it has nothing", a_pod(), LoadAdapter),
    ("its load failed", a_pod(info("failed")), LoadAdapter),
    ("it loads", a_pod(info("loading")), None),
    ("it is loaded", a_pod(info()), ProbeAdapter),
    ("it was evicted to disk, which is as good", a_pod(info("disk")), ProbeAdapter),
    ("it answered its probe", a_pod(info(), probed=PROBED), RouteAdapter),
    ("a probe of an earlier boot says nothing", a_pod(info(), probed=frozenset({("old", "sha256:d")})), ProbeAdapter),
    ("it is routed", a_pod(info(), routed=True), None),
    ("it is routed and gone", a_pod(routed=True), UnrouteAdapter),
    ("it is routed and failed", a_pod(info("failed"), routed=True), UnrouteAdapter),
    ("an older version serves", a_pod(OLD, routed=True), LoadAdapter),
    ("the new version is loaded beside it", a_pod(OLD, info(name=NEXT), routed=True), ProbeAdapter),
    ("the new version answered", a_pod(OLD, info(name=NEXT), routed=True, probed=PROBED), LoadAdapter),
    ("the new version took over", a_pod(info(), info(name=NEXT), routed=True), UnloadAdapter),
    ("only pin differs", a_pod(info(pinned=True), routed=True), LoadAdapter),
    ("a call is under way", a_pod(info(), busy=True), None),
    ("it is not ready", a_pod(info(), ready=False), None),
]


@pytest.mark.capability("ML-2", "ML-9")
@pytest.mark.parametrize(("pod", "call"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_next_step_of_a_replica_that_should_have_it(pod, call):
    step = wanted_step(seen(pod), pod, entry(), NOW)

    assert type(step.call) is (call or type(None))
    assert (step.entry.state is PodState.LOADED) == (pod.ready and pod.routed and call in (None, UnloadAdapter))


def test_a_new_version_is_loaded_under_a_name_of_its_own_until_it_has_answered():
    beside = wanted_step(seen(old := a_pod(OLD, routed=True)), old, entry(), NOW).call
    flip = a_pod(OLD, info(name=NEXT), routed=True, probed=PROBED)

    assert isinstance(beside, LoadAdapter)
    assert beside.load_as == NEXT
    assert wanted_step(seen(flip), flip, entry(), NOW).call.load_as == "sailor"  # type: ignore[union-attr]


def test_leaving_goes_off_the_route_waits_for_routers_and_unloads():
    since = {"p": NOW}
    routed, loaded = a_pod(info(), routed=True), a_pod(info())
    draining = a_pod(info("draining"))

    assert isinstance(unwanted_step(seen(routed), routed, NOW).call, UnrouteAdapter)  # type: ignore[union-attr]
    waits = unwanted_step(seen(loaded, unrouted=since), loaded, NOW)
    assert waits is not None
    assert (waits.call, waits.again_at) == (None, NOW + timedelta(seconds=5))
    later = NOW + timedelta(seconds=5)
    assert isinstance(unwanted_step(seen(loaded, unrouted=since), loaded, later).call, UnloadAdapter)  # type: ignore[union-attr]
    assert unwanted_step(seen(draining, unrouted=since), draining, later) is not None
    assert unwanted_step(seen(draining, unrouted=since), draining, NOW + timedelta(seconds=30)) is None
    assert unwanted_step(seen(empty := a_pod()), empty, NOW) is None


def failed(pod: AdapterPod, at: datetime, reason: str = "DownloadFailed") -> AdapterPod:
    outcome = Outcome(at=at, version=an_adapter().version, ok=False, reason=reason, message="no")
    return replace(pod, outcome=outcome)


@pytest.mark.capability("ML-4")
def test_failures_back_off_and_end():
    known, last, waits = entry(), None, []
    for number in range(MOST_ATTEMPTS):
        at = NOW + timedelta(minutes=10 * number)
        known = counted(known, failed(a_pod(), at), an_adapter(), last)
        assert counted(known, failed(a_pod(), at), an_adapter(), at) == known, "counted once"
        last = at
        waits.append((known.not_before - at).total_seconds() if known.not_before else None)

    assert waits == [6, 11, 21, 41, 81, 161, 301, 301, 301, None]
    assert (known.state, known.attempts) == (PodState.FAILED, MOST_ATTEMPTS)
    assert backoff(1) == timedelta(seconds=5)


@pytest.mark.parametrize("reason", ["DigestMismatch", "RankTooLarge", "CapacityExceeded", "EngineRejected"])
def test_what_a_repetition_cannot_mend_is_not_repeated(reason):
    known = counted(entry(), failed(a_pod(), NOW, reason), an_adapter(), None)

    assert known.state is PodState.FAILED
    assert wanted_step(seen(pod := a_pod()), pod, known, NOW).call is None


def test_a_replica_that_does_not_answer_is_asked_for_ever():
    known = entry()
    for number in range(3 * MOST_ATTEMPTS):
        known = counted(known, failed(a_pod(), NOW + timedelta(hours=number), ""), an_adapter(), None)

    assert known.state is PodState.UNREACHABLE
    assert known.not_before is not None


def test_a_success_forgets_failures():
    ok = Outcome(at=NOW, version=an_adapter().version, ok=True, seconds=0.25)
    known = counted(
        entry(PodState.RETRYING, attempts=3, message="no"), replace(a_pod(), outcome=ok), an_adapter(), None
    )

    assert (known.attempts, known.message, str(known.load_seconds)) == (None, "", "0.25")


@pytest.mark.capability("ML-2")
@pytest.mark.parametrize("answers", [True, False])
def test_a_deletion_ends_with_or_without_its_replicas(answers):
    adapter = an_adapter(deleted_at=NOW)
    pod = a_pod(info("draining"), lists=answers, silent_since=None if answers else NOW)
    begun = plan(seen(pod, adapter=adapter, unrouted={"p": NOW}), NOW + timedelta(seconds=6))
    late = plan(seen(pod, adapter=adapter, unrouted={"p": NOW}), NOW + timedelta(seconds=66))

    assert not any(type(action).__name__ == "RemoveFinalizer" for action in begun.actions)
    assert [type(action).__name__ for action in late.actions] == ["RemoveFinalizer"]


@pytest.mark.capability("ML-2")
def test_a_large_base_makes_bounded_calls_and_a_bounded_status():
    """500 replicas: the status never lists them all, and a pass starts no more than 20 calls."""
    pods = tuple(a_pod(name=f"chat-{number}", uid=f"p{number}") for number in range(500))
    first = plan(seen(*pods), NOW)
    done = tuple(replace(pod, listing=a_pod(info()).listing, routed=True) for pod in pods)
    settled = plan(seen(*done), NOW)

    assert len(first.actions) == 20
    assert first.status is not None
    assert len(first.status.pods) == 64
    assert settled.actions == ()
    assert settled.status is not None
    assert settled.status.loaded == "500/500"
    assert settled.status.pods == ()
    assert len(settled.status.model_dump_json()) < 3000


def test_the_same_facts_give_the_same_plan_and_a_settled_one_the_same_status():
    pod = a_pod(info(bytes=10, rank=4), routed=True)
    first = plan(seen(pod), NOW)
    assert first.status is not None
    adapter = an_adapter().model_copy(update={"status": first.status})
    again = plan(seen(pod, adapter=adapter, entries=first.entries, written_at=NOW), NOW + timedelta(hours=1))

    assert plan(seen(pod), NOW) == first
    assert again.status == first.status
    assert again.events == ()
