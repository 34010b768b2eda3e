"""People edit labels of our objects: they are restored, nothing is hidden or doubled, and Ready is what gateways see.

review/control-plane.md 5 and 6.
"""

import random
from copy import deepcopy

import pytest

from slipway_api import names
from slipway_api.pod_labels import ROUTING_LABELS
from slipway_kube.resources import CONTROLLER_REVISIONS, DISRUPTION_BUDGETS, PODS, SERVICES
from tests.operator.edited_labels import (
    ADDED,
    OF_REPLICAS,
    VALUES,
    edit,
    endpoints,
    gpus_are_counted,
    is_right,
    notes,
    picture,
    replicas,
)
from tests.operator.simulated_cluster import NAMESPACE, simulated_cluster
from tests.operator.virtual_time import run_in_virtual_time
from tests.operator.warm_pool_views import apply_pool, check_owners, claim_one, events, pool_status, waiting, warmed

pytestmark = pytest.mark.capability("OP-16")


@pytest.mark.parametrize("value", [None, "debug"], ids=["removed", "changed"])
@pytest.mark.parametrize("label", [*OF_REPLICAS, *ADDED])
def test_an_edited_label_of_a_replica_is_restored_with_an_event_and_no_pod_is_replaced(tmp_path, label, value):
    """review/control-plane.md 5, 6"""
    if label in ADDED and value is None:
        pytest.skip("a replica has none")

    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            cluster.apply("chat", replicas=1)
            cluster.start_operator()
            await cluster.until(lambda: is_right(cluster, 1), "the replica")
            before, (name,) = picture(cluster), [pod["metadata"]["name"] for pod in replicas(cluster)]
            async with gpus_are_counted(cluster, 1):
                edit(cluster, PODS, name, **{label: value})
                await cluster.until(lambda: picture(cluster) == before, f"the label {label}")
                await cluster.until(lambda: is_right(cluster, 1), "the replica again")
                assert await cluster.quiet(60) == []
            assert picture(cluster) == before
            assert cluster.runtimes[name].drained_with == []
            (note,) = notes(cluster)
            assert label in note
            assert name in note

    run_in_virtual_time(story())


@pytest.mark.parametrize("label", sorted(ROUTING_LABELS))
def test_while_the_label_cannot_be_restored_the_replica_is_not_ready(tmp_path, label):
    """review/control-plane.md 6"""

    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            cluster.apply("chat", replicas=1)
            cluster.start_operator()
            await cluster.until(lambda: is_right(cluster, 1), "the replica")
            (name,) = [pod["metadata"]["name"] for pod in replicas(cluster)]
            cluster.server.fail(method="PATCH", path=f"/pods/{name}$", status=403, times=10_000)
            edit(cluster, PODS, name, **{label: None})
            await cluster.until(lambda: cluster.condition("chat", "Ready").get("status") == "False", "not ready")
            await cluster.quiet(120)
            assert endpoints(cluster) == []
            assert cluster.status("chat")["readyReplicas"] == 0
            assert cluster.condition("chat", "RouteReady")["status"] == "False"
            assert label in cluster.condition("chat", "Ready")["message"]
            assert len(replicas(cluster)) == 1, "it holds its slot"
            assert notes(cluster) == [], "nothing was restored"

    run_in_virtual_time(story())


def test_a_replica_that_drains_by_its_edited_label_is_asked_to_serve_before_it_is_labelled(tmp_path):
    """review/control-plane.md 6"""

    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            cluster.apply("chat", replicas=1)
            cluster.start_operator()
            await cluster.until(lambda: is_right(cluster, 1), "the replica")
            before, (name,) = picture(cluster), [pod["metadata"]["name"] for pod in replicas(cluster)]
            cluster.runtimes[name].draining = True
            await cluster.quiet(20)  # an idle replica is asked every 15 s
            edit(cluster, PODS, name, **{names.LABEL_STATE: "debug"})
            await cluster.until(lambda: picture(cluster) == before, "the label")
            assert cluster.runtimes[name].state_at_undrain == ["debug"]
            await cluster.until(lambda: is_right(cluster, 1), "the replica again")

    run_in_virtual_time(story())


