"""Leader election: one operator writes, its standbys write nothing, and one of them takes over in seconds."""

import pytest

from slipway_kube.resources import LEASES
from tests.operator.operator_process import OperatorProcess
from tests.operator.simulated_cluster import SimulatedCluster, simulated_cluster
from tests.operator.virtual_time import run_in_virtual_time


async def settled(cluster: SimulatedCluster, replicas: int) -> None:
    await cluster.until(
        lambda: len(cluster.serving("chat")) == replicas == len(cluster.pods("chat")), f"{replicas} replicas"
    )


def leaders(*processes: OperatorProcess) -> list[OperatorProcess]:
    return [process for process in processes if process.is_leader]


def test_a_standby_keeps_hot_caches_and_writes_nothing(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            first = cluster.start_operator()
            await cluster.until(lambda: first.is_leader, "a leader")
            standby = cluster.start_operator()
            cluster.apply("chat", replicas=2)
            await settled(cluster, 2)
            await cluster.quiet(60)

            assert standby.writes == []
            assert not standby.is_leader
            assert len(standby.manager.caches.stores["InferenceService"]) == 1
            assert len(standby.manager.caches.pods.services()) == 1
            assert standby.manager.ready() == (True, "standing by")

    run_in_virtual_time(story())


@pytest.mark.capability("OP-7")
def test_after_a_kill_the_standby_leads_within_fifteen_seconds_and_finishes_the_work(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            first = cluster.start_operator()
            await cluster.until(lambda: first.is_leader, "a leader")
            standby = cluster.start_operator()
            cluster.apply("chat", replicas=1)
            await settled(cluster, 1)
            first.kill()
            since = cluster.time()
            cluster.apply("chat", replicas=3)
            await cluster.until(lambda: standby.is_leader, "the next leader")

            assert cluster.time() - since <= 15

            await settled(cluster, 3)

    run_in_virtual_time(story())


def test_after_a_clean_stop_the_standby_leads_within_two_seconds(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            first = cluster.start_operator()
            await cluster.until(lambda: first.is_leader, "a leader")
            standby = cluster.start_operator()
            cluster.apply("chat", replicas=1)
            await settled(cluster, 1)
            await first.stop()
            since = cluster.time()
            await cluster.until(lambda: standby.is_leader, "the next leader")

            assert cluster.time() - since <= 2.0

    run_in_virtual_time(story())


def test_a_leader_that_cannot_renew_leaves_before_anyone_else_may_lead(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            first = cluster.start_operator()
            await cluster.until(lambda: first.is_leader, "a leader")
            standby = cluster.start_operator()
            cluster.apply("chat", replicas=1)
            await settled(cluster, 1)
            cluster.server.fail(method="PUT", path="/leases/", status=503, times=10_000)
            since = cluster.time()
            await cluster.until(lambda: bool(first.lost), "the end of the first")

            assert cluster.time() - since <= 9
            assert not standby.is_leader

            cluster.server.faults.clear()
            written = len(first.writes)
            cluster.apply("chat", replicas=2)
            await settled(cluster, 2)

            assert standby.is_leader
            assert len(first.writes) == written, "not one write after the fence closed"

    run_in_virtual_time(story())


def test_there_is_never_more_than_one_leader_through_stops_kills_and_outages(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            cluster.apply("chat", replicas=1)
            processes = [cluster.start_operator() for _ in range(3)]

            async def live(seconds: float) -> None:
                end = cluster.time() + seconds
                while cluster.time() < end:
                    assert len(leaders(*processes)) <= 1
                    await cluster.quiet(0.25)
                    if processes[-1].is_dead or len([one for one in processes if not one.is_dead]) < 3:
                        processes.append(cluster.start_operator())

            await live(20)
            for _ in range(3):
                [leader] = leaders(*processes)
                leader.kill()
                await live(20)
            cluster.server.down = True
            await live(20)
            cluster.server.down = False
            await live(30)

            assert len(leaders(*processes)) == 1
            assert len(cluster.pods("chat")) == 1

    run_in_virtual_time(story())


def test_an_outage_of_the_api_server_ends_no_standby_and_the_fleet_works_on_after_it(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            first = cluster.start_operator()
            await cluster.until(lambda: first.is_leader, "a leader")
            standby = cluster.start_operator()
            cluster.apply("chat", replicas=1)
            await settled(cluster, 1)
            cluster.server.down = True
            await cluster.quiet(300)

            assert first.lost, "nobody can lead without the API server"
            assert standby.lost == []
            assert standby.manager.alive() == (True, "ok")

            cluster.server.down = False
            cluster.apply("chat", replicas=2)
            await settled(cluster, 2)

    run_in_virtual_time(story())


def test_an_operator_that_starts_during_an_outage_waits_for_its_end(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            cluster.apply("chat", replicas=1)
            cluster.server.down = True
            operator = cluster.start_operator()
            await cluster.quiet(120)

            assert operator.manager.ready() == (False, "the first lists are not complete")
            assert operator.manager.alive() == (True, "ok")

            cluster.server.down = False
            await settled(cluster, 1)

    run_in_virtual_time(story())


def test_a_clean_stop_gives_the_lease_back_and_finishes_what_is_in_hand(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            operator = cluster.start_operator()
            await cluster.until(lambda: operator.is_leader, "a leader")
            cluster.apply("chat", replicas=3)
            await cluster.until(lambda: bool(operator.writes), "the first write")
            await operator.stop()
            lease = cluster.server.get(LEASES, "slipway-system", "slipway-operator")

            assert lease["spec"]["holderIdentity"] == ""
            assert await cluster.quiet(30) == []

            cluster.start_operator()
            await settled(cluster, 3)

    run_in_virtual_time(story())
