"""Who may write: one leader, hot standbys that write nothing, and a hand-over in seconds."""

import pytest

from slipway_kube.resources import LEASES
from tests.operator.town import Process, Town, a_town
from tests.operator.virtual_time import run_in_virtual_time


async def settled(town: Town, replicas: int) -> None:
    await town.until(lambda: len(town.serving("chat")) == replicas == len(town.pods("chat")), f"{replicas} replicas")


def leaders(*processes: Process) -> list[Process]:
    return [process for process in processes if process.is_leader]


def test_a_standby_keeps_hot_caches_and_writes_nothing(tmp_path):
    async def story() -> None:
        async with a_town(tmp_path) as town:
            first = town.start_operator()
            await town.until(lambda: first.is_leader, "a leader")
            standby = town.start_operator()
            town.apply("chat", replicas=2)
            await settled(town, 2)
            await town.quiet(60)

            assert standby.writes == []
            assert not standby.is_leader
            assert len(standby.manager.world.services) == 1
            assert len(standby.manager.world.pods.services()) == 1
            assert standby.manager.ready() == (True, "standing by")

    run_in_virtual_time(story())


@pytest.mark.capability("OP-7")
def test_after_a_kill_the_standby_leads_within_fifteen_seconds_and_finishes_the_work(tmp_path):
    async def story() -> None:
        async with a_town(tmp_path) as town:
            first = town.start_operator()
            await town.until(lambda: first.is_leader, "a leader")
            standby = town.start_operator()
            town.apply("chat", replicas=1)
            await settled(town, 1)
            first.kill()
            since = town.time()
            town.apply("chat", replicas=3)
            await town.until(lambda: standby.is_leader, "the next leader")

            assert town.time() - since <= 15

            await settled(town, 3)

    run_in_virtual_time(story())


def test_after_a_clean_stop_the_standby_leads_within_two_seconds(tmp_path):
    async def story() -> None:
        async with a_town(tmp_path) as town:
            first = town.start_operator()
            await town.until(lambda: first.is_leader, "a leader")
            standby = town.start_operator()
            town.apply("chat", replicas=1)
            await settled(town, 1)
            await first.stop()
            since = town.time()
            await town.until(lambda: standby.is_leader, "the next leader")

            assert town.time() - since <= 2.0

    run_in_virtual_time(story())


def test_a_leader_that_cannot_renew_leaves_before_anyone_else_may_lead(tmp_path):
    async def story() -> None:
        async with a_town(tmp_path) as town:
            first = town.start_operator()
            await town.until(lambda: first.is_leader, "a leader")
            standby = town.start_operator()
            town.apply("chat", replicas=1)
            await settled(town, 1)
            town.server.fail(method="PUT", path="/leases/", status=503, times=10_000)
            since = town.time()
            await town.until(lambda: bool(first.lost), "the end of the first")

            assert town.time() - since <= 9
            assert not standby.is_leader

            town.server.faults.clear()
            written = len(first.writes)
            town.apply("chat", replicas=2)
            await settled(town, 2)

            assert standby.is_leader
            assert len(first.writes) == written, "not one write after the fence closed"

    run_in_virtual_time(story())


def test_there_is_never_more_than_one_leader_through_stops_kills_and_outages(tmp_path):
    async def story() -> None:
        async with a_town(tmp_path) as town:
            town.apply("chat", replicas=1)
            processes = [town.start_operator() for _ in range(3)]

            async def live(seconds: float) -> None:
                end = town.time() + seconds
                while town.time() < end:
                    assert len(leaders(*processes)) <= 1
                    await town.quiet(0.25)
                    if processes[-1].is_dead or len([one for one in processes if not one.is_dead]) < 3:
                        processes.append(town.start_operator())

            await live(20)
            for _ in range(3):
                [leader] = leaders(*processes)
                leader.kill()
                await live(20)
            town.server.down = True
            await live(20)
            town.server.down = False
            await live(30)

            assert len(leaders(*processes)) == 1
            assert len(town.pods("chat")) == 1

    run_in_virtual_time(story())


def test_an_outage_of_the_api_server_ends_no_standby_and_the_fleet_works_on_after_it(tmp_path):
    async def story() -> None:
        async with a_town(tmp_path) as town:
            first = town.start_operator()
            await town.until(lambda: first.is_leader, "a leader")
            standby = town.start_operator()
            town.apply("chat", replicas=1)
            await settled(town, 1)
            town.server.down = True
            await town.quiet(300)

            assert first.lost, "nobody can lead without the API server"
            assert standby.lost == []
            assert standby.manager.alive() == (True, "ok")

            town.server.down = False
            town.apply("chat", replicas=2)
            await settled(town, 2)

    run_in_virtual_time(story())


def test_an_operator_that_starts_during_an_outage_waits_for_its_end(tmp_path):
    async def story() -> None:
        async with a_town(tmp_path) as town:
            town.apply("chat", replicas=1)
            town.server.down = True
            operator = town.start_operator()
            await town.quiet(120)

            assert operator.manager.ready() == (False, "the first lists are not complete")
            assert operator.manager.alive() == (True, "ok")

            town.server.down = False
            await settled(town, 1)

    run_in_virtual_time(story())


def test_a_clean_stop_gives_the_lease_back_and_finishes_what_is_in_hand(tmp_path):
    async def story() -> None:
        async with a_town(tmp_path) as town:
            operator = town.start_operator()
            await town.until(lambda: operator.is_leader, "a leader")
            town.apply("chat", replicas=3)
            await town.until(lambda: bool(operator.writes), "the first write")
            await operator.stop()
            lease = town.server.get(LEASES, "slipway-system", "slipway-operator")

            assert lease["spec"]["holderIdentity"] == ""
            assert await town.quiet(30) == []

            town.start_operator()
            await settled(town, 3)

    run_in_virtual_time(story())
