"""One leader at a time, whatever happens to processes, replies and the network; and always one again soon."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slipway_kube.errors import LeadershipLost, NotLeader, Unreachable
from slipway_kube.lease import Elector
from slipway_kube.resources import LEASES, PODS
from slipway_kube.writer import Writer
from tests.fakes import FakeApiServer
from tests.kube.kit import a_pod
from tests.operator.virtual_time import run_in_virtual_time


class Candidate:
    """A process with an elector: it can be killed, frozen (SIGSTOP), cut off, and slow."""

    def __init__(
        self,
        server: FakeApiServer,
        name: str,
        *,
        latency: Callable[[], float] = lambda: 0.01,
        pod_uid: str = "",
        may_lead: Callable[[], bool] = lambda: True,
    ) -> None:
        self.client = server.client()
        self.latency = latency
        self.is_cut_off = False
        self.calls_in_flight = self.calls_unread = 0
        self.thawed = asyncio.Event()
        self.thawed.set()
        clock = asyncio.get_running_loop().time
        self.elector = Elector(
            self,
            namespace="ns",
            name="op",
            identity=name,
            incarnation=pod_uid,
            may_lead=may_lead,
            clock=clock,
            sleep=self.sleep,
        )
        self.writer = Writer(self.client, self.elector, clock=clock)
        self.task = asyncio.create_task(self.elector.run())

    async def get(self, path: str, *, timeout: float | None = None) -> bytes:
        return await self.call(lambda: self.client.get(path), timeout)

    async def create(self, path: str, body: Any, *, timeout: float | None = None) -> bytes:
        return await self.call(lambda: self.client.create(path, body), timeout)

    async def replace(self, path: str, body: Any, *, timeout: float | None = None) -> bytes:
        return await self.call(lambda: self.client.replace(path, body), timeout)

    async def call(self, send: Callable[[], Awaitable[bytes]], timeout: float | None) -> bytes:
        """Half of the latency before the server acts and half after; a call given up by us still arrives."""
        assert timeout is not None, "a call without a bound outlives the lease"
        self.calls_unread += 1
        try:
            return await self._call(send, timeout)
        finally:
            self.calls_unread -= 1

    async def _call(self, send: Callable[[], Awaitable[bytes]], timeout: float) -> bytes:

        async def travel() -> bytes:
            await asyncio.sleep(self.latency() / 2)
            if self.is_cut_off:
                raise Unreachable("cut off")
            reply = await send()
            await asyncio.sleep(self.latency() / 2)
            return reply

        self.calls_in_flight += 1

        def arrived(_: object) -> None:
            self.calls_in_flight -= 1

        journey = asyncio.ensure_future(travel())
        journey.add_done_callback(arrived)
        journey.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            async with asyncio.timeout(timeout):
                reply = await asyncio.shield(journey)
        except TimeoutError as exc:
            await self.thawed.wait()
            raise Unreachable("no answer in time") from exc
        await self.thawed.wait()
        return reply

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await self.thawed.wait()

    async def killed(self) -> None:
        """kill -9: nothing is released."""
        self.is_cut_off = True
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def stopped(self) -> None:
        """SIGTERM, after its workers have stopped."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


class Watchman:
    """Looks every 50 ms, and never sees two leaders."""

    def __init__(self, *candidates: Candidate) -> None:
        self.candidates = candidates
        self.task = asyncio.create_task(self.look())

    async def look(self) -> None:
        while True:
            leaders = [candidate.elector.identity for candidate in self.candidates if candidate.elector.is_leader()]
            assert len(leaders) < 2, f"two leaders: {leaders}"
            await asyncio.sleep(0.05)

    async def finish(self) -> None:
        await asyncio.sleep(0.05)
        assert not self.task.done() or self.task.exception() is None, self.task.exception()
        self.task.cancel()
        for candidate in self.candidates:
            candidate.task.cancel()
        await asyncio.gather(self.task, *(candidate.task for candidate in self.candidates), return_exceptions=True)


