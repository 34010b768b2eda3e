"""Which pods a service claims, what the claim changes, and when the model is asked for again: tables."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from slipway_api import names
from slipway_api.conditions import EventReason
from slipway_api.inference_service import InferenceService
from slipway_api.runtime_api import StartupTimes
from slipway_operator.controller.claimer import claim_operations
from slipway_operator.core.actions import ClaimPod, CreatePod, LoadModel
from slipway_operator.core.observed import Capacity, Failure, Observed, Sample
from slipway_operator.core.service.plan import Plan, plan
from slipway_operator.core.warm_pool.shape import shape_of_service, write_shape
from slipway_operator.core.warm_pool.supply import WarmPod, WarmSupply
from tests.builders import T0, a_pod, a_service, promised, revision_of, seconds, seen


def wanting(replicas: int = 1, policy: str = "Prefer", **spec: Any) -> InferenceService:
    return promised(a_service(replicas=replicas, warmPool={"name": "pool", "policy": policy}, **spec), replicas)


def a_warm_pod(service: InferenceService, number: int = 0, **facts: Any) -> WarmPod:
    known = {
        "name": f"pool-warm-{number}",
        "uid": f"uid-{number}",
        "shape": write_shape(shape_of_service(service, revision_of(service))),
        "starting": "NoModel",
        "sampled_at": T0,
    }
    return WarmPod(**known | facts)


def supplied(service: InferenceService, *pods: WarmPod, **facts: Any) -> Observed:
    return replace(seen(service), warm=WarmSupply(pool="pool", pool_uid="uid-of-pool", pods=pods), **facts)


def claimed(made: Plan) -> list[str]:
    return [action.name for action in made.actions if isinstance(action, ClaimPod)]


def cold(made: Plan) -> list[CreatePod]:
    return [action for action in made.actions if isinstance(action, CreatePod)]


@pytest.mark.capability("AS-5")
@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({}, ""),
        ({"starting": "Booting"}, "no pod of WarmPool pool can be claimed"),
        ({"sampled_at": None}, "no pod of WarmPool pool can be claimed"),
        ({"sampled_at": T0 - timedelta(seconds=61)}, "no pod of WarmPool pool can be claimed"),
        ({"on_bad_node": True}, "no pod of WarmPool pool can be claimed"),
        ({"is_over": True}, "no pod of WarmPool pool can be claimed"),
        ({"shape": ""}, "the pods of WarmPool pool differ in image"),
    ],
)
def test_only_a_booted_pod_that_answers_and_fits_is_claimed(facts, reason):
    service = wanting()
    made = plan(supplied(service, a_warm_pod(service, **facts)), T0)

    if not reason:
        assert (claimed(made), cold(made)) == (["pool-warm-0"], [])
        return
    assert claimed(made) == []
    (create,) = cold(made)
    assert create.manifest["metadata"]["annotations"][names.ANNOTATION_POOL_MISSED] == "pool"
    (miss,) = (event for event in made.events if event.reason is EventReason.WARM_POOL_MISS)
    assert reason in miss.message


@pytest.mark.capability("AS-5")
def test_no_pod_is_claimed_twice_in_a_pass_and_a_lost_one_not_again():
    service = wanting(3)
    pods = [a_warm_pod(service, number) for number in range(3)]

    made = plan(supplied(service, *pods, lost_claims=frozenset({"uid-1"})), T0)

    assert claimed(made) == ["pool-warm-0", "pool-warm-2"]
    assert len(cold(made)) == 1


@pytest.mark.capability("AS-5", "SE-11")
def test_a_claimed_pod_of_an_open_service_stays_open_and_learns_how_to_recognise_its_gateway():
    service = wanting()
    made = plan(supplied(service, a_warm_pod(service)), T0)
    (action,) = (one for one in made.actions if isinstance(one, ClaimPod))

    assert action.request.serving_token_sha256 == ()
    assert action.request.gateway_token_sha256 == ("digest-of-demo/chat",)
    assert action.annotations[names.ANNOTATION_SERVING_TOKEN_SHA256] == "digest-of-demo/chat"


@pytest.mark.capability("AS-5")
def test_a_claim_makes_the_pod_a_replica_and_leaves_its_admin_token_alone():
    service = wanting(routing={"directAccess": "GatewayOnly"}, template={"metadata": {"labels": {"team": "a"}}})
    made = plan(supplied(service, a_warm_pod(service)), T0)
    (action,) = (one for one in made.actions if isinstance(one, ClaimPod))

    assert action.owner["uid"] == service.metadata.uid
    assert action.labels[names.LABEL_REVISION] == revision_of(service).hash
    assert (action.labels[names.LABEL_SLOT], action.labels[names.LABEL_STATE]) == ("0", names.STATE_SERVING)
    assert action.labels["team"] == "a"
    assert action.annotations[names.ANNOTATION_CLAIMED_AT] == T0.isoformat()
    assert action.annotations[names.ANNOTATION_SERVING_TOKEN_SHA256] == "digest-of-demo/chat"
    assert names.ANNOTATION_ADMIN_NONCE not in action.annotations
    assert action.request.serving_token_sha256 == ("digest-of-demo/chat",)
    assert (action.request.served_name, action.request.revision) == ("chat", revision_of(service).hash)
    tests = [one for one in claim_operations(action) if one["op"] == "test"]
    assert {(one["path"], one["value"]) for one in tests} == {
        ("/metadata/uid", "uid-0"),
        ("/metadata/labels/slipway.dev~1state", "warm"),
        ("/metadata/ownerReferences/0/uid", "uid-of-pool"),
    }


@pytest.mark.capability("AS-5")
def test_require_creates_nothing_and_says_so_once():
    service = wanting(policy="Require")
    first = plan(supplied(service), T0)
    told = service.model_copy(update={"status": first.status})
    second = plan(supplied(told), T0 + seconds(20))

    assert (claimed(first), cold(first)) == ([], [])
    assert [event.reason for event in first.events] == [EventReason.WARM_POOL_MISS]
    assert second.events == ()
    assert second.status == first.status
    stalled = Failure(action="CreatePod x", reason="Forbidden", message="exceeded quota: gpus", at=T0)
    third = plan(supplied(told, failures=(stalled,)), T0 + seconds(40))
    again = plan(supplied(told.model_copy(update={"status": third.status}), failures=(stalled,)), T0 + seconds(60))
    assert again.events == (), "nor while it is stalled for another cause"
    (waits,) = (one for one in first.status.conditions if one.type == "Reconciling")
    assert "no pod of WarmPool pool can be claimed, and spec.warmPool.policy is Require" in waits.message


@pytest.mark.capability("OP-18")
@pytest.mark.parametrize("replicas", [0, 1])
def test_a_required_pool_that_does_not_exist_is_stalled_with_one_event(replicas):
    """issue 26, 5: a reference to an object that is not there has its own reason and remedy."""
    service = wanting(replicas, policy="Require")
    without = replace(seen(service), warm=WarmSupply(pool="pool"))
    first = plan(without, T0)

    assert cold(first) == []
    remedy = "create it, correct spec.warmPool.name, or set spec.warmPool.policy to Prefer"
    told = {one.type: (one.status, one.reason, one.message) for one in first.status.conditions}
    status, reason, message = told["Stalled"]
    assert (status, reason) == ("True", "PoolNotFound")
    assert "there is no WarmPool pool in the namespace demo, and spec.warmPool.policy is Require" in message
    assert message.endswith(remedy)
    assert (told["Ready"][1] == "PoolNotFound") == (replicas > 0)
    assert told["RouteReady"][1] == "CannotStart", "clients need not wait for it"
    assert [event.reason for event in first.events] == [EventReason.POOL_NOT_FOUND]
    second = plan(replace(without, service=service.model_copy(update={"status": first.status})), T0 + seconds(20))
    assert second.events == ()
    assert second.status == first.status


@pytest.mark.capability("OP-18")
def test_a_preferred_pool_that_does_not_exist_stalls_nothing():
    made = plan(replace(seen(wanting()), warm=WarmSupply(pool="pool")), T0)

    assert len(cold(made)) == 1
    assert "Stalled" not in {one.type for one in made.status.conditions}


@pytest.mark.capability("AS-5")
@pytest.mark.parametrize(
    ("starting", "is_started", "asks"),
    [("NoModel", False, True), ("Booting", False, True), ("Loading", False, False), ("", True, False)],
)
def test_the_model_is_asked_for_until_the_pod_has_it(starting, is_started, asks):
    service = wanting()
    sample = Sample(at=T0, kv_usage=0, running=0, waiting=0, starting=starting)
    pod = a_pod(service=service).loading()
    pod = pod.but(claimed_at=T0, started=is_started, sample=sample, serving_digests=("as-annotated",))
    made = plan(replace(seen(service, pod), warm=WarmSupply(pool="pool")), T0 + seconds(1))

    asked = [action for action in made.actions if isinstance(action, LoadModel)]
    assert bool(asked) == asks
    assert all(action.request.gateway_token_sha256 == ("as-annotated",) for action in asked)


@pytest.mark.capability("AS-5")
def test_the_startup_timeout_counts_from_the_claim():
    service = wanting(runtime={"startupTimeoutSeconds": 60})
    old = {"scheduled_at": T0 - timedelta(hours=1), "claimed_at": T0, "started": False}
    pod = a_pod(service=service).loading().but(**old)
    soon = plan(replace(seen(service, pod), warm=WarmSupply(pool="pool")), T0 + seconds(59))
    late = plan(replace(seen(service, pod), warm=WarmSupply(pool="pool")), T0 + seconds(61))

    assert soon.status.attempts == ()
    assert [(one.slot, one.attempt) for one in late.status.attempts] == [(0, 1)], "it is replaced"


@pytest.mark.capability("ST-5")
def test_status_has_the_breakdown_of_the_newest_cold_start():
    service = promised(a_service(replicas=2), 2)

    def replica(slot: int, created: int, load: float, **facts: Any) -> Any:
        startup = StartupTimes(download_seconds=30.0, load_seconds=load, warmup_seconds=2.5)
        capacity = Capacity(max_sequences=4, kv_blocks=100, bytes_per_token=64, startup=startup)
        sample = Sample(at=T0, kv_usage=0, running=0, waiting=0, capacity=capacity)
        at = T0 + seconds(created)
        times = {"scheduled_at": at + seconds(3), "running_since": at + seconds(20)}
        pod = a_pod(service=service).slot(slot).created(at).ready(at + seconds(60))
        return pod.but(**{"sample": sample, **times, **facts})

    def shown(*pods: Any) -> Any:
        return plan(seen(service, *pods), T0 + seconds(200)).status.performance

    both = shown(replica(0, 0, 8.0), replica(1, 100, 4.0))

    assert both.to_json() == {
        "coldStart": {
            "scheduleSeconds": "3.00",
            "pullSeconds": "17.00",
            "downloadSeconds": "30.00",
            "loadSeconds": "4.00",
            "warmupSeconds": "2.50",
        }
    }
    for other in ({"claimed_at": T0}, {"restarts": 1}):
        assert shown(replica(0, 0, 8.0), replica(1, 100, 4.0, **other)).cold_start.load_seconds == 8
    assert shown(a_pod(service=service).ready()) is None
