"""One namespace that the API server refuses never stops the others (review/operator-users.md 1)."""

import asyncio
from collections.abc import Set

import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from slipway_kube.access import ReadAccess
from slipway_kube.errors import Forbidden
from slipway_kube.informer import Informer
from slipway_kube.objects import Pod
from slipway_kube.resources import PODS
from tests.fakes import FakeApiServer
from tests.kube.kit import a_pod, running
from tests.operator.virtual_time import run_in_virtual_time

pytestmark = pytest.mark.capability("OP-17")

NAMESPACES = ("a", "b", "c", "d")
subsets = st.sets(st.sampled_from(NAMESPACES))


def refuse(server: FakeApiServer, namespaces: Set[str], status: int = 403) -> None:
    """From now on, lists and watches of these namespaces are refused, and of no other one."""
    server.faults.clear()
    for namespace in namespaces:
        server.fail(path=f"/namespaces/{namespace}/pods", status=status, times=10**9)


@settings(max_examples=40)
@given(at_start=subsets, later=subsets, status=st.sampled_from([403, 404]))
def test_every_readable_namespace_is_current_whatever_the_others_are(at_start, later, status):
    async def story() -> None:
        server = FakeApiServer()
        for namespace in NAMESPACES:
            server.put(PODS, a_pod("old", namespace))
        informer = Informer(server.client(), PODS, Pod, namespaces=NAMESPACES, clock=asyncio.get_running_loop().time)
        refuse(server, at_start, status)
        async with running(informer):
            await asyncio.sleep(60)
            assert informer.synced.is_set() == (set(at_start) < set(NAMESPACES))
            assert set(informer.access.namespaces) == set(at_start)
            assert {namespace for namespace, _name in informer.cache} == set(NAMESPACES) - set(at_start)
            await asyncio.wait_for(informer.refresh(), timeout=1)  # a refused namespace delays no new leader

            refuse(server, later, status)
            server.drop_watches()
            for namespace in NAMESPACES:
                server.put(PODS, a_pod("new", namespace))
            await asyncio.sleep(120)

            assert set(informer.access.namespaces) == set(later)
            current = {namespace for namespace, name in informer.cache if name == "new"}
            assert current == set(NAMESPACES) - set(later)
            seen = set(NAMESPACES) - (set(at_start) & set(later))
            assert {namespace for namespace, name in informer.cache if name == "old"} == seen, "what was seen stays"
            assert informer.age() < 120, "a server that refuses is not silent"
            assert await informer.drift() == 0

            refuse(server, set())
            await asyncio.sleep(60)
            assert len(informer.cache) == 2 * len(NAMESPACES)
            assert not informer.access.refused
            assert informer.synced.is_set()

    run_in_virtual_time(story())


def test_a_refused_namespace_is_logged_once_and_when_it_is_back():
    async def story() -> None:
        server = FakeApiServer()
        informer = Informer(server.client(), PODS, Pod, namespaces=("a", "b"), clock=asyncio.get_running_loop().time)
        refuse(server, {"b"})
        with structlog.testing.capture_logs() as logs:
            async with running(informer):
                await asyncio.sleep(3600)
                tries = sum("/namespaces/b/pods" in request.path for request in server.requests)
                refuse(server, set())
                await asyncio.sleep(60)
        assert 3600 / 30 < tries < 3600 / 10, "it is tried again, at most every 30 s"
        loud = [(one["log_level"], one["namespace"]) for one in logs if one["log_level"] != "debug"]
        assert loud.count(("warning", "b")) == 1
        assert loud.count(("info", "b")) == 2, "the watch's own line at the first refusal, and the return"
        assert informer.access.describe() == ""

    run_in_virtual_time(story())


def test_one_refusal_at_the_start_does_not_make_a_namespace_empty():
    """RBAC reaches the API server's authorizer a moment after the RoleBinding is created."""

    async def story() -> None:
        server = FakeApiServer()
        server.put(PODS, a_pod("a", "a"))
        server.put(PODS, a_pod("b", "b"))
        server.fail(path="/namespaces/b/pods", status=403, times=1)
        informer = Informer(server.client(), PODS, Pod, namespaces=("a", "b"), clock=asyncio.get_running_loop().time)
        async with running(informer):
            await informer.synced.wait()
            assert len(informer.cache) == 2

    run_in_virtual_time(story())


def test_the_description_names_resources_and_namespaces():
    access = ReadAccess()
    access.refuse("pods", "team-b", Forbidden(403, "no"))
    access.refuse("inferenceservices", "team-b", Forbidden(403, "no"))
    access.refuse("warmpools", "", Forbidden(403, "no"))
    assert access.describe() == (
        "cannot list warmpools in the cluster; cannot list inferenceservices, pods in namespace team-b"
    )
    assert access.refused_in("team-b") == {"pods", "inferenceservices", "warmpools"}
    assert access.refused_in("team-a") == {"warmpools"}
    assert access.namespaces == ("team-b",)
