"""What keeps a service from serving: one steady reason and sentence for one cause, with the thing to change."""

from dataclasses import replace

import pytest

from slipway_api.conditions import ConditionStatus, find_condition
from slipway_operator.core.health import Member, Stage
from slipway_operator.core.observed import Capacity, Node
from slipway_operator.core.service.plan import plan
from slipway_operator.core.service.status.problems import describe_stage
from tests.builders import T0, APod, a_pod, a_service, edited, minutes, promised, seen
from tests.operator.core.simulated_cluster import SimulatedCluster

GATED = {"credentialsSecretRef": {"name": "hf"}}
NO_SECRET = 'secret "hf" not found'
NO_KEY = "couldn't find key HF_TOKEN in Secret demo/hf"
OTHER = 'configmap "settings" not found'


def told(service, *pods: APod, now=T0):
    """(Stalled, Ready) of a service with these pods, the first time somebody looks."""
    status = plan(seen(promised(service, 1), *pods), now).status
    assert status is not None
    return find_condition(status.conditions, "Stalled"), find_condition(status.conditions, "Ready")


def lacking(service, message: str) -> APod:
    return a_pod(service=service).but(waiting_reason="CreateContainerConfigError", waiting_message=message)


def last_said(service, word: str) -> APod:
    return a_pod(service=service).crashing(restarts=1).but(termination_message=word)


@pytest.mark.capability("OP-6", "PL-7")
@pytest.mark.parametrize("message", [NO_SECRET, NO_KEY])
def test_credentials_that_are_not_there_name_the_secret_and_its_key(message):
    service = a_service(uri="hf://org/gated", model=GATED)

    stalled, ready = told(service, lacking(service, message))

    assert stalled.reason == "CredentialsInvalid"
    assert stalled.message == f"{message}: spec.model.credentialsSecretRef asks for a Secret hf with HF_TOKEN"
    assert (ready.status, ready.reason) == (ConditionStatus.FALSE, "CredentialsInvalid")


@pytest.mark.capability("OP-6")
def test_a_secret_that_appears_is_not_called_missing_while_the_model_loads():
    service = a_service(uri="hf://org/gated", model=GATED)
    broken = plan(seen(promised(service, 1), lacking(service, NO_SECRET)), T0).status

    status = plan(seen(service.model_copy(update={"status": broken}), a_pod(service=service).loading()), T0).status

    assert find_condition(status.conditions, "Stalled") is None


@pytest.mark.parametrize("model", [{}, GATED, {"credentialsSecretRef": {"name": "settings"}}])
def test_another_part_of_the_environment_is_the_specs_own(model):
    service = a_service(uri="hf://org/model", model=model)

    stalled, _ = told(service, lacking(service, OTHER))

    assert stalled.reason == "InvalidSpec"
    assert OTHER in stalled.message
    assert "spec.runtime" in stalled.message


@pytest.mark.capability("OP-6")
@pytest.mark.parametrize(
    ("word", "reason", "sentence"),
    [
        ("ModelNotFound: s3://b/x: no objects", "ModelNotFound", "s3://b/x: no objects; check spec.model.uri"),
        (
            "CredentialsInvalid: 403 of hf://o/m",
            "CredentialsInvalid",
            "403 of hf://o/m; check the Secret of spec.model",
        ),
        # review/shipping.md 9 and 11
        ("InvalidSpec: spec.model.chatTemplate: unexpected '}'", "InvalidSpec", "refuses the spec: spec.model.chat"),
        ("HubUnreachable: hf://o/m does not answer: h: DNS", "HubUnreachable", "check the network of the nodes"),
        ("DoesNotFit: weights 14 GiB exceed 8 GiB", "DoesNotFit", "does not fit: weights 14 GiB exceed 8 GiB"),
    ],
)
def test_the_word_that_a_runtime_leaves_is_the_reason(word, reason, sentence):
    service = a_service()

    stalled, ready = told(service, last_said(service, word))

    assert (stalled.reason, ready.reason) == (reason, reason)
    assert sentence in stalled.message


