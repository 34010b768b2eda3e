"""From what the kubelet and the scheduler write into a pod to the facts that decisions use."""

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from slipway_api import names
from slipway_api.model_names import NameConflict
from slipway_api.types import ServiceKey
from slipway_kube.informer import Change
from slipway_kube.objects import Node, Pod
from slipway_kube.resources import INFERENCE_SERVICES, WARM_POOLS
from slipway_operator.controller.kinds import Key, Memory
from slipway_operator.core.installation import Defaults
from slipway_operator.core.observed import Sample
from slipway_operator.inputs.caches import Caches, Inputs
from slipway_operator.inputs.inference_services import Carried, InferenceServices
from slipway_operator.inputs.observer import PodIndex, node_facts, replica
from slipway_operator.metrics import OperatorMetrics
from tests.fakes import FakeApiServer

CHAT, CODE = ServiceKey("team", "chat"), ServiceKey("team", "code")


def a_pod(name: str = "chat-abcde-3-1", service: str = "chat", **parts: Any) -> Pod:
    labels = {
        names.LABEL_SERVICE: service,
        names.LABEL_REVISION: "abcdefghij",
        names.LABEL_SLOT: "3",
        names.LABEL_ATTEMPT: "1",
        names.LABEL_STATE: "serving",
    }
    body = {
        "metadata": {
            "name": name,
            "namespace": "team",
            "uid": f"uid-of-{name}",
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "labels": labels | parts.get("labels", {}),
            "annotations": parts.get("annotations", {}),
            "ownerReferences": [
                {"kind": "Something", "name": "x", "uid": "uid-x"},
                {
                    "apiVersion": names.API_VERSION,
                    "kind": "InferenceService",
                    "name": service,
                    "uid": "uid-s",
                    "controller": True,
                },
            ],
        },
        "spec": parts.get("spec", {}),
        "status": parts.get("status", {}),
    }
    return msgspec.json.decode(msgspec.json.encode(body), type=Pod)


def a_node(**parts: Any) -> Node:
    return msgspec.json.decode(msgspec.json.encode({"metadata": {"name": "node-a"}} | parts), type=Node)


def at(text: str) -> datetime:
    return datetime.fromisoformat(text)


def test_labels_say_which_slot_a_replica_fills_and_the_controller_says_whose_it_is():
    facts = replica(a_pod(), None)

    assert (facts.revision, facts.slot, facts.attempt, facts.state) == ("abcdefghij", 3, 1, "serving")
    assert facts.owner_uid == "uid-s"
    assert facts.created_at == at("2026-01-01T00:00:00+00:00")


def test_a_pod_without_a_gpu_to_run_on_is_unschedulable_with_the_scheduler_s_words():
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2 nodes: no GPU"}

    facts = replica(a_pod(status={"phase": "Pending", "conditions": [condition]}), None)

    assert facts.unschedulable == "0/2 nodes: no GPU"
    assert not facts.ready


def test_a_gated_pod_is_not_unschedulable():
    condition = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "message": "gated"}

    assert replica(a_pod(status={"phase": "Pending", "conditions": [condition]}), None).unschedulable == ""


def test_readiness_comes_with_the_moment_it_began():
    condition = {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:01:00Z"}

    facts = replica(a_pod(status={"phase": "Running", "podIP": "10.0.0.7", "conditions": [condition]}), None)

    assert facts.ready
    assert facts.ready_since == at("2026-01-01T00:01:00+00:00")
    assert facts.pod_ip == "10.0.0.7"


def test_a_crash_loop_shows_its_reason_its_count_and_how_the_last_run_ended():
    server = {
        "name": "server",
        "restartCount": 4,
        "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s"}},
        "lastState": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}},
    }

    facts = replica(a_pod(status={"phase": "Running", "containerStatuses": [server]}), None)

    assert (facts.waiting_reason, facts.waiting_message, facts.restarts) == ("CrashLoopBackOff", "back-off 40s", 4)
    assert facts.last_exit == "OOMKilled (exit code 137)"
    assert not facts.started
    assert not facts.is_terminated


def test_the_kubelet_tells_whether_the_present_run_started_and_whether_it_has_ended():
    hung = {"name": "server", "started": True, "ready": False, "state": {"running": {}}}
    ended = {"name": "server", "started": False, "state": {"terminated": {"exitCode": 137, "reason": "Error"}}}

    assert replica(a_pod(status={"containerStatuses": [hung]}), None).started
    facts = replica(a_pod(status={"containerStatuses": [ended]}), None)
    assert (facts.started, facts.is_terminated, facts.last_exit) == (False, True, "Error (exit code 137)")