@pytest.mark.parametrize("value", [None, "serving", "debug"])
def test_a_replica_that_the_operator_drains_goes_on_draining(tmp_path, value):
    """review/control-plane.md 6"""

    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            cluster.apply("chat", replicas=2, drain={"timeoutSeconds": 300, "endpointPropagationSeconds": 1})
            cluster.start_operator()
            await cluster.until(lambda: is_right(cluster, 2), "the replicas")
            for runtime in cluster.runtimes.values():
                runtime.running = 1
            cluster.apply("chat", replicas=1)
            drains = names.ANNOTATION_DRAIN_STARTED

            def draining():
                return [one for one in replicas(cluster) if drains in one["metadata"]["annotations"]]

            await cluster.until(lambda: len(draining()) == 1, "a drain")
            (pod,) = draining()
            name, started = pod["metadata"]["name"], pod["metadata"]["annotations"][drains]
            edit(cluster, PODS, name, **{names.LABEL_STATE: value})
            await cluster.until(
                lambda: draining()[0]["metadata"]["labels"].get(names.LABEL_STATE) == "draining", "its label"
            )
            assert draining()[0]["metadata"]["annotations"][drains] == started
            await cluster.quiet(30)
            assert len(replicas(cluster)) == 2, "its request is not cut"
            cluster.runtimes[name].running = 0
            await cluster.until(lambda: is_right(cluster, 1), "the end of the drain")

    run_in_virtual_time(story())


def test_edits_while_no_operator_leads_are_found_at_the_takeover(tmp_path):
    """review/control-plane.md 5"""

    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            cluster.apply("chat", replicas=2)
            first = cluster.start_operator()
            await cluster.until(lambda: is_right(cluster, 2), "the replicas")
            before = picture(cluster)
            first.kill()
            for pod in replicas(cluster):
                restored = pod["metadata"]["labels"].keys() - names.RECOMMENDED_LABELS
                edit(cluster, PODS, pod["metadata"]["name"], **dict.fromkeys(restored))
            for one in cluster.server.objects(CONTROLLER_REVISIONS, NAMESPACE):
                edit(cluster, CONTROLLER_REVISIONS, one["metadata"]["name"], **dict.fromkeys(one["metadata"]["labels"]))
            async with gpus_are_counted(cluster, 2):
                cluster.start_operator()
                await cluster.until(lambda: picture(cluster) == before, "all labels")
                await cluster.until(lambda: is_right(cluster, 2), "the replicas again")
                assert await cluster.quiet(60) == []

    run_in_virtual_time(story())


def test_a_409_by_a_hidden_pod_of_ours_restores_its_labels(tmp_path):
    """review/control-plane.md 5: the list that looks for hidden pods fails, so only the refused create shows it."""

    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            cluster.apply("chat", replicas=1)
            first = cluster.start_operator()
            await cluster.until(lambda: is_right(cluster, 1), "the replica")
            before, (name,) = picture(cluster), [pod["metadata"]["name"] for pod in replicas(cluster)]
            first.kill()
            edit(cluster, PODS, name, **{names.LABEL_MANAGED_BY: None})
            operator = cluster.start_operator()

            async def finds_nothing(*_: object) -> None:
                return None

            operator.manager.caches.owned_pods.sweep = finds_nothing
            await cluster.until(lambda: picture(cluster) == before, "the label")
            await cluster.until(lambda: is_right(cluster, 1), "the replica again")
            assert any(write.startswith("POST") and write.endswith("/pods") for write in operator.writes)

    run_in_virtual_time(story())


def test_a_foreign_pod_with_our_labels_is_neither_counted_nor_routed_to(tmp_path):
    """review/control-plane.md 5"""

    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            cluster.apply("chat", replicas=1)
            cluster.start_operator()
            await cluster.until(lambda: is_right(cluster, 1), "the replica")
            (ours,) = replicas(cluster)
            labels = ours["metadata"]["labels"] | {names.LABEL_SLOT: "1"}
            stolen = ours["metadata"]["name"].replace("-0-0", "-1-0")
            cluster.server.put(
                PODS,
                {
                    "metadata": {"name": stolen, "namespace": NAMESPACE, "labels": labels},
                    "spec": ours["spec"],
                    "status": ours["status"],
                },
            )
            await cluster.quiet(10)
            assert is_right(cluster, 1)
            cluster.apply("chat", replicas=2)
            await cluster.until(lambda: is_right(cluster, 2), "a second replica under another name")
            assert stolen not in endpoints(cluster)
            assert events(cluster, "NameConflict")
            assert notes(cluster) == [], "labels of foreign pods are left as they are"

    run_in_virtual_time(story())