def test_what_a_runtime_said_holds_while_it_tries_again():
    """The kubelet starts it over at once, and a large model takes minutes to find out a second time."""
    service = a_service()

    stalled, ready = told(service, last_said(service, "DoesNotFit: too small").but(waiting_reason="", restarts=1))

    assert (stalled.reason, ready.reason) == ("DoesNotFit", "DoesNotFit")


@pytest.mark.capability("OP-5")
def test_a_spec_that_does_not_fit_is_told_with_the_arithmetic_while_the_old_one_serves():
    service = a_service()
    fits = promised(service, 1)
    too_long = edited(fits, runtime={"maxModelLen": 1_000_000})
    arithmetic = (
        "DoesNotFit: weights 14.00 GiB + reserve 1.00 GiB = 15.00 GiB leave 5.00 GiB of 20.00 GiB; one sequence of "
        "1000000 tokens at 131072 bytes needs 122.07 GiB of KV cache: lower maxModelLen to 40944"
    )
    old, new = a_pod(service=fits).ready(), last_said(too_long, arithmetic).slot(1)
    status = plan(seen(too_long, old, new), T0).status
    status = plan(seen(too_long.model_copy(update={"status": status}), old, new), T0).status

    stalled, ready = find_condition(status.conditions, "Stalled"), find_condition(status.conditions, "Ready")
    assert stalled.reason == "DoesNotFit"
    assert "1000000 tokens at 131072 bytes needs 122.07 GiB" in stalled.message
    assert "lower maxModelLen to 40944" in stalled.message
    assert ready.status is ConditionStatus.TRUE
    assert status.ready_replicas == 1


def test_a_claim_that_does_not_exist_is_a_model_that_does_not_exist():
    service = a_service(uri="pvc://models/llama")
    waiting = a_pod(service=service).unschedulable()

    scheduler = '0/2 nodes are available: persistentvolumeclaim "models" not found. preemption: 0/2 nodes are available'
    stalled, _ = told(service, waiting.but(unschedulable=scheduler))
    assert (stalled.reason, stalled.message) == (
        "ModelNotFound",
        'persistentvolumeclaim "models" not found; check spec.model.uri',
    )
    stalled, ready = told(service, waiting)
    assert stalled is None
    assert ready.reason == "WaitingForGPU"


@pytest.mark.parametrize(("starting", "reason"), [("Downloading", "DownloadingModel"), ("Loading", "Loading")])
def test_a_download_is_told_apart_from_a_load(starting, reason):
    service = a_service(uri="hf://org/model")
    pod = a_pod(service=service).loading().says()
    pod = pod.but(sample=replace(pod.replica.sample, starting=starting))

    stalled, ready = told(service, pod)

    assert stalled is None
    assert (ready.status, ready.reason) == (ConditionStatus.UNKNOWN, reason)
    assert ("is downloading the model" in ready.message) == (starting == "Downloading")


def told_over_time(service, *states: tuple[APod, ...]):
    """Statuses and warnings of a service whose pods go through these states, a minute each."""
    statuses, warnings = [], []
    service = promised(service, service.fixed_replicas)
    for minute, pods in enumerate(states):
        made = plan(seen(service, *pods), T0 + minutes(minute))
        warnings += [event for event in made.events if event.reason.type == "Warning"]
        statuses.append(made.status)
        service = service.model_copy(update={"status": made.status})
    return statuses, warnings


def texts(statuses):
    """What the conditions of each status say."""
    return [{(one.type, one.status, one.reason, one.message) for one in status.conditions} for status in statuses]


@pytest.mark.capability("OP-6")
def test_one_image_that_cannot_be_pulled_is_one_condition_and_one_warning_however_often_it_is_tried():
    """Finding 17: ErrImagePull was no image error, so ImagePullFailed and Loading alternated at each retry."""
    service = a_service(runtime={"image": "nowhere/runtime:1"})
    error = 'rpc error: code = NotFound desc = failed to pull and unpack image "nowhere/runtime:1": not found'
    failing = a_pod(service=service).but(waiting_reason="ErrImagePull", waiting_message=error)
    back_off = a_pod(service=service).but(
        waiting_reason="ImagePullBackOff",
        waiting_message=f'Back-off pulling image "nowhere/runtime:1": ErrImagePull: {error}',
    )

    statuses, warnings = told_over_time(service, *[(failing,), (back_off,)] * 3)

    assert find_condition(statuses[0].conditions, "Stalled").reason == "ImagePullFailed"
    assert error in find_condition(statuses[0].conditions, "Ready").message
    assert all(told == texts(statuses)[0] for told in texts(statuses))
    assert len(warnings) == 1


