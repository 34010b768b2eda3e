"""Whatever the network and the server do, the cache ends up equal to the server, and its changes always add up."""

import asyncio
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from slipway_kube.informer import Informer, Pace
from slipway_kube.objects import Pod
from slipway_kube.resources import PODS
from tests.fakes import FakeApiServer
from tests.kube.kit import Listener, a_pod, cached_versions, versions
from tests.operator.virtual_time import VirtualLoop

NAMESPACES = ("a", "b", "elsewhere")
NAMES = ("p0", "p1", "p2", "p3", "p4")
OURS = {"app": "ours"}

pods = st.tuples(st.sampled_from(NAMESPACES), st.sampled_from(NAMES))
seconds = st.floats(0.0, 120.0)


def is_ours(pod: dict[str, Any]) -> bool:
    return pod["metadata"]["labels"].get("app") == "ours"


class InformerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner(loop_factory=VirtualLoop)
        self.server = FakeApiServer()

    @initialize(page_size=st.integers(1, 4), existing=st.sets(pods))
    def start(self, page_size: int, existing: set[tuple[str, str]]) -> None:
        for namespace, name in existing:
            self.put(namespace, name, OURS)
        self.runner.run(self.begin(page_size))

    async def begin(self, page_size: int) -> None:
        clock, client, pace = asyncio.get_running_loop().time, self.server.client(), Pace(page_size=page_size)
        self.all = Informer(client, PODS, Pod, pace=pace, clock=clock)
        self.some = Informer(
            client, PODS, Pod, pace=pace, clock=clock, namespaces=("a", "b"), label_selector="app=ours"
        )
        self.listeners = [Listener(self.all), Listener(self.some)]
        self.tasks = [asyncio.create_task(informer.run()) for informer in (self.all, self.some)]

    def put(self, namespace: str, name: str, labels: dict[str, str]) -> None:
        self.server.put(PODS, a_pod(name, namespace, labels=labels))

    @rule(pod=pods, ours=st.booleans(), note=st.integers(0, 3))
    def create_or_change(self, pod: tuple[str, str], ours: bool, note: int) -> None:
        self.put(*pod, (OURS if ours else {}) | {"note": str(note)})

    @rule(pod=pods)
    def delete(self, pod: tuple[str, str]) -> None:
        if self.server.get(PODS, *pod):
            self.server.delete(PODS, *pod)

    @rule(pod=pods)
    def replace_by_a_namesake(self, pod: tuple[str, str]) -> None:
        self.delete(pod)
        self.put(*pod, OURS)

    @rule(victims=st.sets(pods), namesake=st.booleans(), drop=st.booleans())
    def lose_history(self, victims: set[tuple[str, str]], namesake: bool, drop: bool) -> None:
        """Deletions that no watch will ever tell of, then a 410."""
        for pod in victims:
            if self.server.get(PODS, *pod):
                self.server.forget(PODS, *pod)
                if namesake:
                    self.put(*pod, OURS)
        self.server.compact()
        if drop:
            self.server.drop_watches()
        else:
            self.server.bookmark()

    @rule()
    def drop_watches(self) -> None:
        self.server.drop_watches()

    @rule()
    def stall_watches(self) -> None:
        self.server.stall_watches()

    @rule(count=st.integers(1, 5))
    def repeat_events(self, count: int) -> None:
        self.server.repeat(count)

    @rule()
    def bookmark(self) -> None:
        self.server.bookmark()

    @rule(status=st.sampled_from([0, 400, 401, 403, 404, 410, 429, 500, 503, 504]), times=st.integers(1, 4))
    def fail_requests(self, status: int, times: int) -> None:
        self.server.fail(status=status, times=times, retry_after=2 if status in (429, 503) else None)

    @rule(times=st.integers(1, 2))
    def hang_requests(self, times: int) -> None:
        self.server.fail(hang=True, times=times)

    @rule(down=st.booleans())
    def go_down_or_up(self, down: bool) -> None:
        self.server.down = down

    @rule(passed=seconds)
    def time_passes(self, passed: float) -> None:
        self.runner.run(asyncio.sleep(passed))

    @rule()
    def refresh(self) -> None:
        self.runner.run(self.all_refreshed())

    async def all_refreshed(self) -> None:
        try:
            async with asyncio.timeout(300):
                await asyncio.gather(self.all.refresh(), self.some.refresh())
        except TimeoutError:
            assert self.server.down
        else:
            is_refused = ("pods", "") in self.all.access.refused  # then the last cached objects stay
            if not is_refused and (not self.server.open_watches or not self.server.down):
                assert cached_versions(self.all).keys() == versions(self.server).keys()

    @rule(namespace=st.sampled_from(("a", "b")))
    def remove_a_role(self, namespace: str) -> None:
        """Until it settles, no list or watch of this namespace is answered otherwise."""
        self.server.fail(path=f"/namespaces/{namespace}/pods", status=403, times=10**9)

    @rule()
    def settle(self) -> None:
        self.server.down = False
        self.server.faults.clear()
        # Silence (≤ 90 s) on a stalled watch, then the longest pause (30 s), each twice over.
        self.runner.run(asyncio.sleep(240))
        assert cached_versions(self.all) == versions(self.server)
        assert cached_versions(self.some) == versions(
            self.server, lambda pod: is_ours(pod) and pod["metadata"]["namespace"] in ("a", "b")
        )
        assert self.all.age() < 120
        assert self.runner.run(self.all.drift()) == 0
        assert not self.all.access.refused
        assert not self.some.access.refused

    @invariant()
    def listeners_know_what_the_cache_knows(self) -> None:
        if hasattr(self, "listeners"):
            assert self.listeners[0].objects == dict(self.all.cache)
            assert self.listeners[1].objects == dict(self.some.cache)

    @invariant()
    def informers_live(self) -> None:
        if hasattr(self, "tasks"):
            assert not any(task.done() for task in self.tasks)

    def teardown(self) -> None:
        try:
            if hasattr(self, "tasks"):
                self.settle()
        finally:
            self.runner.close()


InformerMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=25, deadline=None)
TestInformer = InformerMachine.TestCase