@pytest.mark.parametrize(
    ("label", "value"),
    [
        (names.LABEL_POOL, None),
        (names.LABEL_POOL, "other"),
        (names.LABEL_STATE, None),
        (names.LABEL_STATE, "serving"),
        (names.LABEL_MANAGED_BY, None),
        (names.LABEL_SERVICE, "chat"),
    ],
)
def test_an_edited_label_of_a_waiting_pod_is_restored_and_the_pool_starts_no_other(tmp_path, label, value):
    """review/control-plane.md 5: "the same in a WarmPool: size 2, ready 1" """

    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            apply_pool(cluster, size=2)
            cluster.start_operator()
            await warmed(cluster, 2)
            before = picture(cluster)
            edit(cluster, PODS, "pool-warm-0", **{label: value})
            await cluster.until(lambda: picture(cluster) == before, "the label")
            await cluster.until(lambda: pool_status(cluster).get("ready") == 2, "both again")
            assert await cluster.quiet(60) == []
            assert waiting(cluster) == ["pool-warm-0", "pool-warm-1"]
            assert len(notes(cluster)) == 1

    run_in_virtual_time(story())


@pytest.mark.parametrize("operator_is_there", [True, False])
def test_a_claimed_replica_that_loses_all_labels_keeps_its_slot_and_its_pool(tmp_path, operator_is_there):
    """review/control-plane.md 5"""

    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            apply_pool(cluster, size=1)
            await claim_one(cluster, warm=1)
            await cluster.until(lambda: is_right(cluster, 1), "the replica")
            await warmed(cluster, 1)
            before, (pod,) = picture(cluster), replicas(cluster)
            if not operator_is_there:
                cluster.processes[-1].kill()
            restored = pod["metadata"]["labels"].keys() - names.RECOMMENDED_LABELS
            edit(cluster, PODS, pod["metadata"]["name"], **dict.fromkeys(restored))
            if not operator_is_there:
                cluster.start_operator()
            async with gpus_are_counted(cluster, 1):
                await cluster.until(lambda: picture(cluster) == before, "all labels")
                await cluster.until(lambda: is_right(cluster, 1), "the replica again")
                await cluster.quiet(60)
            assert picture(cluster) == before
            assert pool_status(cluster)["claimed"] == 1

    run_in_virtual_time(story())


@pytest.mark.parametrize("seed", range(4))
def test_edits_during_rollouts_and_scaling_hide_and_double_nothing(tmp_path, seed):
    """review/control-plane.md 5, 6: while replicas start, drain and change hands."""
    chance = random.Random(seed)

    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            cluster.apply("chat", replicas=2)
            cluster.start_operator()
            await cluster.until(lambda: is_right(cluster, 2), "the replicas")
            # At most 3 replicas, a surge of 1, and those that a scale-down drains.
            async with gpus_are_counted(cluster, 3 + 1 + 2):
                for number in range(6):
                    change = {"replicas": chance.randint(1, 3)}
                    if chance.random() < 0.5:
                        change = {"model": {"uri": f"file:///models/{number}"}}
                    cluster.apply("chat", **change)
                    for _ in range(4):
                        pods = cluster.server.objects(PODS, NAMESPACE)
                        name = chance.choice(pods)["metadata"]["name"]
                        labels = chance.sample((*OF_REPLICAS, *ADDED), chance.randint(1, 3))
                        edit(cluster, PODS, name, **{it: chance.choice(VALUES) for it in labels})
                        await cluster.quiet(chance.choice((0.25, 1, 5)))
                        if chance.random() < 0.15:
                            cluster.processes[-1].kill()
                            cluster.start_operator()
                wanted = cluster.service("chat")["spec"]["replicas"]
                await cluster.until(lambda: is_right(cluster, wanted), "the replicas")
                await cluster.quiet(60)
                assert await cluster.quiet(60) == []
                assert is_right(cluster, wanted)
            shown = {pod["metadata"]["name"]: pod["metadata"]["labels"] for pod in replicas(cluster)}
            assert all(name.startswith(f"chat-{it[names.LABEL_REVISION][:5]}-") for name, it in shown.items())

    run_in_virtual_time(story())


