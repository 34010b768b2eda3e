"""An operator whose cluster lacks one of our CRDs, as with `crds.install=false`, serves the kinds that exist."""

import structlog

from tests.operator.simulated_cluster import SimulatedCluster, simulated_cluster
from tests.operator.virtual_time import run_in_virtual_time

ABSENT = {"path": "/(loraadapters|warmpools)$", "status": 404, "times": 10**9}


def remove_kinds(cluster: SimulatedCluster, **fault: object) -> object:
    return cluster.server.fail(**(ABSENT | fault))


def test_it_leads_for_the_kinds_that_exist_and_its_probe_names_the_others(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            remove_kinds(cluster)
            with structlog.testing.capture_logs() as logs:
                operator = cluster.start_operator()
                cluster.apply("chat", replicas=1)
                await cluster.until(lambda: len(cluster.serving("chat")) == 1, "the service to serve")
            assert operator.is_leader
            expected = "leading, without LoRAAdapter, WarmPool, whose CRD is not installed"
            assert operator.manager.ready() == (True, expected)
            told = [one["kind"] for one in logs if "CRD" in one["event"]]
            assert told == ["LoRAAdapter", "WarmPool"], "once each"
            await cluster.quiet(5)
            assert await cluster.quiet(900) == [], "through two resyncs"
            assert not operator.lost

    run_in_virtual_time(story())


def test_it_starts_again_when_a_missing_kind_is_installed(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            fault = remove_kinds(cluster)
            operator = cluster.start_operator()
            await cluster.until(lambda: operator.is_leader, "the lead")
            cluster.server.faults.remove(fault)
            await cluster.until(lambda: bool(operator.lost), "the end of the process")
            assert operator.lost == ["the CRD of LoRAAdapter is installed now; the process starts again to watch it"]

            second = cluster.start_operator()
            await cluster.until(lambda: second.is_leader, "the lead")
            assert second.manager.ready() == (True, "leading")

    run_in_virtual_time(story())


def test_without_any_of_our_kinds_it_waits_for_them(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            fault = remove_kinds(cluster, path="/(inferenceservices|loraadapters|warmpools)$")
            operator = cluster.start_operator()
            await cluster.quiet(60)
            assert operator.manager.ready() == (False, "the first lists are not complete")

            cluster.server.faults.remove(fault)
            await cluster.until(lambda: operator.is_leader, "the lead")
            await cluster.until(lambda: operator.manager.ready() == (True, "leading"), "to be ready")

    run_in_virtual_time(story())
