"""What the operator does while replicas are silent, watches are late, writes are refused, and processes come and go."""

import copy
from itertools import pairwise

import pytest

from slipway_api import names
from slipway_kube.resources import EVENTS, INFERENCE_SERVICES, PODS
from tests.operator.serving_cluster import ready
from tests.operator.simulated_cluster import NAMESPACE, SimulatedCluster, simulated_cluster
from tests.operator.virtual_time import run_in_virtual_time


def draining(cluster: SimulatedCluster) -> list[str]:
    return [
        pod["metadata"]["name"]
        for pod in cluster.pods("chat")
        if pod["metadata"]["labels"][names.LABEL_STATE] == names.STATE_DRAINING
    ]


@pytest.mark.capability("OP-14")
def test_sixty_silent_admin_ports_do_not_delay_the_first_pod_of_another_service(tmp_path):
    """Finding 10: POST /drain was awaited inside a worker; a new service's first pod came after 24.8 s."""

    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            for number in range(20):
                cluster.apply(f"silent-{number}", replicas=3)
            cluster.start_operator()
            for number in range(20):
                await ready(cluster, f"silent-{number}", replicas=3)
            cluster.silent = lambda pod: pod.startswith("silent")
            for number in range(20):
                cluster.apply(f"silent-{number}", replicas=0)
            await cluster.quiet(3)
            since = cluster.time()
            cluster.apply("chat", replicas=1)
            await cluster.until(lambda: bool(cluster.pods("chat")), "the first pod")

            assert cluster.time() - since <= 3.0

    run_in_virtual_time(story())


def test_a_drain_that_the_watch_has_not_shown_yet_is_not_followed_by_another(tmp_path):
    """Finding 11: the drain label was neither expected nor fed back, so a sample made the next plan drain another."""

    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            cluster.apply("chat", replicas=3)
            cluster.start_operator()
            await ready(cluster, replicas=3)
            await cluster.quiet(5)

            def stall_when_the_label_is_written(what: str) -> None:
                if what.startswith("PATCH") and "/pods/" in what:
                    cluster.on_write = lambda _what: None
                    cluster.server.stall_watches()
                    cluster.silent = what.endswith  # it does not say that it drains, and its last sample shows load
                    for runtime in cluster.runtimes.values():
                        runtime.running = 0  # so by their samples the others would be chosen before it now

            for runtime in cluster.runtimes.values():
                runtime.running = 3
            await cluster.quiet(20)
            cluster.on_write = stall_when_the_label_is_written
            cluster.apply("chat", replicas=2)
            await cluster.until(lambda: bool(draining(cluster)), "the drain")
            await cluster.quiet(25)

            assert len(draining(cluster)) == 1

            cluster.silent = lambda _pod: False
            cluster.server.drop_watches()
            await ready(cluster, replicas=2)

    run_in_virtual_time(story())


def test_a_takeover_and_a_resync_write_nothing_where_all_is_as_it_should_be(tmp_path):
    """Finding 14: each was a PATCH for every child; 1,000 services kept the writer busy for 38 s."""

    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            for number in range(2):
                cluster.apply(f"chat-{number}", replicas=1)
            first = cluster.start_operator()
            for number in range(2):
                await ready(cluster, f"chat-{number}", replicas=1)
            await cluster.quiet(10)
            await first.stop()
            second = cluster.start_operator()
            await cluster.until(lambda: second.is_leader, "a leader")

            assert await cluster.quiet(1300) == []  # a takeover, and two resyncs at least

    run_in_virtual_time(story())


def test_a_clean_stop_finishes_the_pass_in_hand_and_posts_its_events(tmp_path):
    """Finding 15: the stop cancelled workers and recorder first, and their events were lost."""

    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            operator = cluster.start_operator()
            await cluster.until(lambda: operator.is_leader, "a leader")
            cluster.write_seconds = 0.1
            cluster.apply("chat", replicas=3)
            await cluster.until(lambda: bool(cluster.pods("chat")), "the first pod")
            since = cluster.time()
            await operator.stop()

            assert cluster.time() - since <= 2.0
            posted = [one for one in cluster.server.objects(EVENTS, NAMESPACE) if one["reason"] == "ReplicaCreated"]
            assert {one["related"]["name"] for one in posted} == {pod["metadata"]["name"] for pod in cluster.pods()}
            assert len(cluster.pods("chat")) == 3

    run_in_virtual_time(story())


def test_samples_do_not_shorten_the_backoff_of_a_refused_write(tmp_path):
    """Finding 16: a service without quota made 54 POSTs a minute while its four replicas were busy."""

    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            cluster.apply("chat", replicas=4)
            operator = cluster.start_operator()
            await ready(cluster, replicas=4)
            for runtime in cluster.runtimes.values():
                runtime.running = 3
            fault = cluster.server.fail(method="POST", path="/pods$", status=403, message="exceeded quota", times=10**6)
            cluster.apply("chat", replicas=6)
            await cluster.quiet(60)
            before = len(operator.writes)
            sampled = len(cluster.sampled)
            for second in range(120):  # and its pods change all the time, too
                cluster.server.patch_status(PODS, NAMESPACE, cluster.serving("chat")[0], {"message": str(second)})
                await cluster.quiet(1)
            tries = [write for write in operator.writes[before:] if write.startswith("POST")]

            assert len(cluster.sampled) - sampled >= 200, "its replicas are busy, and asked"
            assert 1 <= len(tries) <= 5  # every 30 to 60 s by now
            assert "exceeded quota" in str(cluster.status("chat")["conditions"])

            # A changed spec is a new wish: it does not wait for the backoff of the old one.
            cluster.server.faults.remove(fault)
            since = cluster.time()
            cluster.apply("chat", replicas=5)
            await cluster.until(lambda: len(cluster.pods("chat")) == 5, "the fifth pod")
            assert cluster.time() - since <= 2.0

    run_in_virtual_time(story())


