"""Whole operator processes against a cluster in virtual time: what a user applies comes true, and stays true."""

import pytest

from slipway_api import names
from slipway_kube.resources import DISRUPTION_BUDGETS, EVENTS, INFERENCE_SERVICES, PODS, SERVICES
from tests.operator.town import NAMESPACE, Town, a_town
from tests.operator.virtual_time import run_in_virtual_time


@pytest.mark.capability("OP-1", "OP-2")
def test_an_applied_service_becomes_ready_pods_and_a_service(tmp_path):
    async def story() -> None:
        async with a_town(tmp_path) as town:
            town.apply("chat", replicas=2)
            town.start_operator()
            await town.until(lambda: town.condition("chat", "Ready").get("status") == "True", "Ready")

            service = town.service("chat")
            assert len(town.serving("chat")) == 2
            for pod in town.pods("chat"):
                assert pod["metadata"]["ownerReferences"][0]["uid"] == service["metadata"]["uid"]
            assert town.server.get(SERVICES, NAMESPACE, "chat")
            assert service["metadata"]["finalizers"] == [names.FINALIZER]
            assert town.status("chat")["observedGeneration"] == service["metadata"]["generation"]
            assert town.status("chat")["readyReplicas"] == 2
            assert town.status("chat")["url"] == "http://gateway/v1"

    run_in_virtual_time(story())


async def ready(town: Town, name: str = "chat", *, replicas: int) -> None:
    await town.until(
        lambda: (
            len(town.serving(name)) == replicas == len(town.pods(name))
            and town.status(name).get("readyReplicas") == replicas
            and town.status(name).get("observedGeneration") == town.service(name)["metadata"]["generation"]
            and town.condition(name, "Reconciling").get("status") != "True"
        ),
        f"{replicas} ready replicas of {name}",
    )


def versions(town: Town) -> dict[str, str]:
    """Every child with its version: what somebody touched has another one."""
    children = [one for kind in (PODS, SERVICES, DISRUPTION_BUDGETS) for one in town.server.objects(kind, NAMESPACE)]
    return {one["metadata"]["uid"]: one["metadata"]["resourceVersion"] for one in children}


@pytest.mark.capability("OP-1")
def test_a_service_at_rest_causes_no_write_and_applying_it_again_neither(tmp_path):
    async def story() -> None:
        async with a_town(tmp_path) as town:
            town.apply("chat", replicas=2)
            town.start_operator()
            await ready(town, replicas=2)
            await town.quiet(10)

            assert await town.quiet(120) == []

            town.apply("chat", replicas=2)

            assert await town.quiet(120) == []

    run_in_virtual_time(story())


@pytest.mark.capability("OP-1", "OP-7")
def test_a_new_operator_touches_nothing_that_is_as_it_should_be(tmp_path):
    async def story() -> None:
        async with a_town(tmp_path) as town:
            town.apply("chat", replicas=2)
            first = town.start_operator()
            await ready(town, replicas=2)
            await town.quiet(10)
            before, spec = versions(town), town.service("chat")["spec"]
            await first.stop()
            town.start_operator()
            await town.quiet(60)

            assert versions(town) == before
            assert town.service("chat")["spec"] == spec

    run_in_virtual_time(story())


@pytest.mark.capability("OP-7", "DD-1")
def test_the_number_of_replicas_follows_the_spec_up_and_down_and_the_spec_is_never_written(tmp_path):
    async def story() -> None:
        async with a_town(tmp_path) as town:
            town.apply("chat", replicas=1)
            town.start_operator()
            await ready(town, replicas=1)
            town.apply("chat", replicas=3)
            await ready(town, replicas=3)
            town.apply("chat", replicas=1)
            await ready(town, replicas=1)

            assert town.service("chat")["spec"]["replicas"] == 1
            assert town.status("chat")["desiredReplicas"] == 1
            assert not any(
                "/inferenceservices/chat" in one.path and one.method == "PUT" for one in town.server.requests
            )

    run_in_virtual_time(story())


def test_a_replica_drains_with_its_requests_before_it_is_deleted(tmp_path):
    async def story() -> None:
        async with a_town(tmp_path) as town:
            town.apply("chat", replicas=1)
            town.start_operator()
            await ready(town, replicas=1)
            [name] = town.serving("chat")
            town.runtimes[name].running = 2
            town.apply("chat", replicas=0)
            await town.until(lambda: town.runtimes[name].draining, "the drain")
            await town.quiet(15)

            assert [pod["metadata"]["name"] for pod in town.live("chat")] == [name], "it has requests to finish"

            town.runtimes[name].running = 0
            since = town.time()
            await town.until(lambda: not town.pods("chat"), "the end of the pod")

            assert town.time() - since < 10, "a drained replica goes at once, not at its deadline"

    run_in_virtual_time(story())


def test_a_changed_model_surges_one_and_drains_one_until_all_are_new(tmp_path):
    async def story() -> None:
        async with a_town(tmp_path) as town:
            town.apply("chat", replicas=2)
            town.start_operator()
            await ready(town, replicas=2)
            old = set(town.serving("chat"))
            town.most_live_pods = 0
            town.apply("chat", model={"uri": "file:///models/other"})
            await town.until(lambda: old.isdisjoint(town.serving("chat")), "the last old replica to leave")
            await ready(town, replicas=2)

            assert town.most_live_pods <= 3
            assert town.status("chat")["currentRevision"] == town.status("chat")["updateRevision"]

    run_in_virtual_time(story())


