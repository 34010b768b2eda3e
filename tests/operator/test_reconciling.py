"""Whole operator processes against a cluster in virtual time: what a user applies comes true, and stays true."""

from dataclasses import replace

import pytest

from slipway_api import names
from slipway_kube.errors import Unreachable
from slipway_kube.resources import DISRUPTION_BUDGETS, EVENTS, INFERENCE_SERVICES, PODS, SERVICES
from tests.operator.serving_cluster import ready, serving_cluster
from tests.operator.simulated_cluster import NAMESPACE, SimulatedCluster, simulated_cluster
from tests.operator.virtual_time import run_in_virtual_time


@pytest.mark.capability("OP-1", "OP-2")
def test_an_applied_service_becomes_ready_pods_and_a_service(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            cluster.apply("chat", replicas=2)
            cluster.start_operator()
            await cluster.until(lambda: cluster.condition("chat", "Ready").get("status") == "True", "Ready")

            service = cluster.service("chat")
            assert len(cluster.serving("chat")) == 2
            for pod in cluster.pods("chat"):
                assert pod["metadata"]["ownerReferences"][0]["uid"] == service["metadata"]["uid"]
            assert cluster.server.get(SERVICES, NAMESPACE, "chat")
            assert service["metadata"]["finalizers"] == [names.FINALIZER]
            assert cluster.status("chat")["observedGeneration"] == service["metadata"]["generation"]
            assert cluster.status("chat")["readyReplicas"] == 2
            assert cluster.status("chat")["url"] == "http://gateway/v1"

    run_in_virtual_time(story())


def versions(cluster: SimulatedCluster) -> dict[str, str]:
    """Every child with its version: what somebody touched has another one."""
    children = [one for kind in (PODS, SERVICES, DISRUPTION_BUDGETS) for one in cluster.server.objects(kind, NAMESPACE)]
    return {one["metadata"]["uid"]: one["metadata"]["resourceVersion"] for one in children}


@pytest.mark.capability("OP-1")
def test_a_service_at_rest_causes_no_write_and_applying_it_again_neither(tmp_path):
    async def story() -> None:
        async with serving_cluster(tmp_path, replicas=2, quiet=10) as cluster:
            assert await cluster.quiet(120) == []

            cluster.apply("chat", replicas=2)

            assert await cluster.quiet(120) == []

    run_in_virtual_time(story())


@pytest.mark.capability("OP-1", "OP-7")
def test_a_new_operator_touches_nothing_that_is_as_it_should_be(tmp_path):
    async def story() -> None:
        async with serving_cluster(tmp_path, replicas=2, quiet=10) as cluster:
            (first,) = cluster.processes
            before, spec = versions(cluster), cluster.service("chat")["spec"]
            await first.stop()
            cluster.start_operator()
            await cluster.quiet(60)

            assert versions(cluster) == before
            assert cluster.service("chat")["spec"] == spec

    run_in_virtual_time(story())


@pytest.mark.parametrize("may_list", [True, False], ids=["lists them", "may not list them"])
def test_a_new_leader_lists_all_children_to_compare_them_and_asks_for_each_where_it_may_not_list(tmp_path, may_list):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            for number in range(5):
                cluster.apply(f"chat-{number}", replicas=1)
            first = cluster.start_operator()
            for number in range(5):
                await ready(cluster, f"chat-{number}", replicas=1)
            await cluster.quiet(10)
            await first.stop()
            before, asked = versions(cluster), len(cluster.server.requests)
            if not may_list:
                cluster.server.fail(method="GET", path=r"/(services|poddisruptionbudgets)$", status=403, times=100)
            second = cluster.start_operator()
            await cluster.until(lambda: second.manager.ready()[1].startswith("leading"), "the second operator to lead")
            await cluster.quiet(20)

            reads = [one.path for one in cluster.server.requests[asked:] if one.method == "GET"]
            single = [path for path in reads if "/services/" in path or "/poddisruptionbudgets/" in path]
            assert len(single) == (0 if may_list else 10), "one for each child that was not listed"
            assert versions(cluster) == before

    run_in_virtual_time(story())


@pytest.mark.capability("OP-7", "DD-1")
def test_the_number_of_replicas_follows_the_spec_up_and_down_and_the_spec_is_never_written(tmp_path):
    async def story() -> None:
        async with serving_cluster(tmp_path, replicas=1) as cluster:
            cluster.apply("chat", replicas=3)
            await ready(cluster, replicas=3)
            cluster.apply("chat", replicas=1)
            await ready(cluster, replicas=1)

            assert cluster.service("chat")["spec"]["replicas"] == 1
            assert cluster.status("chat")["desiredReplicas"] == 1
            assert not any(
                "/inferenceservices/chat" in one.path and one.method == "PUT" for one in cluster.server.requests
            )

    run_in_virtual_time(story())


def test_a_replica_drains_with_its_requests_before_it_is_deleted(tmp_path):
    async def story() -> None:
        async with serving_cluster(tmp_path, replicas=1) as cluster:
            [name] = cluster.serving("chat")
            cluster.runtimes[name].running = 2
            cluster.apply("chat", replicas=0)
            await cluster.until(lambda: cluster.runtimes[name].draining, "the drain")
            await cluster.quiet(15)

            assert [pod["metadata"]["name"] for pod in cluster.live("chat")] == [name], "it has requests to finish"

            cluster.runtimes[name].running = 0
            since = cluster.time()
            await cluster.until(lambda: not cluster.pods("chat"), "the end of the pod")

            assert cluster.time() - since < 10, "a drained replica goes at once, not at its deadline"

    run_in_virtual_time(story())


@pytest.mark.capability("AS-6")
def test_a_draining_replica_is_labelled_as_serving_only_after_its_runtime_accepts_again(tmp_path):
    async def story() -> None:
        async with serving_cluster(tmp_path, replicas=2) as cluster:
            before = set(cluster.serving("chat"))
            for name in before:
                cluster.runtimes[name].running = 2
            cluster.apply("chat", replicas=1)
            await cluster.until(lambda: any(one.draining for one in cluster.runtimes.values()), "the drain")
            [victim] = [name for name, one in cluster.runtimes.items() if one.draining]
            cluster.apply("chat", replicas=2)
            await ready(cluster, replicas=2)

            assert set(cluster.serving("chat")) == before, "the same replicas, and no other"
            assert set(cluster.runtimes[victim].state_at_undrain) == {names.STATE_DRAINING}
            [pod] = [one for one in cluster.pods("chat") if one["metadata"]["name"] == victim]
            assert names.ANNOTATION_DRAIN_STARTED not in pod["metadata"]["annotations"]
            assert names.ANNOTATION_DRAIN_REASON not in pod["metadata"]["annotations"]
            assert names.ANNOTATION_ADMIN_NONCE in pod["metadata"]["annotations"]
            await cluster.quiet(5)
            assert await cluster.quiet(60) == [], "and it rests"

    run_in_virtual_time(story())


@pytest.mark.capability("AS-6")
def test_a_replica_that_refuses_to_serve_again_is_replaced_and_never_routed_to(tmp_path):
    async def story() -> None:
        async with serving_cluster(tmp_path, replicas=2) as cluster:
            for name in cluster.serving("chat"):
                cluster.runtimes[name].running = 2
                cluster.runtimes[name].is_ending = True
            cluster.apply("chat", replicas=1)
            await cluster.until(lambda: any(one.draining for one in cluster.runtimes.values()), "the drain")
            [victim] = [name for name, one in cluster.runtimes.items() if one.draining]
            cluster.apply("chat", replicas=2)
            since = cluster.time()
            await cluster.until(lambda: len(cluster.serving("chat")) == 2, "another replica")

            assert victim not in cluster.serving("chat")
            assert cluster.time() - since < 20
            [pod] = [one for one in cluster.pods("chat") if one["metadata"]["name"] == victim]
            assert pod["metadata"]["labels"][names.LABEL_STATE] == names.STATE_DRAINING

    run_in_virtual_time(story())


def test_a_changed_model_surges_one_and_drains_one_until_all_are_new(tmp_path):
    async def story() -> None:
        async with serving_cluster(tmp_path, replicas=2) as cluster:
            old = set(cluster.serving("chat"))
            cluster.most_live_pods = 0
            cluster.apply("chat", model={"uri": "file:///models/other"})
            await cluster.until(lambda: old.isdisjoint(cluster.serving("chat")), "the last old replica to leave")
            await ready(cluster, replicas=2)

            assert cluster.most_live_pods <= 3
            assert cluster.status("chat")["currentRevision"] == cluster.status("chat")["updateRevision"]

    run_in_virtual_time(story())


def test_deleting_a_service_drains_its_replicas_and_leaves_nothing(tmp_path):
    async def story() -> None:
        async with serving_cluster(tmp_path, replicas=2) as cluster:
            for name in cluster.serving("chat"):
                cluster.runtimes[name].running = 1
            cluster.delete("chat")
            await cluster.until(lambda: all(one.draining for one in cluster.runtimes.values()), "both drains")
            await cluster.quiet(5)

            assert cluster.service("chat") is not None, "the finalizer holds it while requests run"

            for runtime in cluster.runtimes.values():
                runtime.running = 0
            await cluster.until(lambda: cluster.service("chat") is None, "the end of the service")
            await cluster.quiet(5)

            assert cluster.pods() == []
            assert cluster.server.objects(SERVICES, NAMESPACE) == []

    run_in_virtual_time(story())


def test_an_action_that_the_api_server_refuses_stands_in_the_status_until_it_succeeds(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            cluster.server.fail(method="POST", path="/pods$", status=403, message="exceeded quota: gpus", times=3)
            cluster.apply("chat", replicas=1)
            cluster.start_operator()
            await cluster.until(lambda: "exceeded quota" in str(cluster.status("chat").get("conditions")), "the reason")

            assert cluster.condition("chat", "Ready")["status"] != "True"

            await ready(cluster, replicas=1)

            assert "exceeded quota" not in str(cluster.status("chat")["conditions"])
            assert cluster.serving("chat")[0].endswith("-0-0"), "the name was never used: still attempt 0"

    run_in_virtual_time(story())


def test_a_pod_name_that_belongs_to_somebody_else_is_left_alone_and_the_next_one_is_used(tmp_path):
    async def story() -> None:
        async with serving_cluster(tmp_path, replicas=1) as cluster:
            (operator,) = cluster.processes
            [name] = cluster.serving("chat")
            await operator.stop()
            cluster.server.forget(PODS, NAMESPACE, name)
            foreign = {"name": name, "namespace": NAMESPACE, "labels": {"app": "somebody-else"}}
            cluster.server.put(PODS, {"metadata": foreign, "spec": {"nodeName": "node-b", "containers": []}})
            cluster.start_operator()
            await cluster.until(lambda: len(cluster.serving("chat")) == 1, "a replica under another name")

            assert cluster.serving("chat") != [name]
            assert cluster.server.get(PODS, NAMESPACE, name)["metadata"]["labels"] == {"app": "somebody-else"}

    run_in_virtual_time(story())


def test_a_refused_pod_is_tried_again_also_when_the_status_of_that_pass_could_not_be_written(tmp_path):
    async def story() -> None:
        async with serving_cluster(tmp_path, replicas=1) as cluster:
            refused = cluster.server.fail(method="POST", path=r"/pods$", status=403, message="exceeded quota")
            cut: list[str] = []

            def cut_the_status_after_the_refusal(what: str) -> None:
                if refused.times == 0 and "/chat/status" in what and not cut:
                    cut.append(what)
                    raise Unreachable("cut off")

            cluster.on_write = cut_the_status_after_the_refusal
            cluster.apply("chat", replicas=2)
            await cluster.until(lambda: bool(cut), "the refusal, and no status of it")

            await ready(cluster, replicas=2)

    run_in_virtual_time(story())


@pytest.mark.capability("OP-18")
def test_a_write_without_an_answer_is_named_in_status_from_the_second_time_on_and_the_pod_comes_when_it_is_answered(
    tmp_path,
):
    """review/operator-users.md 15: a POST that got no answer was in the log only."""

    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            broken = [True]

            def answer_no_post_of_a_pod(what: str) -> None:
                if broken[0] and what.startswith("POST") and what.endswith("/pods"):
                    raise Unreachable("Server disconnected")

            cluster.on_write = answer_no_post_of_a_pod
            cluster.apply("chat", replicas=1)
            cluster.start_operator()
            await cluster.until(
                lambda: "Server disconnected" in cluster.condition("chat", "Ready").get("message", ""), "the cause"
            )
            assert cluster.condition("chat", "Stalled") == {}
            assert "Server disconnected" in cluster.condition("chat", "Reconciling")["message"]

            broken[0] = False
            await ready(cluster, replicas=1)
            assert "Server disconnected" not in cluster.condition("chat", "Ready")["message"]

    run_in_virtual_time(story())


@pytest.mark.capability("OP-18")
def test_gateways_that_go_are_seen_by_services_at_rest(tmp_path):
    """review/shipping.md 3: a fixed number of idle replicas wakes nobody, so the gateways have to."""

    async def story() -> None:
        async with serving_cluster(tmp_path, replicas=1) as cluster:
            cluster.gateways = replace(cluster.gateways, answering=0)
            await cluster.until(lambda: cluster.condition("chat", "RouteReady")["reason"] == "NoGateway", "NoGateway")
            cluster.gateways = replace(cluster.gateways, answering=1)
            await cluster.until(lambda: cluster.condition("chat", "RouteReady")["reason"] == "Routed", "Routed")

    run_in_virtual_time(story())


def test_a_child_that_somebody_changed_is_healed_by_the_next_resync(tmp_path):
    async def story() -> None:
        async with serving_cluster(tmp_path, replicas=1) as cluster:
            cluster.server.delete(SERVICES, NAMESPACE, "chat")
            await cluster.until(lambda: bool(cluster.server.objects(SERVICES, NAMESPACE)), "the Service to come back")

    run_in_virtual_time(story())


def test_a_deletion_that_the_watch_missed_costs_one_pod_at_most_and_no_loop(tmp_path):
    async def story() -> None:
        async with serving_cluster(tmp_path, replicas=1) as cluster:
            (operator,) = cluster.processes
            # kopf begins anew with a list after a gap, and never tells of what was deleted in it.
            cluster.server.forget(INFERENCE_SERVICES, NAMESPACE, "chat")
            writes = await cluster.quiet(60)

            assert operator.manager.caches.known() == set()
            assert cluster.pods() == []
            assert len([write for write in writes if write.startswith("POST")]) <= 1

    run_in_virtual_time(story())


def test_a_change_that_the_watch_missed_is_found_by_the_next_resync_and_counted(tmp_path):
    async def story() -> None:
        async with serving_cluster(tmp_path, replicas=1, quiet=30) as cluster:
            (operator,) = cluster.processes
            operator.manager.caches.heard = lambda *_: None  # a watch that is open and tells nothing
            cluster.apply("chat", replicas=2)
            await ready(cluster, replicas=2)

            assert operator.metrics.drift._value.get() == 1

    run_in_virtual_time(story())


def test_decisions_become_events_about_the_service(tmp_path):
    async def story() -> None:
        async with serving_cluster(tmp_path, replicas=1, quiet=5) as cluster:
            events = cluster.server.objects(EVENTS, NAMESPACE)
            assert "ReplicaCreated" in {event["reason"] for event in events}
            assert all(event["regarding"]["name"] == "chat" for event in events)

    run_in_virtual_time(story())


@pytest.mark.capability("AS-1")
def test_load_on_the_replicas_scales_out_within_limits_and_back_in_when_it_ends(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            cluster.apply(
                "chat",
                autoscaling={
                    "minReplicas": 1,
                    "maxReplicas": 3,
                    "behavior": {"scaleDown": {"stabilizationWindowSeconds": 20, "periodSeconds": 5}},
                },
            )
            cluster.start_operator()
            await ready(cluster, replicas=1)
            [name] = cluster.serving("chat")
            cluster.runtimes[name].running, cluster.runtimes[name].waiting, cluster.runtimes[name].kv_usage = (
                8,
                12,
                0.97,
            )
            await cluster.until(lambda: len(cluster.serving("chat")) == 3, "three replicas")
            for runtime in cluster.runtimes.values():
                runtime.running, runtime.waiting, runtime.kv_usage = 0, 0, 0.0
            await cluster.until(lambda: len(cluster.pods("chat")) == 1, "one replica")

            history = cluster.status("chat")["autoscaling"]["history"]
            assert {(one["from"], one["to"]) for one in history} >= {(1, 3)} or len(history) >= 2

    run_in_virtual_time(story())
