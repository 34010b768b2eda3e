"""Replicas that return to their WarmPool, and pods that are recycled: in a simulated cluster, in virtual time."""

import asyncio
import random
from pathlib import Path

import pytest

from slipway_api import names
from slipway_kube.errors import Unreachable
from slipway_kube.resources import NODES, PODS
from tests.operator.simulated_cluster import NAMESPACE, simulated_cluster
from tests.operator.virtual_time import run_in_virtual_time
from tests.operator.warm_pool_views import (
    apply_pool,
    check_owners,
    claim_one,
    events,
    pool_status,
    waiting,
    warmed,
)


@pytest.mark.capability("AS-5")
@pytest.mark.parametrize("level", [{}, {"level": "Loaded", "models": [{"uri": "file:///models/tiny"}]}])
def test_a_scaled_down_replica_returns_to_its_pool_and_the_next_claim_takes_it(tmp_path, level):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            # No refill within an hour: what the pool has, it has from the service.
            apply_pool(cluster, size=1, refill={"maxConcurrent": 1, "delaySeconds": 3600}, **level)
            cluster.start_operator()
            await warmed(cluster, 1)
            uid = cluster.live()[0]["metadata"]["uid"]
            before = cluster.live()[0]["metadata"]
            template = {"metadata": {"labels": {"team": "a"}, "annotations": {"team/contact": "x"}}}
            cluster.apply("chat", replicas=1, warmPool={"name": "pool"}, template=template)
            await cluster.until(lambda: cluster.serving("chat") == ["pool-warm-0"], "the claimed replica")
            pod = cluster.server.get(PODS, NAMESPACE, "pool-warm-0")
            assert pod is not None
            assert pod["metadata"]["labels"]["team"] == "a"
            pod["metadata"]["annotations"]["cni/address"] = "10.0.0.7"  # of somebody else
            cluster.server.put(PODS, pod)

            cluster.apply("chat", replicas=0)
            await cluster.until(lambda: waiting(cluster) == ["pool-warm-0"], "its return")
            check_owners(cluster)
            await warmed(cluster, 1)

            (pod,) = cluster.live()
            assert pod["metadata"]["uid"] == uid
            assert pod["metadata"]["labels"] == before["labels"]
            annotations = dict(pod["metadata"]["annotations"])
            assert annotations.pop(names.ANNOTATION_CLAIMS) == "1"
            assert annotations.pop(names.ANNOTATION_RETURNED_AT)
            assert annotations.pop("cni/address") == "10.0.0.7"
            assert annotations == before["annotations"]
            assert cluster.runtimes["pool-warm-0"].model is None
            assert any("it returns to WarmPool pool" in one for one in events(cluster, "ReplicaDrained"))
            assert events(cluster, "PodReturned") == ["pool-warm-0 can be claimed again: 1 of 1"]
            assert await cluster.quiet(700) == []

            cluster.apply("other", replicas=1, warmPool={"name": "pool"}, runtime={"startupTimeoutSeconds": 300})
            await cluster.until(lambda: cluster.serving("other") == ["pool-warm-0"], "the second claim")
            assert cluster.runtimes["pool-warm-0"].model["servedName"] == "other"
            await cluster.until(lambda: pool_status(cluster).get("hits") == 2, "two hits")
            assert pool_status(cluster)["misses"] == 0
            cluster.delete("other")
            await cluster.until(lambda: cluster.service("other") is None, "the deletion")
            await warmed(cluster, 1)
            assert cluster.live()[0]["metadata"]["annotations"][names.ANNOTATION_CLAIMS] == "2"

    run_in_virtual_time(story())


@pytest.mark.capability("AS-5")
def test_a_pod_that_is_claimed_again_has_the_whole_startup_timeout(tmp_path):
    """The kubelet says `started` of it from its first service on; what counts is its readiness since the claim."""

    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            apply_pool(cluster, size=1, refill={"maxConcurrent": 1, "delaySeconds": 3600})
            await claim_one(cluster, warm=1)
            cluster.apply("chat", replicas=0)
            await cluster.until(lambda: waiting(cluster) == ["pool-warm-0"], "its return")
            await warmed(cluster, 1)
            cluster.claim_seconds = 600.0  # far above replaceAfterUnhealthySeconds
            cluster.apply("chat", replicas=1)
            await cluster.until(lambda: len(cluster.live("chat")) == 1, "the second claim")
            await cluster.quiet(400)
            assert [pod["metadata"]["name"] for pod in cluster.live("chat")] == ["pool-warm-0"]
            assert cluster.condition("chat", "Ready")["reason"] == "Loading"
            await cluster.until(lambda: cluster.serving("chat") == ["pool-warm-0"], "its readiness")

    run_in_virtual_time(story())