def test_the_word_that_the_runtime_left_goes_into_one_line():
    terminated = {"exitCode": 1, "reason": "Error", "message": "ModelNotFound: file:///x:\nthere is no directory\n"}
    server = {"name": "server", "restartCount": 1, "lastState": {"terminated": terminated}}

    facts = replica(a_pod(status={"phase": "Running", "containerStatuses": [server]}), None)

    assert facts.termination_message == "ModelNotFound: file:///x: there is no directory"
    assert facts.last_exit == f"Error (exit code 1): {facts.termination_message}"


def test_the_drain_clock_is_read_from_the_pod_so_that_it_survives_the_operator():
    annotations = {
        names.ANNOTATION_DRAIN_STARTED: "2026-01-01T00:02:00Z",
        names.ANNOTATION_DRAIN_REASON: "scale down 3 → 2",
    }

    facts = replica(a_pod(annotations=annotations, labels={names.LABEL_STATE: "draining"}), None)

    assert facts.state == "draining"
    assert facts.drain_started == at("2026-01-01T00:02:00+00:00")
    assert facts.drain_reason == "scale down 3 → 2"


def test_nonsense_in_labels_and_annotations_harms_nobody():
    pod = a_pod("chat", labels={names.LABEL_SLOT: "first"}, annotations={names.ANNOTATION_DRAIN_STARTED: "yesterday"})

    facts = replica(pod, None)

    assert facts.slot == 0
    assert facts.drain_started is None


