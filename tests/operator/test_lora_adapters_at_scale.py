"""Adapters on a simulated cluster: crashes of the operator, placement on some replicas, and many adapters at once."""

import pytest

from slipway_kube.resources import PODS
from tests.operator.serving_cluster import ready
from tests.operator.simulated_cluster import NAMESPACE, simulated_cluster
from tests.operator.test_lora_adapters import (
    ROOM,
    apply,
    condition,
    is_loaded,
    loaded,
    names_of,
    routed,
    serving,
)
from tests.operator.virtual_time import run_in_virtual_time


@pytest.mark.capability("ML-2")
def test_an_operator_that_is_killed_at_any_write_leaves_an_adapter_that_the_next_one_finishes(tmp_path):
    for writes in range(1, 9):

        async def story(writes: int = writes) -> None:
            directory = tmp_path / str(writes)
            directory.mkdir()
            async with simulated_cluster(directory) as cluster:
                cluster.apply("chat", replicas=2, runtime=ROOM)
                first = cluster.start_operator()
                await ready(cluster, replicas=2)
                first._left = writes
                apply(cluster)
                await cluster.quiet(20)
                first.kill()
                cluster.start_operator()
                await is_loaded(cluster, 2)
                await cluster.until(lambda: cluster.status("chat").get("adapters") == {"desired": 1, "ready": 1})
                assert await cluster.quiet(300) == []

        run_in_virtual_time(story())


@pytest.mark.capability("ML-8")
def test_an_adapter_of_some_replicas_moves_only_when_one_of_them_goes(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            await serving(cluster, 4)
            apply(cluster, placement={"mode": "Replicas", "replicas": 2})
            await is_loaded(cluster, 2)
            chosen = routed(cluster)
            assert loaded(cluster) == chosen
            gone = sorted(chosen)[0]

            cluster.server.delete(PODS, NAMESPACE, gone)
            await cluster.until(lambda: gone not in names_of(cluster))
            await is_loaded(cluster, 2)
            await ready(cluster, replicas=4)
            await is_loaded(cluster, 2)

            assert routed(cluster) & chosen or len(chosen) == 2
            await cluster.until(lambda: loaded(cluster) == routed(cluster), "the others drop it")

    run_in_virtual_time(story())


@pytest.mark.capability("ML-2")
def test_an_adapter_is_routed_within_a_second_of_the_end_of_its_download(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            await serving(cluster, 3)
            for runtime in cluster.runtimes.values():
                runtime.adapters.loads_slowly = True
            apply(cluster)
            await cluster.until(lambda: all(one.adapters.slow for one in cluster.runtimes.values()))
            await cluster.quiet(7)
            assert routed(cluster) == set()
            for runtime in cluster.runtimes.values():
                runtime.adapters.finish()
            ended = cluster.time()
            await cluster.until(lambda: len(routed(cluster)) == 3)

            assert cluster.time() - ended <= 1.0

    run_in_virtual_time(story())


def test_a_replica_that_downloads_many_adapters_is_asked_rarely(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            await serving(cluster, 1)
            (runtime,) = cluster.runtimes.values()
            runtime.adapters.loads_slowly = True
            for number in range(80):
                apply(cluster, f"a{number}")
            await cluster.until(lambda: len(runtime.adapters.slow) == 80)
            await cluster.quiet(10)
            asked = runtime.adapters.calls.count("list")
            await cluster.quiet(30)

            assert runtime.adapters.calls.count("list") - asked <= 7, "one list every 5 s tells of all"
            runtime.adapters.finish()
            for number in range(80):
                await is_loaded(cluster, 1, f"a{number}")

    run_in_virtual_time(story())


def test_changes_of_one_pod_are_written_together(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            await serving(cluster, 1)
            cluster.server.requests.clear()
            for number in range(40):
                apply(cluster, f"a{number}")
            for number in range(40):
                await is_loaded(cluster, 1, f"a{number}")
            patches = [one for one in cluster.server.requests if one.method == "PATCH" and "/pods/" in one.path]

            assert len(patches) <= 10

    run_in_virtual_time(story())


@pytest.mark.capability("ML-2", "OP-6")
def test_many_adapters_on_many_replicas_cost_one_load_each_and_few_writes(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            await serving(cluster, 10)
            cluster.server.requests.clear()
            for number in range(40):
                apply(cluster, f"a{number}")
            for number in range(40):
                await is_loaded(cluster, 10, f"a{number}")
            calls = [call.split()[0] for one in cluster.runtimes.values() for call in one.adapters.calls]
            writes = [
                one.path for one in cluster.server.requests if one.method == "PATCH" and "/leases" not in one.path
            ]

            assert calls.count("load") == calls.count("probe") == 400
            assert calls.count("list") <= 60, "adapters of one base share the lists"
            assert sum("/pods/" in path for path in writes) <= 150, "one patch for many adapters of a pod"
            assert sum("loraadapters" in path and "status" in path for path in writes) <= 40 * 6
            await cluster.until(lambda: cluster.status("chat").get("adapters") == {"desired": 40, "ready": 40})
            assert await cluster.quiet(300) == []

    run_in_virtual_time(story())


def test_an_alias_is_shared_by_adapters_and_clashes_with_a_name(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            await serving(cluster, 1)
            apply(cluster, "one", alias={"name": "support", "weight": 90})
            apply(cluster, "two", alias={"name": "support", "weight": 10})
            await is_loaded(cluster, 1, "one")
            await is_loaded(cluster, 1, "two")
            await cluster.quiet(5)
            apply(cluster, "support")
            await cluster.until(lambda: condition(cluster, "Stalled", "support") == ("True", "NameConflict"))

            assert condition(cluster, "Ready", "one") == condition(cluster, "Ready", "two") == ("True", "Loaded")

    run_in_virtual_time(story())


def test_a_deleted_pod_leaves_nothing_in_memory(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            await serving(cluster, 2)
            apply(cluster)
            await is_loaded(cluster, 2)
            calls = cluster.processes[0].manager._adapter_calls
            gone = cluster.server.get(PODS, NAMESPACE, sorted(names_of(cluster))[0])
            assert gone is not None
            uid = gone["metadata"]["uid"]
            assert calls.listing(uid) is not None

            cluster.server.delete(PODS, NAMESPACE, gone["metadata"]["name"])
            await is_loaded(cluster, 2)
            await cluster.until(lambda: calls.listing(uid) is None)

            assert calls.outcome(uid, "sailor") is None
            assert calls.probed(uid) == frozenset()

    run_in_virtual_time(story())