@pytest.mark.capability("AS-5")
@pytest.mark.parametrize(
    "why",
    ["full", "claimed often enough", "old", "crashed before", "another image", "cordoned", "the spec names no pool"],
)
def test_a_drained_replica_that_the_pool_has_no_use_for_is_deleted(tmp_path, why):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            delay = 0 if why == "full" else 3600
            more = {"recycleAfterClaims": 1} if why == "claimed often enough" else {}
            apply_pool(cluster, size=1, refill={"maxConcurrent": 1, "delaySeconds": delay}, **more)
            await claim_one(cluster, warm=1)
            match why:
                case "full":
                    await warmed(cluster, 1)
                case "old":
                    apply_pool(cluster, recycleAfterSeconds=60)
                    await cluster.quiet(60)
                case "crashed before":
                    cluster.restart_container("pool-warm-0")
                    await cluster.quiet(30)
                    await cluster.until(lambda: cluster.serving("chat") == ["pool-warm-0"], "its return")
                case "another image":
                    apply_pool(cluster, image="slipway/runtime:new")
                case "the spec names no pool":
                    cluster.apply("chat", warmPool=None)
                    await cluster.quiet(5)
            cluster.apply("chat", replicas=0)
            if why == "cordoned":
                await cluster.until(lambda: cluster.runtimes["pool-warm-0"].draining, "the drain")
                node = cluster.server.get(NODES, "", "node-a")
                assert node is not None
                cluster.server.put(NODES, node | {"spec": {"unschedulable": True}})
            await cluster.until(lambda: cluster.live("chat") == [], "its end")
            await cluster.quiet(5)
            assert "pool-warm-0" not in [pod["metadata"]["name"] for pod in cluster.live()]
            assert events(cluster, "PodReturned") == []

    run_in_virtual_time(story())


@pytest.mark.capability("AS-5")
@pytest.mark.parametrize("fault", ["keeps its model", "leaks memory"])
def test_a_returned_pod_that_does_not_come_back_is_replaced(tmp_path, fault):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            apply_pool(cluster, size=1, refill={"maxConcurrent": 1, "delaySeconds": 300})
            cluster.start_operator()
            await warmed(cluster, 1)
            setattr(cluster, "leaks" if fault == "leaks memory" else "keeps_model", lambda pod: pod == "pool-warm-0")
            cluster.apply("chat", replicas=1, warmPool={"name": "pool"})
            await cluster.until(lambda: cluster.serving("chat") == ["pool-warm-0"], "the claimed replica")
            cluster.apply("chat", replicas=0)
            await cluster.until(lambda: bool(events(cluster, "PodRecycled")), "the recycling")
            assert events(cluster, "PodReturned") == []
            await warmed(cluster, 1)
            assert (
                waiting(cluster) != ["pool-warm-0"]
                or cluster.live()[0]["metadata"]["annotations"].get(names.ANNOTATION_RETURNED_AT) is None
            )

    run_in_virtual_time(story())


@pytest.mark.capability("AS-5")
@pytest.mark.parametrize("writes", range(1, 13))
def test_an_operator_that_dies_at_any_write_of_a_return_leaves_each_pod_with_one_owner(tmp_path, writes):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            apply_pool(cluster, size=2, refill={"maxConcurrent": 2, "delaySeconds": 120})
            first = cluster.start_operator("first")
            await warmed(cluster, 2)
            cluster.apply("chat", replicas=2, warmPool={"name": "pool", "policy": "Require"})
            await cluster.until(lambda: len(cluster.serving("chat")) == 2, "both replicas")
            pods = {pod["metadata"]["uid"] for pod in cluster.live()}
            await cluster.until(lambda: pool_status(cluster).get("claimed") == 2, "a pool at rest")
            first.kill()
            dying = cluster.start_operator("dying", dies_after_writes=writes)
            await cluster.until(lambda: dying.is_leader or dying.is_dead, "its lead")
            cluster.apply("chat", replicas=0)

            def has_ended() -> bool:
                check_owners(cluster)
                return dying.is_dead or len(waiting(cluster)) == 2

            await cluster.until(has_ended, "its end")
            if not dying.is_dead:
                dying.kill()
            cluster.start_operator("second")
            await warmed(cluster, 2)
            check_owners(cluster)
            await cluster.until(lambda: len(cluster.live()) == 2, "nothing left over")
            assert pool_status(cluster)["hits"] == 2, "a return is no use, and takes none away"
            assert {pod["metadata"]["uid"] for pod in cluster.live()} <= pods, "no pod was started instead"

    run_in_virtual_time(story())


@pytest.mark.capability("AS-5")
@pytest.mark.parametrize("is_lost_on_the_way", [True, False], ids=["the request", "the reply"])
def test_a_return_whose_request_or_reply_is_lost_is_made_once(tmp_path, is_lost_on_the_way):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            apply_pool(cluster, size=1, refill={"maxConcurrent": 1, "delaySeconds": 3600})
            await claim_one(cluster, warm=1)
            lost: list[str] = []

            def lose(what: str) -> None:
                pod = cluster.server.get(PODS, NAMESPACE, "pool-warm-0")
                is_draining = pod is not None and names.ANNOTATION_DRAIN_STARTED in pod["metadata"]["annotations"]
                is_return = pod is not None and names.ANNOTATION_RETURNED_AT in pod["metadata"]["annotations"]
                is_the_moment = is_draining if is_lost_on_the_way else is_return
                if what == f"PATCH /api/v1/namespaces/{NAMESPACE}/pods/pool-warm-0" and is_the_moment and not lost:
                    lost.append(what)
                    raise Unreachable("cut off")

            if is_lost_on_the_way:
                cluster.on_write = lose
            else:
                cluster.on_written = lose
            cluster.apply("chat", replicas=0)
            await cluster.until(lambda: waiting(cluster) == ["pool-warm-0"], "the return")
            await warmed(cluster, 1)
            assert lost
            assert cluster.live()[0]["metadata"]["annotations"][names.ANNOTATION_CLAIMS] == "1"
            check_owners(cluster)

    run_in_virtual_time(story())