def test_deleting_a_service_drains_its_replicas_and_leaves_nothing(tmp_path):
    async def story() -> None:
        async with a_town(tmp_path) as town:
            town.apply("chat", replicas=2)
            town.start_operator()
            await ready(town, replicas=2)
            for name in town.serving("chat"):
                town.runtimes[name].running = 1
            town.delete("chat")
            await town.until(lambda: all(one.draining for one in town.runtimes.values()), "both drains")
            await town.quiet(5)

            assert town.service("chat") is not None, "the finalizer holds it while requests run"

            for runtime in town.runtimes.values():
                runtime.running = 0
            await town.until(lambda: town.service("chat") is None, "the end of the service")
            await town.quiet(5)

            assert town.pods() == []
            assert town.server.objects(SERVICES, NAMESPACE) == []

    run_in_virtual_time(story())


def test_an_action_that_the_api_server_refuses_stands_in_the_status_until_it_succeeds(tmp_path):
    async def story() -> None:
        async with a_town(tmp_path) as town:
            town.server.fail(method="POST", path="/pods$", status=403, message="exceeded quota: gpus", times=3)
            town.apply("chat", replicas=1)
            town.start_operator()
            await town.until(lambda: "exceeded quota" in str(town.status("chat").get("conditions")), "the reason")

            assert town.condition("chat", "Ready")["status"] != "True"

            await ready(town, replicas=1)

            assert "exceeded quota" not in str(town.status("chat")["conditions"])
            assert town.serving("chat")[0].endswith("-0-0"), "the name was never used, so it is still the first attempt"

    run_in_virtual_time(story())


def test_a_pod_name_that_belongs_to_somebody_else_is_left_alone_and_the_next_one_is_used(tmp_path):
    async def story() -> None:
        async with a_town(tmp_path) as town:
            town.apply("chat", replicas=1)
            operator = town.start_operator()
            await ready(town, replicas=1)
            [name] = town.serving("chat")
            await operator.stop()
            town.server.forget(PODS, NAMESPACE, name)
            foreign = {"name": name, "namespace": NAMESPACE, "labels": {"app": "somebody-else"}}
            town.server.put(PODS, {"metadata": foreign, "spec": {"nodeName": "node-b", "containers": []}})
            town.start_operator()
            await town.until(lambda: len(town.serving("chat")) == 1, "a replica under another name")

            assert town.serving("chat") != [name]
            assert town.server.get(PODS, NAMESPACE, name)["metadata"]["labels"] == {"app": "somebody-else"}

    run_in_virtual_time(story())


def test_a_child_that_somebody_changed_is_healed_by_the_next_resync(tmp_path):
    async def story() -> None:
        async with a_town(tmp_path) as town:
            town.apply("chat", replicas=1)
            town.start_operator()
            await ready(town, replicas=1)
            town.server.delete(SERVICES, NAMESPACE, "chat")
            await town.until(lambda: bool(town.server.objects(SERVICES, NAMESPACE)), "the Service to come back")

    run_in_virtual_time(story())


def test_a_deletion_that_the_watch_missed_costs_one_pod_at_most_and_no_loop(tmp_path):
    async def story() -> None:
        async with a_town(tmp_path) as town:
            town.apply("chat", replicas=1)
            operator = town.start_operator()
            await ready(town, replicas=1)
            # kopf begins anew with a list after a gap, and never tells of what was deleted in it.
            town.server.forget(INFERENCE_SERVICES, NAMESPACE, "chat")
            writes = await town.quiet(60)

            assert operator.manager.world.services.keys() == []
            assert town.pods() == []
            assert len([write for write in writes if write.startswith("POST")]) <= 1

    run_in_virtual_time(story())


def test_a_change_that_the_watch_missed_is_found_by_the_next_resync_and_counted(tmp_path):
    async def story() -> None:
        async with a_town(tmp_path) as town:
            town.apply("chat", replicas=1)
            operator = town.start_operator()
            await ready(town, replicas=1)
            operator.manager.world.saw_service = lambda *_: None  # a watch that is open and tells nothing
            town.apply("chat", replicas=2)
            await ready(town, replicas=2)

            assert operator.metrics.drift._value.get() == 1

    run_in_virtual_time(story())


def test_decisions_become_events_about_the_service(tmp_path):
    async def story() -> None:
        async with a_town(tmp_path) as town:
            town.apply("chat", replicas=1)
            town.start_operator()
            await ready(town, replicas=1)
            await town.quiet(5)

            events = town.server.objects(EVENTS, NAMESPACE)
            assert "ReplicaCreated" in {event["reason"] for event in events}
            assert all(event["regarding"]["name"] == "chat" for event in events)

    run_in_virtual_time(story())


@pytest.mark.capability("AS-1")
def test_load_on_the_replicas_scales_out_within_limits_and_back_in_when_it_ends(tmp_path):
    async def story() -> None:
        async with a_town(tmp_path) as town:
            town.apply(
                "chat",
                autoscaling={
                    "minReplicas": 1,
                    "maxReplicas": 3,
                    "behavior": {"scaleDown": {"stabilizationWindowSeconds": 20, "periodSeconds": 5}},
                },
            )
            town.start_operator()
            await ready(town, replicas=1)
            [name] = town.serving("chat")
            town.runtimes[name].running, town.runtimes[name].waiting, town.runtimes[name].kv_usage = 8, 12, 0.97
            await town.until(lambda: len(town.serving("chat")) == 3, "three replicas")
            for runtime in town.runtimes.values():
                runtime.running, runtime.waiting, runtime.kv_usage = 0, 0, 0.0
            await town.until(lambda: len(town.pods("chat")) == 1, "one replica")

            history = town.status("chat")["autoscaling"]["history"]
            assert {(one["from"], one["to"]) for one in history} >= {(1, 3)} or len(history) >= 2

    run_in_virtual_time(story())
