"""The store of revisions, with whole operator processes."""

import pytest

from slipway_kube.resources import CONTROLLER_REVISIONS, PODS
from tests.operator.serving_cluster import ready
from tests.operator.simulated_cluster import NAMESPACE, simulated_cluster
from tests.operator.virtual_time import run_in_virtual_time


@pytest.mark.capability("OP-13")
def test_replicas_lost_while_a_rollout_cannot_start_come_back_from_the_store_after_a_change_of_leader(tmp_path):
    """Finding 2: the new revision never starts; the next operator has only the store to build the old one from."""

    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            cluster.apply("chat", replicas=2)
            first = cluster.start_operator()
            await ready(cluster, replicas=2)
            await cluster.quiet(5)
            stable = cluster.status("chat")["currentRevision"]
            args = cluster.pods("chat")[0]["spec"]["containers"][0]["args"]
            cluster.start_seconds = 10_000.0
            cluster.apply("chat", model={"uri": "file:///models/other"})
            await cluster.until(lambda: len(cluster.pods("chat")) == 3, "the replica of the new revision")
            first.kill()
            cluster.start_operator()
            await cluster.quiet(30)
            lost = cluster.serving("chat")[0]
            cluster.server.delete(PODS, NAMESPACE, lost, grace=0)

            def rebuilt() -> list[dict]:
                labels = [(one, one["metadata"]["labels"]) for one in cluster.live("chat")]
                return [pod for pod, label in labels if label["slipway.dev/revision"] == stable]

            await cluster.until(lambda: len(rebuilt()) == 2, "the replica of the stable revision")
            assert [one["spec"]["containers"][0]["args"] for one in rebuilt()] == [args, args]
            assert len(cluster.live("chat")) == 3

    run_in_virtual_time(story())


@pytest.mark.capability("OP-13")
def test_a_revision_of_another_owner_is_waited_out_and_named(tmp_path):
    """A service that is deleted and applied again finds the store of the one before, until it is collected."""

    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            cluster.apply("chat", replicas=1)
            first = cluster.start_operator()
            await ready(cluster, replicas=1)
            await cluster.quiet(5)
            [revision] = cluster.server.objects(CONTROLLER_REVISIONS, NAMESPACE)
            await first.stop()
            cluster.delete("chat")
            cluster.start_operator()
            await cluster.until(
                lambda: cluster.service("chat") is None and not cluster.pods(), "the end of the service"
            )
            stranger = {"metadata": {"name": revision["metadata"]["name"], "namespace": NAMESPACE}, "revision": 1}
            cluster.server.put(CONTROLLER_REVISIONS, stranger)
            cluster.apply("chat", replicas=1)
            await cluster.until(
                lambda: "belongs to another owner" in cluster.condition("chat", "Ready").get("message", ""),
                "the sentence",
            )
            assert cluster.pods("chat") == []
            cluster.server.delete(CONTROLLER_REVISIONS, NAMESPACE, revision["metadata"]["name"])
            await ready(cluster, replicas=1)

    run_in_virtual_time(story())