@pytest.mark.capability("AS-5")
def test_old_pods_are_replaced_one_at_a_time_and_the_pool_is_never_short_of_two(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            apply_pool(cluster, size=3, refill={"maxConcurrent": 1, "delaySeconds": 0}, recycleAfterSeconds=600)
            cluster.start_operator()
            await warmed(cluster, 3)
            first = {pod["metadata"]["uid"] for pod in cluster.live()}
            fewest = [3]

            def all_replaced() -> bool:
                booted = (
                    [one for one in waiting(cluster) if cluster.runtimes[one].starting == "NoModel"]
                    if set(waiting(cluster)) <= set(cluster.runtimes)
                    else []
                )
                if booted:
                    fewest.append(len(booted))
                return not first & {pod["metadata"]["uid"] for pod in cluster.live()}

            await cluster.until(all_replaced, "the last replacement")
            await warmed(cluster, 3)
            assert min(fewest) >= 2, "one at a time"
            assert len(events(cluster, "PodRecycled")) == 3

    run_in_virtual_time(story())


def walk_with_returns(master_directory: Path, seed: int) -> int:
    """One walk; the number of pods that have returned to the pool in it."""
    draw, returned = random.Random(seed), set[str]()
    wanted = {"one": 2, "two": 1}

    async def story() -> None:
        async with simulated_cluster(master_directory) as cluster:
            recycling = {"recycleAfterSeconds": 60, "recycleAfterClaims": 3}
            apply_pool(cluster, size=3, refill={"maxConcurrent": 2, "delaySeconds": draw.choice([1, 30])}, **recycling)
            largest = 3

            def fail_now_and_then(_what: str) -> None:
                if "/leases" not in _what and draw.random() < 0.05:
                    raise Unreachable("cut off")

            cluster.on_write = cluster.on_written = fail_now_and_then
            cluster.write_seconds = 0.1
            cluster.leaks = lambda _pod: draw.random() < 0.2
            cluster.keeps_model = lambda _pod: draw.random() < 0.2
            for name, replicas in wanted.items():
                cluster.apply(name, replicas=replicas, warmPool={"name": "pool"})
            cluster.start_operator()
            for _ in range(25):
                name = draw.choice(list(wanted))
                match draw.randrange(7):
                    case 0 | 1 | 2 | 3:
                        wanted[name] = draw.choice([0, 0, 1, 2, 3])
                        cluster.apply(name, replicas=wanted[name])
                    case 4:
                        cluster.processes[-1].kill()
                        cluster.start_operator()
                    case 5:
                        size = draw.randrange(4)
                        largest = max(largest, size)
                        apply_pool(
                            cluster, size=size, refill={"maxConcurrent": 2, "delaySeconds": draw.choice([1, 30])}
                        )
                    case 6:
                        live = cluster.live()
                        if live:
                            cluster.server.delete(PODS, NAMESPACE, draw.choice(live)["metadata"]["name"])
                for _ in range(draw.randrange(1, 80)):
                    await asyncio.sleep(0.25)
                    check_owners(cluster)
                    # One refill or return of each service may be on its way while the pool's own pass cannot see it.
                    assert len(waiting(cluster)) <= largest + 1 + len(wanted), "size + what is on its way"
                    returned.update(
                        pod["metadata"]["uid"]
                        for pod in cluster.live()
                        if names.ANNOTATION_RETURNED_AT in pod["metadata"]["annotations"]
                    )
            cluster.on_write = cluster.on_written = lambda _what: None
            cluster.leaks = cluster.keeps_model = lambda _pod: False
            apply_pool(cluster, size=2, recycleAfterSeconds=100_000)
            await cluster.until(
                lambda: all(len(cluster.serving(one)) == count for one, count in wanted.items()), "the end"
            )
            await warmed(cluster, 2)
            await cluster.until(lambda: len(cluster.live()) == sum(wanted.values()) + 2, "nothing left over")
            check_owners(cluster)
            for name in waiting(cluster):
                assert cluster.runtimes[name].model is None, "a pod that waits has no model of a service"

    run_in_virtual_time(story())
    return len(returned)


@pytest.mark.capability("AS-5")
def test_in_random_walks_with_returns_and_recycling_no_pod_is_lost_and_the_pool_is_never_far_above_its_size(tmp_path):
    returned = 0
    for seed in range(40):
        if seed >= 8 and returned:
            break
        (directory := tmp_path / str(seed)).mkdir()
        returned += walk_with_returns(directory, seed)
    assert returned, "walks without a return prove nothing about it"
