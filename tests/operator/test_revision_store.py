"""The store of revisions, with whole operator processes."""

import pytest

from slipway_kube.resources import CONTROLLER_REVISIONS, PODS
from tests.operator.test_reconciling import ready
from tests.operator.town import NAMESPACE, a_town
from tests.operator.virtual_time import run_in_virtual_time


@pytest.mark.capability("OP-13")
def test_replicas_lost_while_a_rollout_cannot_start_come_back_from_the_store_after_a_change_of_leader(tmp_path):
    """Finding 2: the new revision never starts; the next operator has only the store to build the old one from."""

    async def story() -> None:
        async with a_town(tmp_path) as town:
            town.apply("chat", replicas=2)
            first = town.start_operator()
            await ready(town, replicas=2)
            await town.quiet(5)
            stable = town.status("chat")["currentRevision"]
            args = town.pods("chat")[0]["spec"]["containers"][0]["args"]
            town.start_seconds = 10_000.0
            town.apply("chat", model={"uri": "file:///models/other"})
            await town.until(lambda: len(town.pods("chat")) == 3, "the replica of the new revision")
            first.kill()
            town.start_operator()
            await town.quiet(30)
            lost = town.serving("chat")[0]
            town.server.delete(PODS, NAMESPACE, lost, grace=0)

            def rebuilt() -> list[dict]:
                labels = [(one, one["metadata"]["labels"]) for one in town.live("chat")]
                return [pod for pod, label in labels if label["slipway.dev/revision"] == stable]

            await town.until(lambda: len(rebuilt()) == 2, "the replica of the stable revision")
            assert [one["spec"]["containers"][0]["args"] for one in rebuilt()] == [args, args]
            assert len(town.live("chat")) == 3

    run_in_virtual_time(story())


@pytest.mark.capability("OP-13")
def test_a_revision_of_another_owner_is_waited_out_and_named(tmp_path):
    """A service that is deleted and applied again finds the store of the one before, until it is collected."""

    async def story() -> None:
        async with a_town(tmp_path) as town:
            town.apply("chat", replicas=1)
            first = town.start_operator()
            await ready(town, replicas=1)
            await town.quiet(5)
            [revision] = town.server.objects(CONTROLLER_REVISIONS, NAMESPACE)
            await first.stop()
            town.delete("chat")
            town.start_operator()
            await town.until(lambda: town.service("chat") is None and not town.pods(), "the end of the service")
            stranger = {"metadata": {"name": revision["metadata"]["name"], "namespace": NAMESPACE}, "revision": 1}
            town.server.put(CONTROLLER_REVISIONS, stranger)
            town.apply("chat", replicas=1)
            await town.until(
                lambda: "belongs to another owner" in town.condition("chat", "Ready").get("message", ""), "the sentence"
            )
            assert town.pods("chat") == []
            town.server.delete(CONTROLLER_REVISIONS, NAMESPACE, revision["metadata"]["name"])
            await ready(town, replicas=1)

    run_in_virtual_time(story())