@pytest.mark.capability("OP-6")
def test_a_replica_that_crashes_again_and_again_is_one_condition_and_one_warning():
    """Finding 17: CrashLooping and Loading alternated with each run of the container."""
    service = a_service()
    pod = a_pod(service=service)
    waits, runs = (
        pod.crashing(restarts=3).but(last_exit="Error (exit code 1): out of memory"),
        pod.loading().but(restarts=4, last_exit="Error (exit code 1): out of memory"),
    )

    statuses, warnings = told_over_time(service, (waits,), (runs,))

    assert find_condition(statuses[0].conditions, "Stalled").reason == "CrashLooping"
    assert texts(statuses)[0] == texts(statuses)[1]
    assert [event.reason for event in warnings] == ["CrashLooping"]
    assert "ended 4 times" in warnings[0].message
    assert "out of memory" in warnings[0].message


@pytest.mark.capability("OP-6")
def test_crash_looping_holds_for_the_next_attempt_and_ends_when_a_replica_is_ready():
    """Finding 17: a replica that was replaced after five crashes began as Loading again."""
    service = a_service()
    crashed = a_pod(service=service).crashing(restarts=4)
    successor = a_pod(service=service).slot(0, attempt=1).loading()

    statuses, warnings = told_over_time(
        service, (crashed,), (crashed.but(restarts=5),), (), (successor,), (successor.ready(),)
    )

    reasons = [find_condition(status.conditions, "Ready").reason for status in statuses]
    assert reasons == ["CrashLooping"] * 4 + ["Available"]
    assert len(warnings) == 2, "one that it crashes, one that it is replaced"
    assert find_condition(statuses[-1].conditions, "Stalled") is None


@pytest.mark.capability("OP-6")
def test_a_download_that_fails_says_how_the_earlier_runs_ended_while_it_is_tried_again():
    """Finding 22: DownloadingModel for minutes, without a word about why the earlier attempts ended."""
    service = a_service(uri="hf://nobody/nothing")
    ended = "Error (exit code 1): cannot serve hf://nobody/nothing: huggingface.co does not answer"
    pod = a_pod(service=service).loading().says()
    pod = pod.but(sample=replace(pod.replica.sample, starting="Downloading"))
    again = pod.but(restarts=2, last_exit=ended)
    waits = pod.crashing(restarts=1).but(last_exit=ended)

    statuses, _ = told_over_time(service, (pod,), (waits,), (again,))

    said = [find_condition(status.conditions, "Ready") for status in statuses]
    assert [one.reason for one in said] == ["DownloadingModel"] * 3
    assert "is downloading the model" in said[0].message
    assert said[1].message == said[2].message
    assert "ended 2 times and is started again" in said[1].message
    assert "huggingface.co does not answer" in said[1].message


@pytest.mark.capability("OP-6")
def test_the_next_attempt_of_a_slot_says_how_the_attempt_before_it_ended():
    """Finding 22: the next pod has no memory of its own, so status keeps the end of the one before."""
    service = a_service(uri="hf://nobody/nothing")
    ended = "Error (exit code 1): cannot serve hf://nobody/nothing: huggingface.co does not answer"
    failed = a_pod(service=service).failed().but(last_exit=ended, phase_reason="")
    successor = a_pod(service=service).slot(0, attempt=1).loading().says()
    successor = successor.but(sample=replace(successor.replica.sample, starting="Downloading"))

    statuses, _ = told_over_time(service, (failed,), (), (successor,))

    assert ended in statuses[0].attempts[0].last_end
    assert ended in find_condition(statuses[0].conditions, "Ready").message, "while the slot pauses"
    said = find_condition(statuses[2].conditions, "Ready")
    assert said.reason == "DownloadingModel"
    assert "is downloading the model (attempt 2); the attempt before it: chat-" in said.message
    assert ended in said.message


