"""A stored service that cannot be read: its owner is told, its replicas serve on, and it can still be deleted."""

import pytest

from slipway_api import names
from slipway_kube.resources import EVENTS
from tests.operator.test_reconciling import ready
from tests.operator.town import NAMESPACE, Process, Town, a_town
from tests.operator.virtual_time import run_in_virtual_time

WRONG = {"timeoutSeconds": 0}  # as an API server stores it that does not know this rule yet


async def invalid(town: Town) -> None:
    await town.until(lambda: town.condition("chat", "Stalled").get("reason") == "InvalidSpec", "the reason")


def warnings(town: Town) -> list[dict]:
    return [event for event in town.server.objects(EVENTS, NAMESPACE) if event["reason"] == "InvalidSpec"]


def passes(operator: Process) -> float:
    [family] = operator.metrics.reconcile_seconds.collect()
    return next(sample.value for sample in family.samples if sample.name.endswith("_count"))


@pytest.mark.capability("OP-1", "OP-6")
def test_a_spec_that_cannot_be_read_is_told_once_and_its_replicas_serve_on(tmp_path):
    async def story() -> None:
        async with a_town(tmp_path) as town:
            town.apply("chat", replicas=2)
            operator = town.start_operator()
            await ready(town, replicas=2)
            before = town.serving("chat")
            town.apply("chat", replicas=5, drain=WRONG)
            await invalid(town)

            for kind, status in (("Stalled", "True"), ("Ready", "False")):
                condition = town.condition("chat", kind)
                assert (condition["status"], condition["reason"]) == (status, "InvalidSpec")
                assert "spec.drain.timeoutSeconds" in condition["message"]
            assert town.status("chat")["observedGeneration"] == town.service("chat")["metadata"]["generation"]
            assert town.status("chat")["readyReplicas"] == 2
            assert town.condition("chat", "RouteReady")["status"] == "True"

            before_that = passes(operator)
            assert await town.quiet(200) == []
            assert passes(operator) - before_that < 10, "nothing wakes it but changes"
            assert town.serving("chat") == before
            assert len(warnings(town)) == 1
            assert warnings(town)[0]["type"] == "Warning"
            assert not warnings(town)[0].get("series")

    run_in_virtual_time(story())


@pytest.mark.capability("OP-1")
def test_a_corrected_spec_goes_on_where_it_was(tmp_path):
    async def story() -> None:
        async with a_town(tmp_path) as town:
            town.apply("chat", replicas=2)
            town.start_operator()
            await ready(town, replicas=2)
            before = town.serving("chat")
            town.apply("chat", drain=WRONG)
            await invalid(town)
            town.apply("chat", drain={"timeoutSeconds": 30, "endpointPropagationSeconds": 1})
            await ready(town, replicas=2)
            await town.until(lambda: town.condition("chat", "Ready")["status"] == "True", "Ready")

            assert town.condition("chat", "Stalled") == {}
            assert town.serving("chat") == before

    run_in_virtual_time(story())


def test_a_service_that_was_never_valid_gets_no_pod_and_no_finalizer(tmp_path):
    async def story() -> None:
        async with a_town(tmp_path) as town:
            town.apply("chat", replicas=-1)
            town.start_operator()
            await invalid(town)
            await town.quiet(60)

            assert town.pods() == []
            assert not town.service("chat")["metadata"].get("finalizers")
            assert "spec.replicas" in town.condition("chat", "Ready")["message"]

            town.delete("chat")
            await town.until(lambda: town.service("chat") is None, "the end of the service")

    run_in_virtual_time(story())


def test_deleting_a_service_that_cannot_be_read_drains_its_replicas_and_leaves_nothing(tmp_path):
    async def story() -> None:
        async with a_town(tmp_path) as town:
            town.apply("chat", replicas=2)
            town.start_operator()
            await ready(town, replicas=2)
            for name in town.serving("chat"):
                town.runtimes[name].running = 1
            town.apply("chat", drain=WRONG, model={})
            await invalid(town)
            town.delete("chat")
            await town.until(lambda: all(one.draining for one in town.runtimes.values()), "both drains")

            assert town.service("chat")["metadata"]["finalizers"] == [names.FINALIZER]

            for runtime in town.runtimes.values():
                runtime.running = 0
            await town.until(lambda: town.service("chat") is None, "the end of the service")
            await town.quiet(5)

            assert town.pods() == []

    run_in_virtual_time(story())
