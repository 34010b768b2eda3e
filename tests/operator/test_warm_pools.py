"""WarmPools in a simulated cluster, in virtual time: refill, claims, lost races, crashes, yielding."""

import asyncio
import random

import pytest

from slipway_api import names
from slipway_api.runtime_api import StartupTimes
from slipway_kube.errors import Unreachable
from slipway_kube.resources import NODES, PODS, WARM_POOLS
from tests.operator.simulated_cluster import NAMESPACE, simulated_cluster
from tests.operator.virtual_time import run_in_virtual_time
from tests.operator.warm_pool_views import (
    apply_pool,
    check_owners,
    claim_one,
    events,
    pool_condition,
    pool_status,
    staying,
    waiting,
    warmed,
)


@pytest.mark.capability("AS-5")
@pytest.mark.capability("OP-6")
def test_a_replica_is_a_pod_of_the_pool_and_the_pool_fills_up_again(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            apply_pool(cluster, size=2)
            operator = cluster.start_operator()
            await warmed(cluster, 2)
            assert waiting(cluster) == ["pool-warm-0", "pool-warm-1"]
            shown = {"namespace": NAMESPACE, "pool": "pool", "state": "ready"}
            assert operator.metrics.registry.get_sample_value("slipway_operator_warm_pool_pods", shown) == 2
            assert await cluster.quiet(700) == [], "a pool at rest writes nothing"

            cluster.apply("chat", replicas=1, warmPool={"name": "pool"})
            await cluster.until(lambda: cluster.serving("chat") == ["pool-warm-0"], "the claimed replica")
            await warmed(cluster, 2)

            assert waiting(cluster) == ["pool-warm-1", "pool-warm-2"], "a claimed pod keeps its name"
            asked = cluster.runtimes["pool-warm-0"].model
            assert asked is not None
            assert (asked["uri"], asked["servedName"]) == ("file:///models/tiny", "chat")
            assert asked["revision"] == cluster.status("chat")["currentRevision"]
            assert asked["drainTimeoutSeconds"] == 30
            status = pool_status(cluster)
            assert (status["claimed"], status["hits"], status["misses"], status["hitPercent"]) == (1, 1, 0, 100)
            assert status["uses"][0] | {"time": ""} == {
                "time": "",
                "service": "chat",
                "pod": "pool-warm-0",
                "hit": True,
                "seconds": status["claimSeconds"]["p50"],
            }
            assert cluster.condition("chat", "Ready")["reason"] == "Available"
            assert pool_condition(cluster, "Ready")["reason"] == "Available"
            assert len(events(cluster, "WarmPodClaimed")) == len(events(cluster, "PodClaimed")) == 1
            assert events(cluster, "ReplicaCreated") == []
            assert any("s after it was claimed: 1 of 1" in one for one in events(cluster, "ReplicaReady"))
            assert len(events(cluster, "PodWarmed")) == 3
            check_owners(cluster)
            assert await cluster.quiet(700) == []

    run_in_virtual_time(story())


@pytest.mark.capability("AS-5")
def test_a_claimed_replica_of_a_full_pool_drains_and_ends_like_any_other(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            apply_pool(cluster, size=1)
            cluster.start_operator()
            await warmed(cluster, 1)
            cluster.apply("chat", replicas=2, warmPool={"name": "pool"})
            await cluster.until(lambda: len(cluster.serving("chat")) == 2, "both replicas")
            cluster.runtimes["pool-warm-0"].running = 0
            cluster.apply("chat", replicas=0)
            await cluster.until(lambda: cluster.live("chat") == [], "their end")
            assert cluster.runtimes["pool-warm-0"].drained_with == [30]

    run_in_virtual_time(story())


@pytest.mark.capability("AS-5")
@pytest.mark.capability("OP-6")
def test_without_a_fit_pod_a_replica_is_started_cold_and_the_event_says_in_what_the_pods_differ(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            apply_pool(cluster, size=1)
            cluster.start_operator()
            await warmed(cluster, 1)
            env = [{"name": "HF_HUB_OFFLINE", "value": "1"}]
            cluster.apply("chat", replicas=1, warmPool={"name": "pool"}, runtime={"env": env})
            await cluster.until(lambda: len(cluster.serving("chat")) == 1, "the cold replica")
            await cluster.until(lambda: pool_status(cluster).get("misses") == 1, "the counted miss")

            assert waiting(cluster) == ["pool-warm-0"]
            (miss,) = events(cluster, "WarmPoolMiss")
            assert "the pods of WarmPool pool differ in environment" in miss
            assert pool_status(cluster)["hitPercent"] == 0
            cluster.apply("other", replicas=1, warmPool={"name": "nowhere"})
            await cluster.until(lambda: len(cluster.serving("other")) == 1, "a replica of the pool that is not there")
            assert any("there is no WarmPool nowhere" in one for one in events(cluster, "WarmPoolMiss"))

    run_in_virtual_time(story())


@pytest.mark.capability("AS-5")
def test_policy_require_waits_for_a_pod_and_says_so(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            apply_pool(cluster, size=0)
            cluster.apply("chat", replicas=1, warmPool={"name": "pool", "policy": "Require"})
            cluster.start_operator()
            await cluster.until(lambda: bool(events(cluster, "WarmPoolMiss")), "the event")
            await cluster.quiet(60)
            assert cluster.live("chat") == []
            assert "no pod of WarmPool pool can be claimed" in cluster.condition("chat", "Reconciling")["message"]
            assert await cluster.quiet(200) == [], "waiting writes nothing"

            apply_pool(cluster, size=1)
            await cluster.until(lambda: cluster.serving("chat") == ["pool-warm-0"], "the claimed replica")
            assert len(events(cluster, "WarmPoolMiss")) <= 3

    run_in_virtual_time(story())


@pytest.mark.capability("OP-18")
def test_a_required_pool_that_is_not_there_is_stalled_within_seconds_and_until_it_is_created(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            cluster.start_operator()
            await cluster.quiet(30)
            cluster.apply("chat", replicas=1, warmPool={"name": "pool", "policy": "Require"})
            await cluster.quiet(5)
            assert cluster.condition("chat", "Stalled")["reason"] == "PoolNotFound"
            assert cluster.condition("chat", "Ready")["reason"] == "PoolNotFound"
            await cluster.quiet(60)
            assert await cluster.quiet(200) == [], "waiting writes nothing"
            assert len(events(cluster, "PoolNotFound")) == 1

            apply_pool(cluster, size=1)
            await cluster.quiet(2)
            assert cluster.condition("chat", "Stalled") == {}, "its creation wakes the service"
            await cluster.until(lambda: cluster.serving("chat") == ["pool-warm-0"], "the claimed replica")
            assert len(events(cluster, "PoolNotFound")) == 1

    run_in_virtual_time(story())


@pytest.mark.capability("AS-5")
def test_two_services_never_share_a_pod_and_the_slower_one_starts_cold(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            apply_pool(cluster, size=3, refill={"maxConcurrent": 3, "delaySeconds": 600})
            cluster.start_operator()
            await warmed(cluster, 3)
            cluster.apply("one", replicas=2, warmPool={"name": "pool"})
            cluster.apply("two", replicas=2, warmPool={"name": "pool"})
            await cluster.until(lambda: len(cluster.serving("one") + cluster.serving("two")) == 4, "four replicas")

            check_owners(cluster)
            assert len(cluster.live()) == 4, "three claimed, one started cold, and no refill yet"
            await cluster.until(lambda: pool_status(cluster).get("misses") == 1, "the counted miss")
            assert pool_status(cluster)["hits"] == 3
            assert len(events(cluster, "PoolExhausted")) == 1
            assert pool_condition(cluster, "Exhausted")["status"] == "True"
            await warmed(cluster, 3)
            assert pool_condition(cluster, "Exhausted") == {}

    run_in_virtual_time(story())


@pytest.mark.capability("AS-5")
def test_a_model_that_was_asked_for_in_vain_is_asked_for_again(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            apply_pool(cluster, size=1)
            cluster.start_operator()
            await warmed(cluster, 1)
            cluster.refuses_models = 3
            cluster.apply("chat", replicas=1, warmPool={"name": "pool"})
            await cluster.until(lambda: cluster.serving("chat") == ["pool-warm-0"], "the claimed replica")

    run_in_virtual_time(story())


@pytest.mark.capability("AS-5")
def test_a_claimed_pod_that_never_gets_ready_is_replaced_after_the_startup_timeout(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            apply_pool(cluster, size=1, refill={"maxConcurrent": 1, "delaySeconds": 3600})
            cluster.start_operator()
            await warmed(cluster, 1)
            await cluster.quiet(120)  # older than the startup timeout when it is claimed
            cluster.claim_seconds = 1e6
            cluster.apply("chat", replicas=1, warmPool={"name": "pool"}, runtime={"startupTimeoutSeconds": 60})
            await cluster.until(lambda: len(cluster.live("chat")) == 1, "the claim")
            assert await cluster.quiet(40) == [], "its time began with the claim"
            await cluster.until(lambda: len(cluster.serving("chat")) == 1, "another replica")
            await cluster.until(lambda: len(cluster.live("chat")) == 1, "the end of the first")
            assert cluster.serving("chat") != ["pool-warm-0"]

    run_in_virtual_time(story())


@pytest.mark.capability("AS-5")
def test_a_pool_that_is_deleted_suspended_or_smaller_deletes_waiting_pods_and_never_a_replica(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            apply_pool(cluster, size=3)
            await claim_one(cluster, warm=3)
            await warmed(cluster, 3)
            apply_pool(cluster, size=1)
            await cluster.until(lambda: len(waiting(cluster)) == 1, "one that waits")
            apply_pool(cluster, suspend=True)
            await cluster.until(lambda: waiting(cluster) == [], "none that waits")
            await cluster.until(lambda: pool_condition(cluster, "Ready").get("reason") == "Suspended", "the status")
            apply_pool(cluster, suspend=False)
            await warmed(cluster, 1)
            cluster.server.delete(WARM_POOLS, NAMESPACE, "pool")
            await cluster.until(lambda: waiting(cluster) == [], "the garbage collector")
            await cluster.quiet(60)
            assert cluster.serving("chat") == ["pool-warm-0"]

    run_in_virtual_time(story())


@pytest.mark.capability("AS-5")
def test_a_pod_that_is_claimed_while_the_pool_means_to_delete_it_lives_on(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            apply_pool(cluster, size=1)
            cluster.start_operator()
            await warmed(cluster, 1)
            deletions: list[str] = []

            def claim_first(what: str) -> None:
                """Somebody claims the pod between the pool's decision and its write."""
                if what.startswith("DELETE") and what.endswith("/pool-warm-0"):
                    deletions.append(what)
                    pod = cluster.server.get(PODS, NAMESPACE, "pool-warm-0")
                    assert pod is not None
                    labels = pod["metadata"]["labels"] | {names.LABEL_STATE: names.STATE_SERVING}
                    (node,) = cluster.server.objects(NODES)
                    owner = {"apiVersion": "v1", "kind": "Node", "name": "node-a", "uid": node["metadata"]["uid"]}
                    after = {"labels": labels, "ownerReferences": [owner | {"controller": True}]}
                    cluster.server.put(PODS, pod | {"metadata": pod["metadata"] | after})

            cluster.on_write = claim_first
            apply_pool(cluster, suspend=True)
            await cluster.until(lambda: bool(deletions), "the deletion")
            await cluster.quiet(60)

            assert [pod["metadata"]["name"] for pod in cluster.live()] == ["pool-warm-0"]
            assert len(deletions) == 1, "and the pool does not try again"

    run_in_virtual_time(story())


@pytest.mark.capability("AS-5")
@pytest.mark.parametrize("level", [{}, {"level": "Loaded", "models": [{"uri": "file:///models/tiny"}]}])
@pytest.mark.parametrize("writes", range(1, 16))
def test_an_operator_that_dies_at_any_write_leaves_no_pod_with_two_owners_and_no_slot_with_two_pods(
    tmp_path, writes, level
):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            apply_pool(cluster, size=2, **level)
            cluster.apply("chat", replicas=2, warmPool={"name": "pool", "policy": "Require"})
            first = cluster.start_operator("first", dies_after_writes=writes)
            await cluster.until(lambda: first.is_dead or len(cluster.serving("chat")) == 2, "its end")
            check_owners(cluster)
            cluster.start_operator("second")
            await cluster.until(lambda: len(cluster.serving("chat")) == 2, "both replicas")
            await cluster.until(lambda: pool_status(cluster).get("hits") == 2, "exactly two hits")
            await warmed(cluster, 2)
            check_owners(cluster)
            assert len(cluster.live()) == 4
            assert pool_status(cluster)["misses"] == 0

    run_in_virtual_time(story())


@pytest.mark.capability("AS-5")
def test_pods_of_a_changed_shape_are_replaced_and_claimed_ones_stay(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            apply_pool(cluster, size=2)
            await claim_one(cluster, warm=2)
            await warmed(cluster, 2)
            apply_pool(cluster, image="slipway/runtime:new")

            def images() -> set[str]:
                pods = [pod for pod in cluster.live() if pod["metadata"]["name"] in waiting(cluster)]
                return {pod["spec"]["containers"][0]["image"] for pod in pods}

            await cluster.until(lambda: images() == {"slipway/runtime:new"}, "pods of the new image")
            await warmed(cluster, 2)
            assert cluster.serving("chat") == ["pool-warm-0"]

    run_in_virtual_time(story())


@pytest.mark.capability("AS-5")
@pytest.mark.capability("OP-6")
def test_a_waiting_pod_gives_way_to_a_replica_that_finds_no_node(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            apply_pool(cluster, size=2, resources={"gpu": {"count": 1}})
            cluster.start_operator()
            await warmed(cluster, 2)
            cluster.start_seconds = 1e6
            cluster.apply("chat", replicas=1, resources={"gpu": {"count": 1}})
            await cluster.until(lambda: len(cluster.live("chat")) == 1, "the replica")
            (replica,) = cluster.live("chat")
            name = replica["metadata"]["name"]
            no_node = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes"}
            cluster.server.patch_status(PODS, NAMESPACE, name, {"conditions": [no_node]})
            await cluster.until(lambda: len(waiting(cluster)) == 1, "one that gave way")
            await cluster.quiet(200)

            assert len(waiting(cluster)) == 1, "one for one replica, and no refill takes the GPU back"
            (yielded,) = events(cluster, "YieldedToWorkload")
            assert f"{name} finds no node" in yielded
            scheduled = {"type": "PodScheduled", "status": "True"}
            cluster.server.patch_status(PODS, NAMESPACE, name, {"conditions": [scheduled]})
            await cluster.until(lambda: len(waiting(cluster)) == 2, "the refill")

    run_in_virtual_time(story())


@pytest.mark.capability("AS-5")
@pytest.mark.parametrize("is_lost_on_the_way", [True, False], ids=["the request", "the reply"])
def test_a_claim_whose_request_or_reply_is_lost_is_made_once(tmp_path, is_lost_on_the_way):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            apply_pool(cluster, size=2, refill={"maxConcurrent": 1, "delaySeconds": 3600})
            cluster.start_operator()
            await warmed(cluster, 2)
            lost: list[str] = []

            def lose(what: str) -> None:
                if what.startswith("PATCH") and "/pods/" in what and len(lost) < 2:
                    lost.append(what)
                    raise Unreachable("cut off")

            if is_lost_on_the_way:
                cluster.on_write = lose
            else:
                cluster.on_written = lose
            cluster.apply("chat", replicas=1, warmPool={"name": "pool"})
            await cluster.until(lambda: cluster.serving("chat") == ["pool-warm-0"], "the claimed replica")

            assert lost
            assert waiting(cluster) == ["pool-warm-1"]
            await cluster.until(lambda: pool_status(cluster).get("hits") == 1, "one hit")

    run_in_virtual_time(story())


@pytest.mark.capability("AS-5")
@pytest.mark.parametrize("seed", range(8))
def test_in_a_random_walk_with_faults_no_pod_has_two_owners_and_no_service_too_many_replicas(tmp_path, seed):
    draw = random.Random(seed)
    wanted = {"one": 1, "two": 1}

    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            apply_pool(cluster, size=2, refill={"maxConcurrent": 2, "delaySeconds": 1})

            def fail_now_and_then(_what: str) -> None:
                if "/leases" not in _what and draw.random() < 0.08:
                    raise Unreachable("cut off")

            cluster.on_write = cluster.on_written = fail_now_and_then
            cluster.write_seconds = 0.1
            most: dict[str, int] = dict(wanted)
            for name, replicas in wanted.items():
                cluster.apply(name, replicas=replicas, warmPool={"name": "pool"})
            cluster.start_operator()
            for _ in range(25):
                name = draw.choice(list(wanted))
                match draw.randrange(6):
                    case 0 | 1 | 2:
                        wanted[name] = draw.randrange(4)
                        most[name] = max(most[name], wanted[name])
                        cluster.apply(name, replicas=wanted[name])
                    case 3:
                        cluster.processes[-1].kill()
                        cluster.start_operator()
                    case 4:
                        apply_pool(cluster, size=draw.randrange(4), suspend=draw.random() < 0.2)
                    case 5:
                        live = cluster.live()
                        if live:
                            cluster.server.delete(PODS, NAMESPACE, draw.choice(live)["metadata"]["name"])
                for _ in range(draw.randrange(1, 60)):
                    await asyncio.sleep(0.25)
                    check_owners(cluster)
                    for service, limit in most.items():
                        assert len(staying(cluster, service)) <= limit + 1, "desired + maxSurge"
            cluster.on_write = cluster.on_written = lambda _what: None
            apply_pool(cluster, size=2, suspend=False)
            await cluster.until(
                lambda: all(len(cluster.serving(one)) == count for one, count in wanted.items()), "the end"
            )
            await warmed(cluster, 2)
            await cluster.until(lambda: len(cluster.live()) == sum(wanted.values()) + 2, "nothing left over")
            check_owners(cluster)

    run_in_virtual_time(story())


@pytest.mark.capability("ST-5")
def test_a_cold_start_is_in_status_once_and_counted_once(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            cluster.startup = StartupTimes(download_seconds=3.0, load_seconds=8.0, warmup_seconds=0.5)
            operator = cluster.start_operator()
            await cluster.quiet(2)
            cluster.apply("chat", replicas=2)
            await cluster.until(lambda: "performance" in cluster.status("chat"), "the breakdown")
            assert cluster.status("chat")["performance"]["coldStart"]["loadSeconds"] == "8.00"
            await cluster.quiet(60)
            assert await cluster.quiet(700) == [], "and then nothing is written"

            def counted(phase: str) -> float | None:
                return operator.metrics.registry.get_sample_value(
                    "slipway_operator_cold_start_seconds_sum", {"phase": phase}
                )

            assert counted("load") in (8.0, 16.0), "once for each replica that status showed"
            assert counted("warmup") in (0.5, 1.0)

    run_in_virtual_time(story())