@pytest.mark.capability("OP-14")
def test_a_neighbour_with_many_silent_pods_and_a_refused_quota_changes_nothing_measurable(tmp_path):
    """Capability OP-14: the same service, alone and beside such a neighbour, in virtual time."""

    async def life(beside: bool) -> tuple[float, float]:
        """Seconds from `apply` to the first pod, and the longest time between two samples of a busy replica."""
        async with simulated_cluster(tmp_path) as cluster:
            cluster.silent = lambda pod: pod.startswith("noisy")
            cluster.start_operator()
            if beside:
                cluster.apply("noisy", replicas=1000)
                await cluster.until(lambda: len(cluster.serving("noisy")) == 1000, "the neighbour's pods")
                cluster.server.fail(method="POST", path="/pods$", status=403, body="noisy", times=10**6)
                cluster.apply("noisy", replicas=1050)
            await cluster.quiet(30)
            since = cluster.time()
            cluster.apply("chat", replicas=1)
            await cluster.until(lambda: bool(cluster.pods("chat")), "the first pod")
            first_pod = cluster.time() - since
            await ready(cluster, replicas=1)
            cluster.runtimes[cluster.serving("chat")[0]].running = 2
            await cluster.quiet(15)
            cluster.sampled.clear()
            await cluster.quiet(40)
            times = [at for at, pod in cluster.sampled if pod.startswith("chat")]
            return first_pod, max(later - earlier for earlier, later in pairwise(times))

    alone, beside = run_in_virtual_time(life(False)), run_in_virtual_time(life(True))

    assert beside[0] - alone[0] <= 0.3
    assert beside[1] - alone[1] <= 0.1


@pytest.mark.capability("OP-7")
def test_with_every_operator_killed_there_is_a_leader_again_within_fifteen_seconds(tmp_path):
    """Chaos C7: a new leader came after 18 to 20 s, because nobody looked at the Lease before its caches were full."""

    async def story(pod_uid: str) -> float:
        async with simulated_cluster(tmp_path) as cluster:
            for number in range(2):
                cluster.start_operator(f"operator-{number}", pod_uid=pod_uid and f"{pod_uid}-{number}")
            await cluster.until(lambda: any(one.is_leader for one in cluster.processes), "a leader")
            await cluster.quiet(20)
            cluster.apply("chat", replicas=1)
            for process in cluster.processes:
                process.kill()
            since = cluster.time()
            await cluster.quiet(3)  # the kubelet restarts the containers, and Python starts
            again = [
                cluster.start_operator(f"operator-{number}", pod_uid=pod_uid and f"{pod_uid}-{number}")
                for number in range(2)
            ]
            await cluster.until(lambda: any(one.is_leader for one in again), "the next leader")
            took = cluster.time() - since
            await ready(cluster, replicas=1)
            return took

    assert run_in_virtual_time(story("")) <= 15.25  # without a pod's uid nobody knows whose Lease it is
    assert run_in_virtual_time(story("uid")) <= 6.0


def test_a_service_deleted_while_its_own_watch_was_broken_is_found_soon_and_not_at_the_next_resync(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            cluster.apply("chat", replicas=0)
            operator = cluster.start_operator()
            await cluster.until(lambda: bool(cluster.status("chat")), "a status")
            await cluster.quiet(5)
            cluster.apply("other", replicas=0)
            cluster.server.down = True
            cluster.server.forget(INFERENCE_SERVICES, NAMESPACE, "chat")
            await cluster.quiet(3)
            cluster.server.down = False
            await cluster.quiet(30)

            assert {key.name for key in operator.manager.caches.known()} == {"other"}

    run_in_virtual_time(story())


def test_after_etcd_was_restored_from_a_backup_older_versions_are_believed_again(tmp_path):
    """Finding 19: the store ignored older resourceVersions until the process was restarted."""

    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            cluster.apply("chat", replicas=1)
            cluster.start_operator()
            await ready(cluster, replicas=1)
            await cluster.quiet(10)
            store = cluster.server.store
            backup = store.version, copy.deepcopy(store._kinds)
            for number in range(20):
                cluster.apply("chat", replicas=1, drain={"timeoutSeconds": 40 + number})
                await cluster.quiet(1)
            await cluster.quiet(700)  # a list has seen the newer versions by now
            store.version, store._kinds = backup
            store.history.clear()
            cluster.apply("chat", replicas=2)
            await cluster.until(lambda: len(cluster.serving("chat")) == 2, "the second replica")

    run_in_virtual_time(story())
