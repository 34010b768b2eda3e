"""The fake API server and the real one answer alike: the same tests run against both.

What the rest of the tests believe about Kubernetes is written down here, and checked.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import pytest

from slipway_kube import auth, errors
from slipway_kube.client import Client
from slipway_kube.informer import Informer
from slipway_kube.lease import Elector, NoRivals
from slipway_kube.objects import Pod
from slipway_kube.recorder import Recorder, reference
from slipway_kube.resources import CONFIG_MAPS, EVENTS, INFERENCE_SERVICES, LEASES, PODS, Resource
from slipway_kube.writer import Writer
from tests.fakes import FakeApiServer
from tests.kube.kit import a_pod, running

CRDS = Path(__file__).resolve().parents[2] / "crds"


@dataclass
class World:
    """One API server, fake or real, and a namespace of our own in it."""

    client: Client
    namespace: str
    is_real: bool

    def path(self, resource: Resource, name: str = "", subresource: str = "") -> str:
        return resource.path(self.namespace, name, subresource)

    async def get(self, resource: Resource, name: str) -> dict[str, Any]:
        return msgspec.json.decode(await self.client.get(self.path(resource, name)))

    async def create(self, resource: Resource, body: dict[str, Any]) -> dict[str, Any]:
        whole = {"apiVersion": resource.api_version, "kind": resource.kind} | body
        return msgspec.json.decode(await self.client.create(self.path(resource), whole))

    async def config_map(self, name: str, **data: str) -> dict[str, Any]:
        return await self.create(CONFIG_MAPS, {"metadata": {"name": name}, "data": data})

    async def pod(self, name: str, *, node: str = "") -> dict[str, Any]:
        body = a_pod(name, self.namespace, node=node, labels={"app": "conformance"})
        body["spec"] |= {"automountServiceAccountToken": False}
        return await self.create(PODS, body)

    async def service(self, name: str) -> dict[str, Any]:
        return await self.create(
            INFERENCE_SERVICES,
            {
                "metadata": {"name": name, "namespace": self.namespace},
                "spec": {"model": {"uri": "file:///opt/slipway/models/tiny"}},
            },
        )


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.apiserver)])
async def world(request) -> AsyncIterator[World]:
    if request.param == "fake":
        async with FakeApiServer() as server, Client(server.connection) as client:
            yield World(client, "team", is_real=False)
        return
    access = request.getfixturevalue("apiserver")
    access.kubectl("apply", "--server-side", "-f", CRDS)
    namespace = f"kube-{uuid4().hex[:8]}"
    async with Client(auth.load(str(access.kubeconfig))) as client:
        await client.create("/api/v1/namespaces", {"metadata": {"name": namespace}})
        account = {"metadata": {"name": "default"}}
        with suppress(errors.AlreadyExists):  # no controller may be there to make it
            await client.create(f"/api/v1/namespaces/{namespace}/serviceaccounts", account)
        await _served(client, INFERENCE_SERVICES)
        yield World(client, namespace, is_real=True)
        await client.delete(f"/api/v1/namespaces/{namespace}")


async def test_a_create_twice_is_already_exists(world):
    await world.config_map("x")
    with pytest.raises(errors.AlreadyExists):
        await world.config_map("x")


async def test_what_is_not_there_is_not_found(world):
    for attempt in (
        world.client.get(world.path(PODS, "nobody")),
        world.client.delete(world.path(PODS, "nobody")),
        world.client.merge_patch(world.path(PODS, "nobody"), {}),
        world.client.apply(
            world.path(INFERENCE_SERVICES, "nobody", "status"), _status("nobody", "True"), field_manager="a"
        ),
    ):
        with pytest.raises(errors.NotFound):
            await attempt


async def test_a_delete_with_another_uid_is_a_conflict(world):
    made = await world.config_map("x")
    with pytest.raises(errors.Conflict):
        await world.client.delete(world.path(CONFIG_MAPS, "x"), uid=str(uuid4()))
    await world.client.delete(world.path(CONFIG_MAPS, "x"), uid=made["metadata"]["uid"])
    with pytest.raises(errors.NotFound):
        await world.get(CONFIG_MAPS, "x")


async def test_a_delete_of_an_old_version_is_a_conflict_and_deletes_nothing(world):
    old = await world.config_map("x", a="1")
    path, uid = world.path(CONFIG_MAPS, "x"), old["metadata"]["uid"]
    await world.client.merge_patch(path, {"data": {"a": "2"}})
    with pytest.raises(errors.Conflict):
        await world.client.delete(path, uid=uid, resource_version=old["metadata"]["resourceVersion"])
    new = await world.get(CONFIG_MAPS, "x")
    await world.client.delete(path, uid=uid, resource_version=new["metadata"]["resourceVersion"])
    with pytest.raises(errors.NotFound):
        await world.get(CONFIG_MAPS, "x")


async def test_a_put_of_an_old_version_is_a_conflict(world):
    old = await world.config_map("x", a="1")
    path = world.path(CONFIG_MAPS, "x")
    await world.client.merge_patch(path, {"data": {"a": "2"}})
    with pytest.raises(errors.Conflict):
        await world.client.replace(path, old | {"data": {"a": "3"}})
    assert (await world.get(CONFIG_MAPS, "x"))["data"] == {"a": "2"}


async def test_a_failed_test_of_a_json_patch_is_invalid(world):
    await world.config_map("x", a="1")
    path = world.path(CONFIG_MAPS, "x")
    with pytest.raises(errors.Invalid):
        await world.client.json_patch(path, [{"op": "test", "path": "/data/a", "value": "9"}])
    await world.client.json_patch(
        path, [{"op": "test", "path": "/data/a", "value": "1"}, {"op": "replace", "path": "/data/a", "value": "2"}]
    )
    assert (await world.get(CONFIG_MAPS, "x"))["data"] == {"a": "2"}


async def test_a_merge_patch_removes_by_null(world):
    await world.config_map("x", a="1", b="2")
    await world.client.merge_patch(world.path(CONFIG_MAPS, "x"), {"data": {"a": None}})
    assert (await world.get(CONFIG_MAPS, "x"))["data"] == {"b": "2"}


async def test_a_write_that_changes_nothing_makes_no_version(world):
    made = await world.config_map("x", a="1")
    await world.client.merge_patch(world.path(CONFIG_MAPS, "x"), {"data": {"a": "1"}})
    assert (await world.get(CONFIG_MAPS, "x"))["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"]


async def test_a_dry_run_changes_nothing(world):
    await world.config_map("x", a="1")
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "y"}}
    await world.client.create(world.path(CONFIG_MAPS), body, dry_run=True)
    await world.client.delete(world.path(CONFIG_MAPS, "x"), dry_run=True)
    await world.client.merge_patch(world.path(CONFIG_MAPS, "x"), {"data": {"a": "2"}}, dry_run=True)
    assert (await world.get(CONFIG_MAPS, "x"))["data"] == {"a": "1"}
    with pytest.raises(errors.NotFound):
        await world.get(CONFIG_MAPS, "y")


async def test_an_apply_creates_then_owns_what_it_set(world):
    path = world.path(CONFIG_MAPS, "x")

    def manifest(**data: str) -> dict[str, Any]:
        return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "x"}, "data": data}

    await world.client.apply(path, manifest(a="1", b="1"), field_manager="one")
    await world.client.apply(path, manifest(c="1"), field_manager="two")
    with pytest.raises(errors.Conflict):
        await world.client.apply(path, manifest(a="2"), field_manager="two", force=False)
    await world.client.apply(path, manifest(a="1"), field_manager="one")  # lets go of b
    assert (await world.get(CONFIG_MAPS, "x"))["data"] == {"a": "1", "c": "1"}
    await world.client.apply(path, manifest(a="2", c="1"), field_manager="two", force=True)
    assert (await world.get(CONFIG_MAPS, "x"))["data"] == {"a": "2", "c": "1"}


async def test_an_apply_of_an_empty_map_takes_back_what_its_manager_set_and_nothing_else(world):
    await world.create(CONFIG_MAPS, {"metadata": {"name": "x", "annotations": {"theirs": "1"}}})
    path = world.path(CONFIG_MAPS, "x")

    async def annotations_after(manager: str, **metadata: Any) -> dict[str, str]:
        manifest = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "x"} | metadata}
        await world.client.apply(path, manifest, field_manager=manager, force=False)
        return (await world.get(CONFIG_MAPS, "x"))["metadata"]["annotations"]

    assert await annotations_after("one", annotations={"mine": "1"}) == {"theirs": "1", "mine": "1"}
    assert await annotations_after("one", annotations={}) == {"theirs": "1"}
    assert await annotations_after("two", annotations={}) == {"theirs": "1"}
    assert await annotations_after("one") == {"theirs": "1"}
    assert await annotations_after("two", annotations={"theirs": "1"}) == {"theirs": "1"}
    assert await annotations_after("one", annotations={}) == {"theirs": "1"}


async def test_labels_of_a_pod_are_applied_without_its_spec(world):
    await world.pod("x")
    patch = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "x", "namespace": world.namespace, "labels": {"state": "draining"}},
    }
    await world.client.apply(world.path(PODS, "x"), patch, field_manager="meta")
    assert (await world.get(PODS, "x"))["metadata"]["labels"] == {"app": "conformance", "state": "draining"}


async def test_a_pods_spec_cannot_be_changed(world):
    await world.pod("x")
    with pytest.raises(errors.Invalid):
        await world.client.merge_patch(world.path(PODS, "x"), {"spec": {"serviceAccountName": "other"}})


async def test_conditions_of_two_managers_live_side_by_side(world):
    await world.service("chat")
    path = world.path(INFERENCE_SERVICES, "chat", "status")
    await world.client.apply(path, _status("chat", "True", kind="Ready"), field_manager="one")
    await world.client.apply(path, _status("chat", "False", kind="Reconciling"), field_manager="two")
    await world.client.apply(path, _status("chat", "False", kind="Ready"), field_manager="one")
    conditions = (await world.get(INFERENCE_SERVICES, "chat"))["status"]["conditions"]
    assert {one["type"]: one["status"] for one in conditions} == {"Ready": "False", "Reconciling": "False"}


async def test_a_status_is_written_apart_from_the_rest(world):
    made = await world.service("chat")
    status = _status("chat", "True")
    await world.client.apply(world.path(INFERENCE_SERVICES, "chat", "status"), status, field_manager="one")
    await world.client.merge_patch(world.path(INFERENCE_SERVICES, "chat"), {"status": {"url": "http://no"}})
    now = await world.get(INFERENCE_SERVICES, "chat")
    assert now["status"]["conditions"][0]["status"] == "True"
    assert "url" not in now["status"]
    assert now["metadata"]["generation"] == made["metadata"]["generation"] == 1


async def test_a_changed_spec_is_a_new_generation(world):
    await world.service("chat")
    await world.client.merge_patch(world.path(INFERENCE_SERVICES, "chat"), {"metadata": {"labels": {"a": "b"}}})
    assert (await world.get(INFERENCE_SERVICES, "chat"))["metadata"]["generation"] == 1
    await world.client.merge_patch(world.path(INFERENCE_SERVICES, "chat"), {"spec": {"model": {"servedName": "tiny"}}})
    assert (await world.get(INFERENCE_SERVICES, "chat"))["metadata"]["generation"] == 2


async def test_a_finalizer_keeps_what_was_deleted(world):
    made = await world.service("chat")
    path = world.path(INFERENCE_SERVICES, "chat")
    await world.client.merge_patch(path, {"metadata": {"finalizers": ["slipway.dev/drain"]}})
    await world.client.delete(path, uid=made["metadata"]["uid"])
    kept = (await world.get(INFERENCE_SERVICES, "chat"))["metadata"]
    assert kept["deletionTimestamp"]
    assert kept["finalizers"] == ["slipway.dev/drain"]
    await world.client.merge_patch(path, {"metadata": {"finalizers": None}})
    with pytest.raises(errors.NotFound):
        await world.client.get(path)


async def test_an_unscheduled_pod_goes_at_once_and_a_placed_one_waits_for_its_kubelet(world):
    await world.pod("waiting")
    await world.client.delete(world.path(PODS, "waiting"))
    with pytest.raises(errors.NotFound):
        await world.get(PODS, "waiting")

    placed = await world.pod("placed", node="some-node")
    await world.client.delete(world.path(PODS, "placed"), uid=placed["metadata"]["uid"], grace_seconds=20)
    terminating = (await world.get(PODS, "placed"))["metadata"]
    assert (bool(terminating["deletionTimestamp"]), terminating["deletionGracePeriodSeconds"]) == (True, 20)
    await world.client.delete(world.path(PODS, "placed"), grace_seconds=0)  # what the kubelet does in the end
    with pytest.raises(errors.NotFound):
        await world.get(PODS, "placed")


async def test_pages_are_one_snapshot(world):
    for index in range(5):
        await world.config_map(f"m{index}", mine="yes")
    pages, selector = [], "metadata.name!=kube-root-ca.crt"
    async with aclosing(world.client.list_pages(world.path(CONFIG_MAPS), field_selector=selector, limit=2)) as listed:
        async for page in listed:
            pages.append(page)
            if len(pages) == 1:
                await world.client.delete(world.path(CONFIG_MAPS, "m4"))
    names = [msgspec.json.decode(item)["metadata"]["name"] for page in pages for item in page.items]
    assert names == ["m0", "m1", "m2", "m3", "m4"]
    assert len({page.metadata.resource_version for page in pages}) == 1


async def test_a_watch_tells_of_entering_and_leaving_the_selection(world):
    made = await world.config_map("x")
    path = world.path(CONFIG_MAPS, "x")
    version = made["metadata"]["resourceVersion"]
    told = []
    watch = world.client.watch(world.path(CONFIG_MAPS), resource_version=version, label_selector="app=ours")
    async with aclosing(watch) as lines:
        for labels in ({"app": "ours"}, {"app": "ours", "note": "1"}, {"app": "theirs"}):
            await world.client.merge_patch(path, {"metadata": {"labels": labels}})
        await world.client.merge_patch(path, {"metadata": {"labels": {"app": "ours"}}})
        await world.client.delete(path)
        async with asyncio.timeout(10):
            async for line in lines:
                told.append(msgspec.json.decode(line))
                if len(told) == 5:
                    break
    assert [event["type"] for event in told] == ["ADDED", "MODIFIED", "DELETED", "ADDED", "DELETED"]
    seen = [int(event["object"]["metadata"]["resourceVersion"]) for event in told]
    assert seen == sorted(set(seen)), "a deletion has a version of its own"


async def test_a_watch_tells_what_is_written_while_its_lines_are_read(world):
    await _write_while_lines_are_read(world)


async def test_so_does_the_watch_of_a_fake_in_this_process():
    """Its lines are not read ahead: an event between two of them was lost."""
    await _write_while_lines_are_read(World(FakeApiServer().client(), "team", is_real=False))


async def _write_while_lines_are_read(world: World) -> None:
    made = await world.config_map("x")
    path = world.path(CONFIG_MAPS, "x")
    for number in range(3):
        await world.client.merge_patch(path, {"data": {"number": str(number)}})
    told = []
    version = made["metadata"]["resourceVersion"]
    watch = world.client.watch(world.path(CONFIG_MAPS), resource_version=version, field_selector="metadata.name=x")
    async with aclosing(watch) as lines, asyncio.timeout(10):
        async for line in lines:
            told.append(msgspec.json.decode(line)["object"]["data"]["number"])
            if told == ["0"]:
                await world.client.merge_patch(path, {"data": {"number": "late"}})
            if len(told) == 4:
                break
    assert told == ["0", "1", "2", "late"]


async def test_an_informer_follows_pods(world):
    pods = Informer(world.client, PODS, Pod, namespaces=[world.namespace], label_selector="app=conformance")
    told: asyncio.Queue[str] = asyncio.Queue()
    pods.on_change(lambda change, old, new: told.put_nowait(change.value))
    async with running(pods), asyncio.timeout(20):
        await pods.synced.wait()
        await world.pod("x", node="some-node")
        assert await told.get() == "Added"
        assert pods.get(world.namespace, "x").status.phase == "Pending"
        status = {"phase": "Running", "podIP": "10.0.0.1", "podIPs": [{"ip": "10.0.0.1"}]}
        status["conditions"] = [{"type": "Ready", "status": "True"}]
        await world.client.merge_patch(world.path(PODS, "x", "status"), {"status": status})
        while not pods.get(world.namespace, "x").is_ready:
            await told.get()
        assert pods.get(world.namespace, "x").status.pod_ip == "10.0.0.1"
        await world.client.delete(world.path(PODS, "x"), grace_seconds=0)
        while pods.get(world.namespace, "x") is not None:
            await told.get()
        assert await pods.drift() == 0
        await pods.refresh()


async def test_a_lease_is_won_renewed_and_given_back(world):
    elector = Elector(world.client, namespace=world.namespace, name="op", identity="me")
    task = asyncio.create_task(elector.run())
    async with asyncio.timeout(20):
        await elector.leading.wait()
        first = (await world.get(LEASES, "op"))["spec"]
        assert first["holderIdentity"] == elector.identity
        while (await world.get(LEASES, "op"))["spec"]["renewTime"] == first["renewTime"]:  # noqa: ASYNC110
            await asyncio.sleep(0.2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert not (await world.get(LEASES, "op"))["spec"].get("holderIdentity")
        successor = Elector(world.client, namespace=world.namespace, name="op", identity="you")
        task = asyncio.create_task(successor.run())
        await successor.leading.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_events_are_taken_and_counted(world):
    made = await world.service("chat")
    chat = reference(
        INFERENCE_SERVICES.api_version, "InferenceService", world.namespace, "chat", made["metadata"]["uid"]
    )
    recorder = Recorder(Writer(world.client, NoRivals()), instance="operator-1")
    task = asyncio.create_task(recorder.run())
    for note in ("1 → 2 replicas", "1 → 2 replicas", "2 → 3 replicas"):
        recorder.record(chat, "ScaledUp", note, action="Scale")
    recorder.record(chat, "ImagePullFailed", "no such image", action="Start", warning=True)
    await asyncio.wait_for(recorder.flush(), 20)
    task.cancel()

    assert recorder.dropped == 0
    events = msgspec.json.decode(await world.client.get(world.path(EVENTS)))["items"]
    counts = {event["note"]: (event.get("series") or {}).get("count", 1) for event in events}
    assert counts == {"1 → 2 replicas": 2, "2 → 3 replicas": 1, "no such image": 1}


async def _served(client: Client, resource: Resource) -> None:
    """Return when the server has taken up the kind."""
    async with asyncio.timeout(30):
        while True:
            try:
                await client.get(resource.path())
            except (errors.NotFound, errors.TooManyRequests):  # not yet there, and "storage is (re)initializing"
                await asyncio.sleep(0.2)
            else:
                return


def _status(name: str, value: str, *, kind: str = "Ready") -> dict[str, Any]:
    condition = {"type": kind, "status": value, "reason": "Because", "message": "it is so"}
    condition["lastTransitionTime"] = "2026-01-01T00:00:00Z"
    return {
        "apiVersion": INFERENCE_SERVICES.api_version,
        "kind": INFERENCE_SERVICES.kind,
        "metadata": {"name": name},
        "status": {"conditions": [condition]},
    }