def story(tell: Callable[[FakeApiServer, Candidate, Candidate], Awaitable[None]]) -> Callable[[], None]:
    """A story of two candidates, the first of which leads, in virtual time and under a watchman's eyes."""

    async def told() -> None:
        server = FakeApiServer()
        first = Candidate(server, "first")
        await first.elector.leading.wait()
        second = Candidate(server, "second")
        watchman = Watchman(first, second)
        await asyncio.sleep(30)
        assert first.elector.is_leader()
        await tell(server, first, second)
        await watchman.finish()

    def test() -> None:
        run_in_virtual_time(told())

    test.__name__, test.__doc__ = getattr(tell, "__name__", "test"), tell.__doc__
    return test


def now() -> float:
    return asyncio.get_running_loop().time()


@story
async def test_a_killed_leader_is_replaced_within_fifteen_seconds(server, first, second):
    killed_at = now()
    await first.killed()
    await second.elector.leading.wait()
    assert now() - killed_at <= 15


@story
async def test_a_leader_that_stops_cleanly_is_replaced_within_a_second_and_a_call(server, first, second):
    stopped_at = now()
    await first.stopped()
    assert not first.elector.is_leader()
    await second.elector.leading.wait()
    assert now() - stopped_at <= 1.1
    assert server.get(LEASES, "ns", "op")["spec"]["leaseTransitions"] == 1


@story
async def test_a_leader_cut_off_fences_itself_before_anyone_else_leads(server, first, second):
    cut_at = now()
    first.is_cut_off = True
    with pytest.raises(LeadershipLost):
        await first.task
    assert now() - cut_at <= 7.5
    assert not second.elector.is_leader()
    await second.elector.leading.wait()
    assert now() - cut_at <= 15


@story
async def test_a_frozen_leader_writes_nothing_after_it_thaws(server, first, second):
    first.thawed.clear()
    await second.elector.leading.wait()
    await second.writer.create(PODS, "ns", a_pod("mine", "ns"))
    first.thawed.set()
    with pytest.raises(NotLeader):  # before it had any chance to notice
        await first.writer.create(PODS, "ns", a_pod("late", "ns"))
    with pytest.raises(LeadershipLost):
        await first.task
    assert [pod["metadata"]["name"] for pod in server.objects(PODS)] == ["mine"]


@story
async def test_a_short_outage_costs_no_leadership(server, first, second):
    server.down = True
    await asyncio.sleep(4)
    server.down = False
    await asyncio.sleep(30)
    assert first.elector.is_leader()


@story
async def test_a_lost_reply_to_a_renewal_costs_no_leadership(server, first, second):
    server.fail(method="PUT", lose_reply=True)
    await asyncio.sleep(30)
    assert first.elector.is_leader()
    assert server.get(LEASES, "ns", "op")["spec"]["leaseTransitions"] == 0


@story
async def test_a_deleted_lease_is_made_again_by_its_holder(server, first, second):
    server.delete(LEASES, "ns", "op")
    await asyncio.sleep(30)
    assert first.elector.is_leader()


@story
async def test_someone_who_edits_labels_does_not_prolong_a_dead_leaders_time(server, first, second):
    killed_at = now()
    await first.killed()
    while not second.elector.is_leader() and now() - killed_at < 60:
        lease = server.get(LEASES, "ns", "op")
        server.put(LEASES, lease | {"metadata": lease["metadata"] | {"labels": {"touched": str(now())}}})
        await asyncio.sleep(0.7)
    assert now() - killed_at <= 15


@story
async def test_the_lease_tells_who_leads_since_when(server, first, second):
    spec = server.get(LEASES, "ns", "op")["spec"]
    assert spec["holderIdentity"] == first.elector.identity
    assert spec["leaseDurationSeconds"] == 10
    assert spec["acquireTime"] < spec["renewTime"]


def test_the_first_of_several_at_an_empty_place_leads_alone():
    async def told() -> None:
        server = FakeApiServer()
        candidates = [Candidate(server, f"c{index}") for index in range(4)]
        watchman = Watchman(*candidates)
        await asyncio.sleep(20)
        assert sum(candidate.elector.is_leader() for candidate in candidates) == 1
        await watchman.finish()

    run_in_virtual_time(told())


