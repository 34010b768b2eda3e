"""A LoRAAdapter on a simulated cluster: loaded, probed, routed, replaced and unloaded, with faults of replicas."""

from typing import Any

import pytest

from slipway_api import names
from slipway_api.gateway_api import AdapterDemand, DemandReport, ServiceDemand
from slipway_kube.resources import CONFIG_MAPS, EVENTS, LORA_ADAPTERS, SECRETS
from tests.operator.serving_cluster import ready
from tests.operator.simulated_cluster import NAMESPACE, SimulatedCluster, simulated_cluster
from tests.operator.virtual_time import run_in_virtual_time

ROOM = {"lora": {"maxAdapters": 4, "maxCPUAdapters": 300, "maxRank": 16}}


def apply(cluster: SimulatedCluster, name: str = "sailor", *, base: str = "chat", uri: str = "", **spec: Any) -> None:
    """kubectl apply of an adapter."""
    old = cluster.server.get(LORA_ADAPTERS, NAMESPACE, name)
    body = old or {"metadata": {"name": name, "namespace": NAMESPACE}, "spec": {"baseRef": {"name": base}}}
    source = {"uri": uri or f"file:///models/{name}"}
    cluster.server.put(LORA_ADAPTERS, body | {"spec": body["spec"] | {"source": source} | spec})


def adapter(cluster: SimulatedCluster, name: str = "sailor") -> dict[str, Any] | None:
    return cluster.server.get(LORA_ADAPTERS, NAMESPACE, name)


def status(cluster: SimulatedCluster, name: str = "sailor") -> dict[str, Any]:
    return (adapter(cluster, name) or {}).get("status") or {}


def condition(cluster: SimulatedCluster, kind: str, name: str = "sailor") -> tuple[str, str]:
    found = next((one for one in status(cluster, name).get("conditions", []) if one["type"] == kind), {})
    return found.get("status", ""), found.get("reason", "")


def routed(cluster: SimulatedCluster, name: str = "sailor") -> set[str]:
    """The pods by whose annotation the gateway would send requests for the adapter."""
    return {
        pod["metadata"]["name"]
        for pod in cluster.live("chat")
        if name in pod["metadata"].get("annotations", {}).get(names.ANNOTATION_ADAPTERS, "").split(",")
    }


def loaded(cluster: SimulatedCluster, name: str = "sailor") -> set[str]:
    return {pod for pod, one in cluster.runtimes.items() if name in one.adapters.adapters and pod in names_of(cluster)}


def names_of(cluster: SimulatedCluster) -> set[str]:
    return {pod["metadata"]["name"] for pod in cluster.live("chat")}


def events(cluster: SimulatedCluster, reason: str) -> list[str]:
    return [one["note"] for one in cluster.server.objects(EVENTS, NAMESPACE) if one["reason"] == reason]


async def serving(cluster: SimulatedCluster, replicas: int = 3) -> None:
    cluster.apply("chat", replicas=replicas, runtime=ROOM)
    cluster.start_operator()
    await ready(cluster, replicas=replicas)


async def is_loaded(cluster: SimulatedCluster, count: int, name: str = "sailor") -> None:
    await cluster.until(
        lambda: status(cluster, name).get("loaded") == f"{count}/{count}" and len(routed(cluster, name)) == count,
        f"{name} on {count} replicas",
    )


