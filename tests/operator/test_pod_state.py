"""The state of a pod is written by one module under a field manager of its own, so no apply drops another's fields."""

import ast
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path

import slipway_operator
from slipway_api import names
from slipway_kube.lease import NoRivals
from slipway_kube.resources import EVENTS, PODS
from slipway_kube.writer import Writer
from slipway_operator.controller.kinds import Key
from slipway_operator.controller.pod_state import PodStates, state_metadata
from tests.fakes import FakeApiServer, InProcessClient
from tests.operator.serving_cluster import ready
from tests.operator.simulated_cluster import NAMESPACE, simulated_cluster
from tests.operator.virtual_time import run_in_virtual_time

OPERATOR = Path(slipway_operator.__file__).parent
OF_PODS = {"FIELD_MANAGER_META", "FIELD_MANAGER_ADAPTERS"}
STARTED = datetime(2026, 1, 1, tzinfo=UTC)


def test_each_field_manager_of_pods_is_used_by_one_function():
    used: defaultdict[str, set[str]] = defaultdict(set)
    for path in OPERATOR.rglob("*.py"):
        tree = ast.parse(path.read_text())
        for function in ast.walk(tree):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            for node in ast.walk(function):
                if isinstance(node, ast.Attribute) and node.attr in OF_PODS:
                    used[node.attr].add(f"{path.name}:{function.name}")
                if isinstance(node, ast.keyword) and node.arg == "field_manager":
                    assert not isinstance(node.value, ast.Constant), f"{path.name}: a manager without a name"

    assert used == {
        "FIELD_MANAGER_META": {"pod_state.py:_apply"},
        "FIELD_MANAGER_ADAPTERS": {"adapter_routes.py:_write"},
    }


async def test_a_drain_and_its_end_leave_what_others_have_written_on_the_pod():
    server = FakeApiServer()
    labels = {names.LABEL_STATE: names.STATE_SERVING, names.LABEL_SERVICE: "chat"}
    server.put(PODS, {"metadata": {"name": "a", "namespace": "team", "labels": labels, "annotations": {"theirs": "x"}}})
    client = InProcessClient(server)
    writer = Writer(client, NoRivals())
    pod = server.get(PODS, "team", "a")
    assert pod is not None
    uid = pod["metadata"]["uid"]
    adapters = {"metadata": {"name": "a", "uid": uid, "annotations": {names.ANNOTATION_ADAPTERS: "sailor"}}}
    await writer.apply(PODS, "team", "a", adapters, field_manager=names.FIELD_MANAGER_ADAPTERS)
    states, key = PodStates(writer, lambda _namespace, _name: None), Key("InferenceService", "team", "chat")

    await states.mark_draining(key, "a", uid, started=STARTED, reason="scaling down")
    drained = server.get(PODS, "team", "a")
    await states.mark_serving(key, "a", uid)
    serving = server.get(PODS, "team", "a")

    assert drained is not None
    assert serving is not None
    others = {"theirs": "x", names.ANNOTATION_ADAPTERS: "sailor"}
    assert drained["metadata"]["annotations"] == others | {
        names.ANNOTATION_DRAIN_STARTED: "2026-01-01T00:00:00Z",
        names.ANNOTATION_DRAIN_REASON: "scaling down",
    }
    assert serving["metadata"]["annotations"] == others
    assert serving["metadata"]["labels"] == labels


def test_the_whole_state_of_a_pod_follows_from_its_drain():
    assert state_metadata() == {"labels": {names.LABEL_STATE: "serving"}}
    long = state_metadata(drain_started=STARTED, drain_reason="x" * 999)
    assert long["labels"] == {names.LABEL_STATE: "draining"}
    assert len(long["annotations"][names.ANNOTATION_DRAIN_REASON]) == 200


def test_a_pod_that_is_gone_before_its_drain_is_written_gets_no_event_of_a_drain(tmp_path):
    """Issue 26, OP-16: NotFound counted as a drain, so an event reported one that did not take place."""

    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            cluster.apply("chat", replicas=2)
            cluster.start_operator()
            await ready(cluster, replicas=2)
            marked: list[str] = []

            def remove(what: str) -> None:
                name = what.rpartition("/")[2].partition("?")[0]
                if "/pods/" in what and not marked and what.startswith("PATCH"):
                    marked.append(name)
                    cluster.server.delete(PODS, NAMESPACE, name)
                    cluster.server.finish_pod(NAMESPACE, name)

            cluster.on_write = remove
            cluster.apply("chat", replicas=1)
            await cluster.until(lambda: bool(marked), "the drain")
            await ready(cluster, replicas=1)
            await cluster.quiet(20)

            events = cluster.server.objects(EVENTS, NAMESPACE)
            about = [event["note"] for event in events if event["reason"] == "ReplicaDraining"]
            assert not [note for note in about if marked[0] in note]

    run_in_virtual_time(story())