def test_a_node_that_went_silent_tells_since_when():
    silent = a_node(
        status={"conditions": [{"type": "Ready", "status": "Unknown", "lastTransitionTime": "2026-01-01T00:03:00Z"}]}
    )
    healthy = a_node(
        spec={"unschedulable": True},
        status={"conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}]},
    )

    assert not node_facts(silent).ready
    assert node_facts(silent).not_ready_since == at("2026-01-01T00:03:00+00:00")
    assert node_facts(healthy).ready
    assert node_facts(healthy).not_ready_since is None
    assert node_facts(healthy).cordoned


@pytest.mark.capability("AS-12")
def test_taints_of_providers_and_node_scalers_say_that_a_node_is_to_be_emptied():
    def tainted(*keys):
        return node_facts(a_node(spec={"taints": [{"key": key, "effect": "NoSchedule"} for key in keys]}))

    spot = tainted("nvidia.com/gpu", "ToBeDeletedByClusterAutoscaler", "aws-node-termination-handler/spot-itn")
    assert (spot.cordoned, spot.leaving) == (True, "aws-node-termination-handler/spot-itn")
    assert spot.notice == timedelta(seconds=120), "of two taints the one that ends the node sooner counts"
    assert tainted("karpenter.sh/disrupted").cordoned
    assert tainted("karpenter.sh/disrupted").notice is None
    assert tainted("node.kubernetes.io/out-of-service").is_shut_down
    ordinary = tainted("nvidia.com/gpu", "DeletionCandidateOfClusterAutoscaler", "node.kubernetes.io/not-ready")
    assert (ordinary.cordoned, ordinary.is_shut_down) == (False, False)


@pytest.mark.capability("PL-1", "PL-2")
def test_what_the_operator_wrote_about_the_end_of_a_node_is_read_from_the_pod():
    pod = a_pod(
        annotations={
            names.ANNOTATION_NODE_LEAVING_SINCE: "2026-01-01T00:03:00Z",
            names.ANNOTATION_NODE_DRAIN_FORCED: "2026-01-01T00:33:00Z",
            names.ANNOTATION_SAFE_TO_EVICT: "false",
            names.ANNOTATION_DO_NOT_DISRUPT: "true",
        }
    )
    facts = replica(pod, None)

    assert facts.leaving_since == at("2026-01-01T00:03:00+00:00")
    assert facts.drain_forced == at("2026-01-01T00:33:00+00:00")
    assert (facts.safe_to_evict, facts.do_not_disrupt) == ("false", "true")


def test_the_index_knows_the_pods_of_a_service_through_every_change():
    index = PodIndex()
    first, second = a_pod("chat-abcde-0-0"), a_pod("chat-abcde-1-0")

    assert index.saw(Change.ADDED, None, second) == {CHAT}
    assert index.saw(Change.ADDED, None, first) == {CHAT}
    assert [pod.name for pod in index.of(CHAT)] == ["chat-abcde-0-0", "chat-abcde-1-0"]

    moved = a_pod("chat-abcde-1-0", service="code")
    assert index.saw(Change.MODIFIED, second, moved) == {CHAT, CODE}
    assert [pod.name for pod in index.of(CODE)] == ["chat-abcde-1-0"]

    assert index.saw(Change.DELETED, first, None) == {CHAT}
    assert index.of(CHAT) == []
    assert index.services() == [CODE]


def test_a_node_finds_its_services_without_a_look_at_other_pods():
    index = PodIndex()
    on_a, on_b = a_pod("chat-0", spec={"nodeName": "node-a"}), a_pod("code-0", "code", spec={"nodeName": "node-b"})
    unscheduled = a_pod("chat-1")
    for pod in (on_a, on_b, unscheduled):
        index.saw(Change.ADDED, None, pod)

    assert index.on_node("node-a") == {CHAT}

    scheduled = a_pod("chat-1", spec={"nodeName": "node-b"})
    index.saw(Change.MODIFIED, unscheduled, scheduled)
    assert index.on_node("node-b") == {CHAT, CODE}

    index.saw(Change.DELETED, on_a, None)
    index.saw(Change.DELETED, scheduled, None)
    assert index.on_node("node-a") == set()
    assert index.on_node("node-b") == {CODE}


def test_a_snapshot_holds_the_service_its_replicas_their_nodes_and_samples():
    pod = a_pod(spec={"nodeName": "node-a"})
    sample = Sample(at=datetime(2026, 1, 1, tzinfo=UTC), kv_usage=0.5, running=1, waiting=0)
    server = FakeApiServer()
    kinds = [INFERENCE_SERVICES, WARM_POOLS]
    caches = Caches(server.client(), kinds, namespaces=(), wake=lambda *_: None, on_drift=lambda _: None)
    kind = InferenceServices(
        Inputs(
            caches=caches,
            wake=lambda *_: None,
            sample_of={pod.uid: sample}.get,
            defaults=Defaults(runtime_image="runtime:1", gateway_url="http://gateway"),
            token_digests=lambda namespace, name, nonce: (f"{namespace}/{name}/{nonce}",),
            serving_digests=lambda namespace, service: (f"{namespace}/{service}",),
            kernels_key=lambda namespace, service: f"{namespace}/{service}",
            random_bytes=bytes,
            asking_since=lambda: at("2026-01-01T00:00:00+00:00"),
            metrics=OperatorMetrics(),
            now=lambda: datetime(2026, 1, 1, tzinfo=UTC),
        )
    )
    for name in ("chat", "talk"):
        body = {"metadata": {"name": name, "namespace": "team", "uid": f"uid-of-{name}", "resourceVersion": "5"}}
        caches.heard("InferenceService", "ADDED", body | {"spec": {"model": {"uri": "file:///x", "servedName": "c"}}})
    caches.pods.saw(Change.ADDED, None, pod)
    for node in ("node-a", "node-b"):
        cached = a_node(metadata={"name": node}, spec={"unschedulable": True})
        caches.node_informer._cache.put(cached)
    key = Key("InferenceService", "team", "chat")

    observed = kind.observe(
        key,
        caches.stores[key.kind].get(key),
        Memory(taken_names=frozenset({"chat-abcde-9-0"}), carried=Carried(ready=frozenset({"x"}))),
    )

    assert [one.sample for one in observed.replicas] == [sample]
    assert list(observed.nodes) == ["node-a"]
    assert observed.nodes["node-a"].cordoned
    assert observed.name_conflict is None, "of two of one moment, the first by name has it"
    other = kind.observe(talk := Key("InferenceService", "team", "talk"), caches.stores[key.kind].get(talk), Memory())
    assert other.name_conflict == NameConflict("c", key="team/chat")
    assert observed.taken_names == {"chat-abcde-9-0"}
    assert observed.token_digests("team", "chat-abcde-0-0", "n") == ("team/chat-abcde-0-0/n",)
    assert observed.ready_before == {"x"}
    assert observed.asking_since == at("2026-01-01T00:00:00+00:00")
