"""Two claims to one name: whoever came later is told, and nothing of the other's is touched."""

import pytest

from slipway_kube.resources import DISRUPTION_BUDGETS, EVENTS, SERVICES
from tests.operator.test_reconciling import ready
from tests.operator.town import NAMESPACE, Town, a_town
from tests.operator.virtual_time import run_in_virtual_time

LLAMA = {"uri": "file:///models/tiny", "servedName": "llama"}


def reason(town: Town, name: str) -> str:
    return town.condition(name, "RouteReady").get("reason", "")


def conflicts(town: Town) -> list[dict]:
    return [event for event in town.server.objects(EVENTS, NAMESPACE) if event["reason"] == "NameConflict"]


@pytest.mark.capability("OP-2", "OP-6")
@pytest.mark.parametrize("how", ["deleted", "renamed"])
def test_the_younger_service_is_told_that_the_name_is_taken_until_the_older_one_gives_it_up(tmp_path, how):
    async def story() -> None:
        async with a_town(tmp_path) as town:
            town.apply("first", replicas=1, model=LLAMA)
            town.start_operator()
            await ready(town, "first", replicas=1)
            await town.quiet(5)
            town.apply("code", replicas=1, model=LLAMA)
            await ready(town, "code", replicas=1)
            await town.quiet(5)

            assert reason(town, "first") == "Routed"
            assert reason(town, "code") == "NameConflict"
            assert "first" in town.condition("code", "RouteReady")["message"]
            assert [event["regarding"]["name"] for event in conflicts(town)] == ["code"]
            assert conflicts(town)[0]["type"] == "Warning"
            assert await town.quiet(60) == []

            if how == "deleted":
                town.delete("first")
            else:
                town.apply("first", model=LLAMA | {"servedName": "other"})
            await town.until(lambda: reason(town, "code") == "Routed", "the name to be free")

            assert len(conflicts(town)) == 1

    run_in_virtual_time(story())


@pytest.mark.capability("OP-2")
def test_a_service_that_somebody_else_made_is_left_alone_and_named_and_the_replicas_serve_through_the_gateway(tmp_path):
    async def story() -> None:
        async with a_town(tmp_path) as town:
            metadata = {"name": "chat", "namespace": NAMESPACE, "labels": {"app": "theirs"}}
            theirs = town.server.put(SERVICES, {"metadata": metadata, "spec": {"selector": {"app": "theirs"}}})
            town.apply("chat", replicas=2)
            operator = town.start_operator()
            await ready(town, replicas=2)
            await town.until(lambda: town.condition("chat", "Ready")["status"] == "True", "Ready")

            assert town.server.get(SERVICES, NAMESPACE, "chat") == theirs
            assert not [write for write in operator.writes if "/services/" in write]
            assert town.server.get(DISRUPTION_BUDGETS, NAMESPACE, "chat"), "one refusal costs nothing else"
            assert town.condition("chat", "Ready")["message"] == (
                "2 of 2 replicas are ready; there is a Service chat that Slipway did not make; "
                "rename it, or name the InferenceService otherwise"
            )

            before = len(operator.writes)
            await town.quiet(300)
            assert len(operator.writes) == before, "what is told already is not written again"

            town.server.delete(SERVICES, NAMESPACE, "chat")
            await town.until(lambda: bool(town.server.get(SERVICES, NAMESPACE, "chat")), "our own Service")
            await town.until(lambda: "Slipway" not in town.condition("chat", "Ready")["message"], "the end of it")

    run_in_virtual_time(story())
