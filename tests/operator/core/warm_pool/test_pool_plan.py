"""What a pool does in one pass: tables, and the properties that hold for any pods."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipway_api import names
from slipway_api.inference_service import InferenceService
from slipway_api.warm_pool import PoolUse, WarmPoolStatus
from slipway_api.warm_pool_conditions import CONDITIONS, EVENTS, PoolEvent
from slipway_operator.core.actions import CreatePod, DeletePod, Failure
from slipway_operator.core.installation import NONROOT, PlacementDefaults
from slipway_operator.core.labels import EditedLabel
from slipway_operator.core.observed import Node
from slipway_operator.core.service.replicas.access import PortAccess
from slipway_operator.core.service.replicas.pod import build_pod
from slipway_operator.core.service.rollout.revision import Revision
from slipway_operator.core.warm_pool.autosize import wanted_size
from slipway_operator.core.warm_pool.observed import HungryReplica
from slipway_operator.core.warm_pool.plan import PoolPlan, plan
from slipway_operator.core.warm_pool.pod import build_pool_pod
from slipway_operator.core.warm_pool.shape import PARTS, differing_parts, shape_of_pool, shape_of_service, write_shape
from slipway_operator.core.warm_pool.uses import MOST_USES, claim_seconds, count_uses
from tests.builders import IMAGE, T0, a_service, minutes, revision_of, seconds
from tests.operator.core.warm_pool.pools import POOL_UID, APoolPod, a_miss, a_pool, a_waiting_pod, seen

ACCESS = PortAccess(nonce="nonce", admin_digests=("digest",))


def created(made: PoolPlan) -> list[str]:
    return [action.name for action in made.actions if isinstance(action, CreatePod)]


def deleted(made: PoolPlan) -> list[str]:
    return [action.name for action in made.actions if isinstance(action, DeletePod)]


@pytest.mark.capability("AS-5")
@pytest.mark.parametrize(
    ("spec", "pods", "expected"),
    [
        ({"size": 3}, [], ["pool-warm-0", "pool-warm-1", "pool-warm-2"]),
        ({"size": 3, "refill": {"maxConcurrent": 1}}, [], ["pool-warm-0"]),
        ({"size": 3, "refill": {"maxConcurrent": 1}}, [a_waiting_pod(0)], []),
        ({"size": 3, "refill": {"maxConcurrent": 1}}, [a_waiting_pod(0).booted()], ["pool-warm-1"]),
        ({"size": 1}, [a_waiting_pod(0).claimed_by("chat")], ["pool-warm-1"]),
        ({"size": 1}, [a_waiting_pod(0).but(deleted_at=T0)], ["pool-warm-1"]),
        ({"size": 2, "suspend": True}, [], []),
    ],
)
def test_missing_pods_are_started_under_names_that_no_pod_has(spec, pods, expected):
    assert created(plan(seen(a_pool(**spec), *pods), T0 + minutes(5))) == expected


@pytest.mark.capability("AS-5")
def test_nothing_is_started_within_the_delay_after_a_claim():
    pool = a_pool(size=2, refill={"maxConcurrent": 1, "delaySeconds": 10})
    pods = [a_waiting_pod(0).booted(), a_waiting_pod(1).claimed_by("chat", T0)]

    early, late = plan(seen(pool, *pods), T0 + seconds(4)), plan(seen(pool, *pods), T0 + seconds(10))

    assert (created(early), early.requeue_after) == ([], 6.0)
    assert created(late) == ["pool-warm-2"]


@pytest.mark.capability("AS-5")
def test_a_deletion_names_the_version_that_was_read():
    made = plan(seen(a_pool(size=1), a_waiting_pod(0).booted(), a_waiting_pod(1)), T0)

    (action,) = made.actions
    assert isinstance(action, DeletePod)
    assert (action.name, action.uid, action.resource_version) == ("pool-warm-1", "uid-of-pool-warm-1", "101")


@pytest.mark.capability("AS-5")
def test_a_pod_that_ended_is_replaced_after_pauses_that_grow_and_survive_the_operator():
    ended = a_waiting_pod(0).but(phase="Failed", phase_reason="Evicted")
    pauses, status, now = [], WarmPoolStatus(), T0
    for _ in range(4):
        made = plan(seen(a_pool(size=1, status=status), ended), now)
        assert deleted(made) == ["pool-warm-0"]
        assert created(made) == []
        assert [event.reason for event in made.events] == [PoolEvent.WARM_FAILED]
        status = made.status
        again = plan(seen(a_pool(size=1, status=status), ended), now + seconds(1))
        assert again.status.failures == status.failures, "counted once, however often the pass repeats"
        pauses.append((status.not_before - now).total_seconds())
        assert created(plan(seen(a_pool(size=1, status=status)), now + seconds(pauses[-1] - 1))) == []
        now = status.not_before
        assert created(plan(seen(a_pool(size=1, status=status)), now)) == ["pool-warm-0"]

    assert pauses == [10, 20, 40, 80]
    assert {one.type: one.reason for one in status.conditions}["Stalled"] == "WarmFailed"
    well = plan(seen(a_pool(size=1, status=status), a_waiting_pod(0).booted(now)), now).status
    assert (well.failures, well.not_before) == (None, None)


@pytest.mark.capability("AS-5")
def test_pods_give_way_once_for_each_replica_and_as_many_as_it_has_gpus():
    pods = [a_waiting_pod(number).booted() for number in range(4)]
    hungry = (HungryReplica(name="chat-x-0-0", gpu_resource="nvidia.com/gpu", gpus=2),)
    first = plan(seen(a_pool(size=4), *pods, hungry=hungry), T0)
    second = plan(seen(a_pool(size=4, status=first.status), *pods[2:], hungry=hungry), T0 + seconds(9))
    after = plan(seen(a_pool(size=4, status=second.status), *pods[2:]), T0 + seconds(20))

    assert (deleted(first), deleted(second)) == (["pool-warm-0", "pool-warm-1"], [])
    assert (created(second), created(after)) == ([], ["pool-warm-0", "pool-warm-1"])
    assert after.status.yielded_to == ()
    for spec, replica in (
        ({"yield": False}, hungry[0]),
        ({}, replace(hungry[0], gpu_resource="amd.com/gpu")),
        ({"resources": {"gpu": {"count": 0}}}, replace(hungry[0], gpu_resource="")),
    ):
        others = [pod.of_shape(**spec) for pod in pods]
        assert deleted(plan(seen(a_pool(size=4, **spec), *others, hungry=(replica,)), T0)) == []


@pytest.mark.capability("AS-5")
def test_pods_on_cordoned_nodes_move_and_those_of_another_shape_are_replaced_a_few_at_a_time():
    pods = [a_waiting_pod(number).booted() for number in range(3)]
    cordoned = plan(seen(a_pool(size=3), *pods, nodes=[Node(name="node-1", cordoned=True)]), T0)
    changed = a_pool(size=3, image="other", refill={"maxConcurrent": 1, "delaySeconds": 0})

    assert len(deleted(cordoned)) == 3
    assert len(deleted(plan(seen(changed, *pods), T0))) == 1
    assert deleted(plan(seen(changed, *pods[1:], a_waiting_pod(3).of_shape(image="other")), T0)) == [], "one starts"


@pytest.mark.capability("AS-5")
@pytest.mark.parametrize(
    ("moments", "expected"),
    [([], 1), ([0], 1), ([0, 20, 100, 900], 3), ([0, 20, 100, 119, 120], 4), (range(0, 100, 10), 6), ([-3590, 5], 1)],
)
def test_a_pool_that_sizes_itself_covers_the_fastest_pace_of_the_last_hour(moments, expected):
    spec = a_pool(autosize={"min": 1, "max": 6, "coverSeconds": 120}).spec
    uses = [PoolUse(time=T0 + seconds(at), service="chat", pod=f"p{at}", hit=True) for at in moments]

    assert wanted_size(spec, uses, T0 + minutes(20)).pods == expected
    assert wanted_size(spec, uses, T0 + minutes(100)).pods == 1, "an hour later"


@pytest.mark.capability("AS-5")
@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 40)), max_size=60),
    st.lists(st.integers(0, 60), max_size=8),
)
def test_each_use_is_counted_once_however_passes_and_restarts_interleave(arrivals, cuts):
    pods = []
    for number, (hit, _) in enumerate(arrivals):
        at = T0 + seconds(number)
        pod = a_waiting_pod(number).claimed_by("chat", at).facts if hit else a_miss(f"chat-{number}", at)
        pods.append(pod)
    status, counted = WarmPoolStatus(), 0
    for end in [*sorted(cut for cut in cuts if cut < len(pods)), len(pods), len(pods)]:
        if end - counted > MOST_USES:
            continue  # more uses between two passes than are listed
        uses = count_uses(status, pods[:end])
        counted += len(uses.new)
        status = status.model_copy(update={"uses": uses.listed})
        assert counted == end
        assert len(uses.listed) <= MOST_USES


def test_percentiles_are_of_claims_that_became_ready():
    uses = [PoolUse(time=T0, service="s", pod=f"p{n}", hit=True, seconds=n) for n in range(1, 21)]
    cold = PoolUse(time=T0, service="s", pod="cold", hit=False, seconds=500)

    measured = claim_seconds([*uses, cold, PoolUse(time=T0, service="s", pod="late", hit=True)])

    assert measured is not None
    assert (measured.p50, measured.p95) == (10, 19)
    assert claim_seconds([cold]) is None


STATES = st.sampled_from(["starting", "booted", "failed", "crashing", "deleted", "claimed", "outdated", "unscheduled"])


def in_state(number: int, state: str) -> APoolPod:
    pod = a_waiting_pod(number)
    match state:
        case "booted":
            return pod.booted()
        case "failed":
            return pod.but(phase="Failed")
        case "crashing":
            return pod.but(restarts=5)
        case "deleted":
            return pod.but(deleted_at=T0)
        case "claimed":
            return pod.claimed_by("chat")
        case "outdated":
            return pod.booted().of_shape(image="old")
        case "unscheduled":
            return pod.but(node="", unschedulable="0/1 nodes")
    return pod


@pytest.mark.capability("AS-5")
@given(st.lists(STATES, max_size=8), st.integers(0, 5), st.integers(1, 4), st.integers(0, 2))
def test_for_any_pods_a_claimed_one_is_left_alone_the_size_is_kept_and_a_second_look_changes_nothing(
    states, size, concurrent, hungry_count
):
    pods = [in_state(number, state) for number, state in enumerate(states)]
    hungry = tuple(HungryReplica(name=f"h{n}", gpu_resource="nvidia.com/gpu") for n in range(hungry_count))
    pool = a_pool(size=size, refill={"maxConcurrent": concurrent, "delaySeconds": 0})
    observed = seen(pool, *pods, hungry=hungry)

    made = plan(observed, T0 + minutes(1))

    claimed = {pod.facts.name for pod in pods if pod.facts.replica.claimed_at}
    live = {pod.facts.name for pod in pods if pod.facts.replica.deleted_at is None} - claimed
    assert not claimed & set(deleted(made))
    assert len(deleted(made)) == len(set(deleted(made)))
    assert not set(created(made)) & {pod.facts.name for pod in pods}
    assert len(live) - len(deleted(made)) + len(created(made)) <= max(size, 0)
    starting = sum(not pod.facts.is_booted for pod in pods if pod.facts.name in live - set(deleted(made)))
    assert len(created(made)) <= max(0, concurrent - starting)
    assert {one.type for one in made.status.conditions} >= {"Ready"}
    documented = {(type.value, status.value, reason.value) for type, status, reason, _ in CONDITIONS}
    assert {(one.type, one.status.value, one.reason) for one in made.status.conditions} <= documented
    if made.actions:
        return  # the next pass waits until the caches show them
    again = plan(replace(observed, pool=pool.model_copy(update={"status": made.status})), T0 + minutes(1))
    assert again.status == made.status, "the same facts and the status of before give the same status"


REFUSALS = [
    ("Forbidden", "exceeded quota: gpus"),
    ("Forbidden", "admission webhook denied the request"),
    ("NameConflict", "there is a Pod pool-warm-0 of another owner"),
    ("Forbidden", 'violates PodSecurity "restricted:latest": hostPath volumes (volume "slipway-model-cache")'),
]


def refused_with(reason: str, message: str) -> tuple[Failure, ...]:
    return (Failure(action="CreatePod pool-warm-0", reason=reason, message=message, at=T0),)


@pytest.mark.capability("OP-6")
def test_every_condition_and_event_of_a_pool_that_is_documented_is_said():
    booted, ended = a_waiting_pod(0).booted(), a_waiting_pod(1).but(phase="Failed")
    claimed = a_waiting_pod(2).claimed_by("chat")
    stalled = WarmPoolStatus(failures=5)
    refused = (Failure(action="CreatePod pool-warm-0", reason="Invalid", message="no", at=T0),)
    hungry = (HungryReplica(name="chat-x-0-0", gpu_resource="nvidia.com/gpu"),)
    auto = {"autosize": {"min": 2, "max": 6}}
    edited = (EditedLabel(names.LABEL_STATE, names.STATE_WARM, None),)
    plans = [
        plan(seen(a_pool(size=1), booted, booted_before=frozenset()), T0),
        plan(seen(a_pool(size=2), booted, ended), T0),
        plan(seen(a_pool(size=1), a_waiting_pod(0)), T0),
        plan(seen(a_pool(size=1)), T0),
        plan(seen(a_pool(size=1, suspend=True)), T0),
        plan(seen(a_pool(size=1), claimed), T0),
        plan(seen(a_pool(size=1), fault="spec.size is not valid"), T0),
        plan(seen(a_pool(size=1), certificate_fault="a private key is not PEM"), T0),
        plan(seen(a_pool(size=1), failures=refused), T0),
        *(plan(seen(a_pool(size=1), failures=refused_with(*one)), T0) for one in REFUSALS),
        plan(seen(a_pool(size=1), a_waiting_pod(0).but(mount_failure='secret "keys" not found')), T0),
        plan(seen(a_pool(size=1), a_waiting_pod(0).but(waiting_reason="ImagePullBackOff")), T0),
        plan(seen(a_pool(size=1, status=stalled)), T0),
        plan(seen(a_pool(size=1), a_waiting_pod(0).but(node="", unschedulable="0/1 nodes")), T0),
        plan(seen(a_pool(size=1), booted, hungry=hungry), T0),
        plan(seen(a_pool(size=1), booted.of_shape(image="old")), T0),
        plan(seen(a_pool(status=WarmPoolStatus(size=1), **auto)), T0),
        plan(seen(a_pool(size=1), a_waiting_pod(0).returned().booted(), booted_before=frozenset()), T0),
        plan(seen(a_pool(size=1), booted.but(edited_labels=edited, is_routed=False)), T0),
    ]

    said = {(one.type, one.status.value, one.reason) for made in plans for one in made.status.conditions}
    assert said == {(type.value, status.value, reason.value) for type, status, reason, _ in CONDITIONS}
    assert {event.reason for made in plans for event in made.events} == set(EVENTS)


@pytest.mark.capability("AS-5")
@pytest.mark.parametrize(
    ("spec", "differing"),
    [
        ({"availability": {"priorityClassName": "high"}}, ("placement",)),
        ({}, ()),
        ({"runtime": {"maxModelLen": 99, "kvCache": {"bytes": "1Mi"}}, "drain": {"timeoutSeconds": 9}}, ()),
        ({"template": {"metadata": {"labels": {"team": "a"}}}}, ()),
        ({"runtime": {"image": "other"}}, ("image",)),
        ({"runtime": {"env": [{"name": "A", "value": "1"}]}}, ("environment",)),
        ({"runtime": {"args": ["--no-overlap"]}}, ("arguments",)),
        ({"resources": {"gpu": {"count": 1}, "limits": {"cpu": 2}}}, ("resources",)),
        ({"model": {"credentialsSecretRef": {"name": "hf"}}}, ("secrets",)),
        ({"uri": "pvc://models/llama"}, ("volumes",)),
        ({"template": {"spec": {"nodeSelector": {"zone": "a"}}}}, ("placement",)),
        ({"template": {"spec": {"securityContext": {"runAsUser": 7}}}}, ("security",)),
    ],
)
def test_a_service_and_a_pool_agree_only_where_the_pods_could_be_the_same(spec, differing):
    service = a_service(**spec)
    annotation = write_shape(shape_of_pool(a_pool(), IMAGE))

    assert differing_parts(annotation, shape_of_service(service, revision_of(service))) == differing
    assert differing_parts("", shape_of_pool(a_pool(), IMAGE)) == PARTS, "an unknown shape fits nothing"


@pytest.mark.capability("AS-5")
def test_the_pod_of_a_pool_is_that_of_a_service_but_for_what_a_claim_brings():
    pool = a_pool(template={"spec": {"tolerations": [{"key": "gpu", "operator": "Exists"}]}})
    service: InferenceService = a_service(template=pool.spec.template.to_json())
    warm = build_pool_pod(
        pool, 3, shape_of_pool(pool, IMAGE), image=IMAGE, access=ACCESS, user=NONROOT, placement=PlacementDefaults()
    )
    cold = build_pod(
        service,
        Revision("x" * 10, IMAGE),
        slot=0,
        attempt=0,
        access=ACCESS,
        user=NONROOT,
        placement=PlacementDefaults(),
    )

    (theirs,), (ours,) = cold["spec"].pop("containers"), warm["spec"].pop("containers")
    assert ours.pop("args") == ["serve", "--port", "8000", "--admin-port", "8001"]
    theirs.pop("args")
    assert ours.pop("startupProbe")["httpGet"] == theirs.pop("startupProbe")["httpGet"]
    assert ours == theirs
    for spec in (cold["spec"], warm["spec"]):
        spec.pop("terminationGracePeriodSeconds")
        spec["topologySpreadConstraints"][0].pop("labelSelector")
    assert warm["spec"] == cold["spec"]
    labels = warm["metadata"]["labels"]
    assert (labels[names.LABEL_STATE], labels[names.LABEL_POOL]) == (names.STATE_WARM, "pool")
    assert names.LABEL_SERVICE not in labels, "no Service, no disruption budget and no gateway finds it"
    assert warm["metadata"]["ownerReferences"][0]["uid"] == POOL_UID


@pytest.mark.capability("SE-10", "AS-5")
def test_a_certificate_that_cannot_be_kept_is_a_condition_while_pods_wait():
    fault = "Secret team/slipway-internal-tls: a private key is not PEM. Delete the Secret"
    for pods, ready in (((a_waiting_pod(0).booted(),), "True"), ((), "False")):
        made = plan(seen(a_pool(size=1), *pods, certificate_fault=fault), T0)
        conditions = {one.type: one for one in made.status.conditions}
        assert conditions["Stalled"].reason == "CertificateUnavailable"
        assert conditions["Stalled"].message == f"no TLS certificate can be kept: {fault}"
        assert conditions["Ready"].status == ready
        assert PoolEvent.CERTIFICATE_UNAVAILABLE in [event.reason for event in made.events]
        again = plan(seen(a_pool(size=1, status=made.status), *pods, certificate_fault=fault), T0)
        assert PoolEvent.CERTIFICATE_UNAVAILABLE not in [event.reason for event in again.events]
    well = plan(seen(a_pool(size=1, status=made.status), a_waiting_pod(0).booted()), T0)
    assert "Stalled" not in {one.type for one in well.status.conditions}