def test_a_replica_that_started_and_fails_its_probe_is_not_called_loading():
    """C4: a hung replica "is loading" was what the condition said."""
    service = a_service(replicas=2)
    hung = a_pod(service=service).loading().but(started=True)

    statuses, _ = told_over_time(service, (hung, a_pod(service=service).slot(1).ready()))

    said = find_condition(statuses[0].conditions, "Ready").message
    assert said == f"1 of 2 replicas are ready; {hung.replica.name} is not ready any more: its readiness probe fails"


def test_the_worst_problem_is_told_first():
    """Severity has one order: the replica that is named first is also the one that a scale-down takes first."""
    service = a_service(replicas=2)
    stuck = a_pod(service=service).unschedulable()
    lost = a_pod(service=service).slot(1).loading().on("node-2")
    node = Node(name="node-2", ready=False, not_ready_since=T0 - minutes(1))
    made = plan(seen(promised(service, 2), lost, stuck, nodes=(node,)), T0)

    said = find_condition(made.status.conditions, "WorkloadAvailable").message
    assert said.index("node node-2") < said.index("waits for a node")


def holding(pod: APod, sequences: int, *, running: int = 0) -> APod:
    pod = pod.ready().streams(running)
    capacity = Capacity(max_sequences=sequences, kv_blocks=sequences * 100, bytes_per_token=4096)
    return pod.but(sample=replace(pod.replica.sample, capacity=capacity))


@pytest.mark.capability("OP-5")
def test_status_tells_what_the_smallest_replica_holds_and_stays_still():
    service = promised(a_service(replicas=2), 2)
    pods = [holding(a_pod(service=service), 9), holding(a_pod(service=service).slot(1), 7)]
    status = plan(seen(service, *pods), T0).status

    assert status.capacity.to_json() == {"maxSequences": 7, "kvBlocks": 700, "bytesPerToken": 4096}
    later = service.model_copy(update={"status": status})
    assert plan(seen(later, *pods), T0 + minutes(1)).status.capacity == status.capacity
    silent = [pod.silent() for pod in pods]
    assert plan(seen(later, *silent), T0 + minutes(1)).status.capacity == status.capacity


@pytest.mark.capability("OP-5")
def test_during_a_rollout_the_new_revision_speaks_for_the_service():
    service = promised(a_service(), 1)
    newer = edited(service, runtime={"kvCache": {"dtype": "int8"}})
    old, new = holding(a_pod(service=service), 5), holding(a_pod(service=newer), 10)

    assert plan(seen(newer, old, new), T0).status.capacity.max_sequences == 10
    assert plan(seen(newer, old), T0).status.capacity.max_sequences == 5


@pytest.mark.parametrize("stage", Stage)
def test_every_stage_has_a_sentence_that_names_the_replica_and_not_the_identifier(stage):
    replica = a_pod().replica
    sentence = describe_stage(Member(replica, stage))
    assert sentence.startswith(f"{replica.name} ")
    assert stage.value.isidentifier()
    assert stage.value not in sentence


@pytest.mark.capability("OP-6")
def test_while_the_third_attempt_loads_status_names_what_ended_the_second():
    world = SimulatedCluster(a_service(replicas=1), load_seconds=60)
    world.reconcile()
    world.run(5)
    for failure in ("the hub did not answer: timeout after 60 s", "the hub did not answer: 503"):
        (name,) = [pod.replica.name for pod in world.live]
        pod = world.pods[name]
        pod.replica = replace(pod.replica, last_exit=f"Error (exit code 1): {failure}", termination_message=failure)
        world.fail(name, reason="")
        world.run(35)

    message = world.condition("Ready").message
    assert "is loading (attempt 3); the attempt before it: chat-" in message
    assert message.endswith("has ended (Error (exit code 1): the hub did not answer: 503)")
    before = world.writes
    world.run(5)
    assert world.writes == before, "the sentence does not change by itself"