@pytest.mark.capability("ML-2", "OP-6")
def test_an_adapter_is_loaded_probed_and_routed_on_live_replicas_and_then_nothing_is_written(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            await serving(cluster)
            pods = names_of(cluster)
            apply(cluster)
            await is_loaded(cluster, 3)

            assert names_of(cluster) == pods, "no pod restarts"
            for one in cluster.runtimes.values():
                calls = [call for call in one.adapters.calls if call != "list"]
                assert calls == ["load sailor file:///models/sailor", "probe sailor"]
            found = status(cluster)
            assert condition(cluster, "Ready") == ("True", "Loaded")
            assert condition(cluster, "SourceResolved") == ("True", "Resolved")
            assert condition(cluster, "Reconciling") == condition(cluster, "Stalled") == ("", "")
            assert [(one["name"], one["state"]) for one in found["pods"]] == [(pod, "Loaded") for pod in sorted(pods)]
            assert found["resolvedDigest"] == "sha256:file:///models/sailor"
            assert found["rank"] == 8
            (fetched,) = events(cluster, "AdapterDownloaded")
            assert fetched.startswith("the first replica has fetched sailor from file:///models/sailor: ")
            assert fetched.endswith("rank 8, sha256:file:///models/sailor")
            assert len(events(cluster, "AdapterLoaded")) == 1
            await cluster.until(lambda: cluster.status("chat").get("adapters") == {"desired": 1, "ready": 1})
            assert cluster.condition("chat", "AdaptersReady")["status"] == "True"
            assert await cluster.quiet(700) == []

    run_in_virtual_time(story())


@pytest.mark.capability("ML-2")
def test_a_restarted_container_has_its_adapters_from_the_boot_list_while_no_operator_runs(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            await serving(cluster, 1)
            apply(cluster)
            await is_loaded(cluster, 1)
            await cluster.until(
                lambda: (
                    "sailor" in cluster.server.get(CONFIG_MAPS, NAMESPACE, "chat-adapters")["data"][names.ADAPTERS_FILE]
                )
            )
            cluster.processes[0].kill()
            (pod,) = names_of(cluster)

            cluster.restart_container(pod)

            assert loaded(cluster) == {pod}

    run_in_virtual_time(story())


@pytest.mark.capability("ML-2")
def test_a_replica_that_lost_its_adapters_gets_them_again(tmp_path):
    """aibrix#236: the label stayed, and the adapter was gone."""

    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            await serving(cluster, 2)
            apply(cluster, source={"uri": "s3://bucket/sailor", "credentialsSecretRef": {"name": "s3"}})
            cluster.server.put(
                SECRETS, {"metadata": {"name": "s3", "namespace": NAMESPACE}, "data": {"AWS_REGION": "eA=="}}
            )
            await is_loaded(cluster, 2)
            pod = sorted(names_of(cluster))[0]

            cluster.restart_container(pod)
            assert loaded(cluster) == names_of(cluster) - {pod}, "credentials are not in the boot list"
            await cluster.until(lambda: loaded(cluster) == names_of(cluster), "it is loaded again")
            await is_loaded(cluster, 2)

            calls = cluster.runtimes[pod].adapters.calls
            assert [call for call in calls if call != "list"][-2:] == ["load sailor s3://bucket/sailor", "probe sailor"]

    run_in_virtual_time(story())


@pytest.mark.capability("ML-2")
def test_new_replicas_load_it_before_they_are_ready(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            await serving(cluster, 1)
            apply(cluster)
            await is_loaded(cluster, 1)
            old = names_of(cluster)

            cluster.apply("chat", replicas=3)
            await ready(cluster, replicas=3)
            assert loaded(cluster) == names_of(cluster)
            await is_loaded(cluster, 3)

            for pod in names_of(cluster) - old:
                assert [call for call in cluster.runtimes[pod].adapters.calls if call != "list"] == ["probe sailor"]
            revisions = {one["metadata"]["labels"][names.LABEL_REVISION] for one in cluster.live("chat")}
            assert len(revisions) == 1, "a changed boot list is no new revision"

    run_in_virtual_time(story())


@pytest.mark.capability("ML-9")
def test_a_new_source_is_loaded_beside_the_old_one_probed_and_takes_over_without_a_gap(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            await serving(cluster, 2)
            apply(cluster)
            await is_loaded(cluster, 2)
            for one in cluster.runtimes.values():
                one.adapters.calls.clear()

            apply(cluster, uri="file:///models/sailor-2")
            gaps: list[set[str]] = []

            def swapped() -> bool:
                gaps.append(names_of(cluster) - routed(cluster))
                versions = {one.adapters.adapters["sailor"].uri for one in cluster.runtimes.values()}
                return versions == {"file:///models/sailor-2"} and status(cluster)["loaded"] == "2/2"

            await cluster.until(swapped, "the new version everywhere")
            await cluster.until(
                lambda: all(set(one.adapters.adapters) == {"sailor"} for one in cluster.runtimes.values())
            )

            assert all(gap == set() for gap in gaps), "it is routed all the time"
            for one in cluster.runtimes.values():
                verbs = [call.split()[0] for call in one.adapters.calls if call != "list"]
                assert verbs == ["load", "probe", "load", "unload"]
            await cluster.until(lambda: len(events(cluster, "AdapterSwapped")) == 1, "one event")
            assert status(cluster)["resolvedDigest"] == "sha256:file:///models/sailor-2"
            assert await cluster.quiet(300) == []

    run_in_virtual_time(story())


@pytest.mark.capability("ML-4", "ML-9")
def test_a_new_source_that_is_refused_leaves_the_old_one_serving(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            await serving(cluster, 2)
            apply(cluster)
            await is_loaded(cluster, 2)
            for one in cluster.runtimes.values():
                one.adapters.refusals["file:///bad"] = ("RankTooLarge", "rank 64 is above 16")

            apply(cluster, uri="file:///bad")
            await cluster.until(lambda: condition(cluster, "Stalled") == ("True", "RankTooLarge"))

            assert condition(cluster, "Ready") == ("True", "PartiallyLoaded")
            assert len(routed(cluster)) == 2
            assert await cluster.quiet(600) == []

            apply(cluster, uri="file:///models/good")
            await is_loaded(cluster, 2)
            assert condition(cluster, "Stalled") == ("", "")

    run_in_virtual_time(story())


@pytest.mark.capability("ML-4")
def test_one_bad_replica_fails_no_other_and_is_retried_with_backoff(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            await serving(cluster)
            bad = sorted(names_of(cluster))[0]
            double = cluster.runtimes[bad].adapters
            double.refusals["file:///models/sailor"] = ("DownloadFailed", "the bucket does not answer")
            apply(cluster)
            await cluster.until(lambda: len(routed(cluster)) == 2, "two of three")
            assert bad not in routed(cluster)
            await cluster.quiet(120)

            entry = next(one for one in status(cluster)["pods"] if one["name"] == bad)
            assert (entry["state"], entry["message"]) == ("Retrying", "the bucket does not answer")
            assert 3 <= entry["attempts"] <= 6
            assert condition(cluster, "Ready") == ("True", "PartiallyLoaded")
            attempts = sum(call.startswith("load") for call in double.calls)
            assert attempts == entry["attempts"], "5 + 10 + 20 + 40 seconds apart"

            double.refusals.clear()
            await is_loaded(cluster, 3)

    run_in_virtual_time(story())


@pytest.mark.capability("ML-3", "ML-4")
def test_an_adapter_that_no_replica_can_load_is_stalled_and_retried_when_the_spec_changes(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            await serving(cluster, 2)
            for one in cluster.runtimes.values():
                one.adapters.refusals["file:///models/sailor"] = ("DigestMismatch", "other content")
            apply(cluster)
            await cluster.until(lambda: condition(cluster, "Stalled") == ("True", "DigestMismatch"))
            assert condition(cluster, "Ready") == ("False", "DigestMismatch")
            assert condition(cluster, "SourceResolved") == ("False", "DigestMismatch")
            assert routed(cluster) == set()
            assert events(cluster, "AdapterLoadFailed")
            before = {pod: len(one.adapters.calls) for pod, one in cluster.runtimes.items()}
            assert await cluster.quiet(600) == []
            loads = [call for one in cluster.runtimes.values() for call in one.adapters.calls if "load " in call]
            assert len(loads) == 2, f"terminal: {before}"

            apply(cluster, uri="file:///models/right")
            await is_loaded(cluster, 2)

    run_in_virtual_time(story())


@pytest.mark.capability("ML-2")
def test_an_adapter_that_does_not_answer_its_probe_is_never_routed(tmp_path):
    """dynamo#11163."""

    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            await serving(cluster, 1)
            for one in cluster.runtimes.values():
                one.adapters.broken_probe = True
            apply(cluster)
            await cluster.until(lambda: condition(cluster, "Stalled") == ("True", "EngineRejected"))

            assert routed(cluster) == set()
            assert condition(cluster, "Ready")[0] == "False"

    run_in_virtual_time(story())


def test_a_load_that_takes_long_is_followed_by_the_replicas_list(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            await serving(cluster, 1)
            (runtime,) = cluster.runtimes.values()
            runtime.adapters.loads_slowly = True
            apply(cluster)
            await cluster.until(lambda: condition(cluster, "Ready") == ("Unknown", "Loading"))
            await cluster.quiet(20)
            assert routed(cluster) == set()
            assert sum(call.startswith("load") for call in runtime.adapters.calls) == 1

            runtime.adapters.finish()
            await is_loaded(cluster, 1)
            assert float(status(cluster)["pods"][0]["loadSeconds"]) >= 15

    run_in_virtual_time(story())


@pytest.mark.capability("ML-2")
def test_a_deletion_unroutes_tells_routers_and_then_unloads(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            await serving(cluster, 2)
            apply(cluster)
            await is_loaded(cluster, 2)

            cluster.server.delete(LORA_ADAPTERS, NAMESPACE, "sailor")
            await cluster.until(lambda: routed(cluster) == set(), "off the route first")
            assert loaded(cluster) == names_of(cluster)
            unrouted = cluster.time()
            await cluster.until(lambda: adapter(cluster) is None, "the end")

            assert loaded(cluster) == set()
            assert cluster.time() - unrouted >= 1, "spec.drain.endpointPropagationSeconds of the base"
            assert "2 replicas" in events(cluster, "AdapterUnloaded")[0]
            await cluster.until(lambda: "adapters" not in cluster.status("chat"))

    run_in_virtual_time(story())


@pytest.mark.capability("ML-2")
def test_a_deletion_does_not_hang_on_a_silent_replica_or_on_requests_that_never_end(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            await serving(cluster, 3)
            apply(cluster, unload={"drainSeconds": 20})
            await is_loaded(cluster, 3)
            dead, slow, _ = sorted(names_of(cluster))
            cluster.silent = lambda pod: pod == dead
            cluster.runtimes[dead].boots += 1
            cluster.runtimes[slow].adapters.drains_slowly = True
            began = cluster.time()

            cluster.server.delete(LORA_ADAPTERS, NAMESPACE, "sailor")
            await cluster.until(lambda: adapter(cluster) is None, "the end")

            assert cluster.time() - began <= 60
            assert any(dead in note for note in events(cluster, "AdapterUnloaded"))

    run_in_virtual_time(story())


def test_a_deletion_does_not_wait_for_a_base_that_is_gone(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            await serving(cluster, 1)
            apply(cluster)
            await is_loaded(cluster, 1)
            cluster.delete("chat")
            await cluster.until(lambda: cluster.service("chat") is None)
            await cluster.until(lambda: condition(cluster, "Ready") == ("False", "BaseNotFound"))

            cluster.server.delete(LORA_ADAPTERS, NAMESPACE, "sailor")
            await cluster.until(lambda: adapter(cluster) is None, "the end")

    run_in_virtual_time(story())


def test_an_older_object_keeps_its_name(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            await serving(cluster, 1)
            apply(cluster, "first", adapterName="sailor")
            await cluster.quiet(5)
            apply(cluster, "second", adapterName="sailor")
            apply(cluster, "third", adapterName="chat")
            await cluster.until(lambda: condition(cluster, "Stalled", "second") == ("True", "NameConflict"))
            await cluster.until(lambda: condition(cluster, "Stalled", "third") == ("True", "NameConflict"))
            assert condition(cluster, "Ready", "first") == ("True", "Loaded")
            assert len(events(cluster, "NameConflict")) == 2

            cluster.server.delete(LORA_ADAPTERS, NAMESPACE, "first")
            await cluster.until(
                lambda: condition(cluster, "Ready", "second") == ("True", "Loaded"), "it takes the name"
            )

    run_in_virtual_time(story())


def test_a_base_without_room_or_without_replicas_is_said(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            cluster.apply("chat", replicas=1)
            cluster.start_operator()
            await ready(cluster, replicas=1)
            apply(cluster)
            await cluster.until(lambda: condition(cluster, "Stalled") == ("True", "CapacityExceeded"))

            cluster.apply("chat", replicas=0, runtime=ROOM)
            await cluster.until(lambda: condition(cluster, "Ready") == ("True", "BaseScaledToZero"))

    run_in_virtual_time(story())


@pytest.mark.capability("ML-3")
def test_credentials_come_from_the_secret_that_the_spec_names(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            await serving(cluster, 1)
            apply(cluster, source={"uri": "s3://bucket/sailor", "credentialsSecretRef": {"name": "s3"}})
            await cluster.until(lambda: condition(cluster, "Ready") == ("False", "CredentialsInvalid"))
            assert "Secret s3" in next(
                one["message"] for one in status(cluster)["conditions"] if one["type"] == "Ready"
            )

            secret = {"metadata": {"name": "s3", "namespace": NAMESPACE}, "data": {"AWS_SECRET_ACCESS_KEY": "aGk="}}
            cluster.server.put(SECRETS, secret)
            await is_loaded(cluster, 1)

            (runtime,) = cluster.runtimes.values()
            assert runtime.adapters.credentials[-1] == {"AWS_SECRET_ACCESS_KEY": "hi"}
            config = cluster.server.get(CONFIG_MAPS, NAMESPACE, "chat-adapters")
            assert "sailor" not in str(config["data"]), "a new replica could not fetch it"

    run_in_virtual_time(story())


@pytest.mark.capability("ML-2", "OP-6")
def test_an_adapter_on_demand_is_loaded_when_a_gateway_reports_a_request_and_dropped_when_room_is_needed(tmp_path):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            room = {"lora": {"maxAdapters": 1, "maxCPUAdapters": 1, "maxRank": 16}}
            cluster.apply("chat", replicas=1, runtime=room)
            cluster.start_operator()
            await ready(cluster, replicas=1)
            (runtime,) = cluster.runtimes.values()
            runtime.adapters.max_cpu_adapters = 1
            for name in ("sailor", "farmer"):
                apply(cluster, name, placement={"mode": "OnDemand"})
            await cluster.until(lambda: condition(cluster, "Ready", "farmer") == ("True", "OnDemand"))
            await cluster.until(lambda: condition(cluster, "Ready") == ("True", "OnDemand"))
            assert loaded(cluster) == loaded(cluster, "farmer") == set()
            assert await cluster.quiet(300) == []

            asks_for(cluster, "sailor")
            await is_loaded(cluster, 1)
            asks_for(cluster, "")
            assert await cluster.quiet(300) == [], "it stays while nothing needs its room"

            asks_for(cluster, "farmer")
            await is_loaded(cluster, 1, "farmer")
            asks_for(cluster, "")
            held = runtime.adapters.adapters
            runtime.adapters.adapters["sailor"] = held["sailor"].model_copy(update={"idle_seconds": 400.0})
            await cluster.until(lambda: not loaded(cluster) and not routed(cluster), "sailor leaves")
            await cluster.until(lambda: condition(cluster, "Ready") == ("True", "OnDemand"))
            assert loaded(cluster, "farmer") == routed(cluster, "farmer") == names_of(cluster)
            [event] = events(cluster, "AdapterEvicted")
            assert "has 2 adapters, memory for 1; sailor (priority 0) was idle for" in event
            assert await cluster.quiet(300) == []

    run_in_virtual_time(story())


def asks_for(cluster: SimulatedCluster, adapter: str) -> None:
    """A gateway reports that one request waits for the adapter, or for none."""
    manager = cluster.processes[0].manager
    waiting = (AdapterDemand(adapter=adapter, waiting_requests=1),) if adapter else ()
    demand = ServiceDemand(service=f"{NAMESPACE}/chat", adapters=waiting)
    report = DemandReport(boot_id="g", version=1, services=(demand,))
    gateways = manager._gateways
    for change in gateways._demand.receive("gateway-0", report, gateways._now()):
        manager._demand_changed(change)