@story
async def test_a_container_restarted_in_the_same_pod_takes_its_own_lease_back_at_once(server, first, second):
    await first.stopped()
    await second.stopped()
    third = Candidate(server, "third", pod_uid="uid-3")
    await third.elector.leading.wait()
    await third.killed()
    killed_at = now()
    other = Candidate(server, "third", pod_uid="another pod")
    restarted = Candidate(server, "third", pod_uid="uid-3")
    await restarted.elector.leading.wait()
    assert now() - killed_at <= 0.5
    assert not other.elector.is_leader()
    for candidate in (other, restarted):
        await candidate.stopped()


def test_a_candidate_that_may_not_lead_yet_looks_at_the_lease_so_that_its_time_runs():
    async def told() -> None:
        server = FakeApiServer()
        first = Candidate(server, "first")
        await first.elector.leading.wait()
        await asyncio.sleep(30)
        await first.killed()
        is_filled = asyncio.Event()
        second = Candidate(server, "second", may_lead=is_filled.is_set)
        await asyncio.sleep(20)
        assert not second.elector.is_leader()
        is_filled.set()
        filled_at = now()
        await second.elector.leading.wait()
        assert now() - filled_at <= 0.6
        await second.stopped()

    run_in_virtual_time(told())


events = st.lists(
    st.tuples(
        st.floats(0.0, 9.0),
        st.sampled_from(["cut", "mend", "freeze", "thaw", "down", "up", "lose", "hang", "delete", "stop"]),
        st.integers(0, 2),
    ),
    max_size=14,
)


@settings(max_examples=60, deadline=None)
@given(events=events, slowness=st.floats(0.0, 4.0), seed=st.integers(0, 2**16))
@example(events=[(0.0, "freeze", 1), (1.0, "delete", 0)], slowness=1.0, seed=5446)
def test_there_are_never_two_leaders_and_soon_one_when_the_trouble_ends(events, slowness, seed):
    async def told() -> None:
        chance = random.Random(seed)
        server = FakeApiServer()
        candidates = [
            Candidate(server, f"c{index}", latency=lambda: chance.uniform(0.0, slowness)) for index in range(3)
        ]
        watchman = Watchman(*candidates)
        for pause, what, whom in events:
            await asyncio.sleep(pause)
            candidate = candidates[whom]
            match what:
                case "cut" | "mend":
                    candidate.is_cut_off = what == "cut"
                case "freeze":
                    candidate.thawed.clear()
                case "thaw":
                    candidate.thawed.set()
                case "down" | "up":
                    server.down = what == "down"
                case "lose":
                    server.fail(method="PUT", lose_reply=True)
                case "hang":
                    server.fail(hang=True, commit=True)
                case "delete" if server.get(LEASES, "ns", "op") and not any(
                    # Nobody can help a lease that is deleted by hand while the reply to its creation is on its way,
                    # or waits for a process that is frozen.
                    other.elector.is_leader() or other.calls_in_flight or other.calls_unread
                    for other in candidates
                ):
                    server.delete(LEASES, "ns", "op")
                case "stop":
                    await candidate.stopped()
            restart_those_that_ended(candidates)
        server.down = False
        server.faults.clear()
        slow = slowness > 1.0
        for candidate in candidates:
            candidate.is_cut_off = False
            candidate.thawed.set()
            if slow:
                candidate.latency = lambda: 0.1
        for _ in range(30):
            await asyncio.sleep(1)
            restart_those_that_ended(candidates)
        assert sum(candidate.elector.is_leader() for candidate in candidates) == 1
        await watchman.finish()

    def restart_those_that_ended(candidates: list[Candidate]) -> None:
        for candidate in candidates:
            if candidate.task.done():
                candidate.task = asyncio.create_task(candidate.elector.run())

    run_in_virtual_time(told())