@pytest.mark.parametrize("seed", range(3))
def test_edits_of_waiting_and_claimed_pods_hide_and_double_nothing(tmp_path, seed):
    """review/control-plane.md 5: a pool whose pods are claimed and returned while people edit their labels."""
    chance = random.Random(seed)

    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            apply_pool(cluster, size=2)
            cluster.apply("chat", replicas=1, warmPool={"name": "pool"})
            cluster.start_operator()
            await warmed(cluster, 2)
            for _ in range(6):
                cluster.apply("chat", replicas=chance.randint(0, 2))
                for _ in range(3):
                    name = chance.choice(cluster.server.objects(PODS, NAMESPACE))["metadata"]["name"]
                    labels = chance.sample((*OF_REPLICAS, *ADDED), chance.randint(1, 3))
                    edit(cluster, PODS, name, **{it: chance.choice(VALUES) for it in labels})
                    await cluster.quiet(chance.choice((0.25, 1, 5)))
            cluster.apply("chat", replicas=2)
            await cluster.until(lambda: is_right(cluster, 2), "the replicas")
            await warmed(cluster, 2)
            await cluster.quiet(60)
            assert is_right(cluster, 2)
            check_owners(cluster)
            assert len(cluster.live()) == 4, "no pod is hidden"

    run_in_virtual_time(story())


@pytest.mark.parametrize("resource", [SERVICES, DISRUPTION_BUDGETS], ids=lambda one: one.kind)
def test_a_child_without_its_labels_is_ours_by_its_owner(tmp_path, resource):
    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            cluster.apply("chat", replicas=1)
            first = cluster.start_operator()
            await cluster.until(lambda: is_right(cluster, 1), "the replica")
            (child,) = cluster.server.objects(resource, NAMESPACE)
            edit(cluster, resource, "chat", **dict.fromkeys(child["metadata"]["labels"]))
            first.kill()
            cluster.start_operator()
            await cluster.until(
                lambda: (
                    cluster.server.objects(resource, NAMESPACE)[0]["metadata"].get("labels")
                    == child["metadata"]["labels"]
                ),
                "its labels",
            )
            assert not cluster.condition("chat", "Stalled")

    run_in_virtual_time(story())


@pytest.mark.parametrize("seed", range(6))
def test_whatever_labels_people_edit_nothing_is_hidden_doubled_or_cut(tmp_path, seed):
    """review/control-plane.md 5, 6: a random life of edits, operators that die, and changes of the number."""
    chance = random.Random(seed)

    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            cluster.apply("chat", replicas=2)
            cluster.start_operator()
            await cluster.until(lambda: is_right(cluster, 2), "the replicas")
            before = picture(cluster)
            async with gpus_are_counted(cluster, 2):
                for _ in range(12):
                    resource = chance.choice((PODS, PODS, PODS, CONTROLLER_REVISIONS))
                    one = chance.choice(cluster.server.objects(resource, NAMESPACE))
                    labels = chance.sample((*OF_REPLICAS, *ADDED), chance.randint(1, 3))
                    edit(cluster, resource, one["metadata"]["name"], **{it: chance.choice(VALUES) for it in labels})
                    if chance.random() < 0.3:
                        cluster.processes[-1].kill()
                    await cluster.quiet(chance.choice((0.25, 1, 7)))
                    if cluster.processes[-1].is_dead:
                        cluster.start_operator()
                await cluster.until(lambda: picture(cluster) == before, "all labels")
                await cluster.until(lambda: is_right(cluster, 2), "the replicas again")
                assert await cluster.quiet(30) == []
            assert picture(cluster) == before, "no pod was replaced"
            assert all(runtime.drained_with == [] for runtime in cluster.runtimes.values()), "no stream was cut"

    run_in_virtual_time(story())


def test_a_claimed_pod_of_an_earlier_version_without_the_annotation_of_its_identity_stays_and_is_restored(tmp_path):
    """Issue 26, OP-16: its name says nothing about revision and slot, so only its labels do."""

    async def story() -> None:
        async with simulated_cluster(tmp_path) as cluster:
            apply_pool(cluster, size=1)
            await claim_one(cluster, warm=1)
            await cluster.until(lambda: is_right(cluster, 1), "the replica")
            await warmed(cluster, 1)
            cluster.processes[-1].kill()
            (pod,) = replicas(cluster)
            metadata = deepcopy(pod["metadata"])
            metadata["annotations"].pop(names.ANNOTATION_REPLICA, None)
            del metadata["resourceVersion"]
            cluster.server.put(PODS, pod | {"metadata": metadata})
            before = picture(cluster)

            cluster.start_operator()
            writes = await cluster.quiet(30)
            assert not [write for write in writes if "/pods" in write]
            edit(cluster, PODS, pod["metadata"]["name"], **{names.LABEL_STATE: None})
            await cluster.until(lambda: picture(cluster) == before, "the label")
            await cluster.until(lambda: is_right(cluster, 1), "the replica again")
            assert [one["metadata"]["uid"] for one in replicas(cluster)] == [pod["metadata"]["uid"]]

    run_in_virtual_time(story())
