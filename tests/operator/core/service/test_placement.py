"""Why no node takes a replica; review/operator-users.md 10-12, review/shipping.md 10."""

from dataclasses import replace

import msgspec
import pytest

from slipway_api.conditions import find_condition
from slipway_api.inference_service import GPU
from slipway_kube.objects import Node
from slipway_operator.core.observed import Failure, GPUSupply
from slipway_operator.core.service.plan import plan
from slipway_operator.inputs.gpu_supply import read_supply
from tests.builders import T0, a_pod, a_service, edited, minutes, promised, seen

FULL = "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."
EIGHT = GPUSupply(nodes=2, largest=8, largest_of_product=8, products=("NVIDIA-H100",))


def told(gpu, unschedulable, supply, **spec):
    service = promised(a_service(resources={"gpu": gpu}, **spec), 1)
    pod = a_pod(service=service).unschedulable().but(unschedulable=unschedulable)
    made = plan(replace(seen(service, pod), gpu_supply=supply), T0)
    ready, stalled = (find_condition(made.status.conditions, type) for type in ("Ready", "Stalled"))
    return ready, stalled, {event.reason.value for event in made.events if event.reason.type == "Warning"}


@pytest.mark.capability("OP-18")
@pytest.mark.parametrize(
    ("gpu", "supply", "sentence"),
    [
        ({"count": 16}, EIGHT, "no node has 16 nvidia.com/gpu; the largest has 8"),
        (
            {"count": 1, "product": "NVIDIA-B200"},
            replace(EIGHT, largest_of_product=0),
            "no node has the label nvidia.com/gpu.product=NVIDIA-B200; nodes have NVIDIA-H100",
        ),
        ({"count": 1}, GPUSupply(nodes=0, largest=0, largest_of_product=0), "no node has the resource nvidia.com/gpu"),
    ],
)
def test_gpus_that_no_node_has_are_stalled_with_the_diagnosis_unless_nodes_may_be_added(gpu, supply, sentence):
    ready, stalled, warnings = told(gpu, FULL, supply)

    assert (stalled.reason, ready.reason, warnings) == ("NoSuitableNode", "NoSuitableNode", {"NoSuitableNode"})
    assert sentence in stalled.message

    ready, stalled, warnings = told(gpu, FULL, replace(supply, may_grow=True))

    assert (stalled, ready.reason, warnings) == (None, "WaitingForGPU", {"WaitingForGPU"})
    assert sentence in ready.message


@pytest.mark.capability("OP-18")
@pytest.mark.parametrize(
    "scheduler",
    [
        "0/2 nodes are available: 2 node(s) had untolerated taint {nvidia.com/gpu: present}.",
        "0/2 nodes are available: 2 node(s) didn't match Pod's node affinity/selector.",
        "0/2 nodes are available: 2 Insufficient memory.",
    ],
)
def test_only_a_lack_of_gpus_is_told_as_one(scheduler):
    ready, stalled, warnings = told({"count": 1}, scheduler, EIGHT)

    assert (ready.reason, stalled, warnings) == ("Unschedulable", None, {"Unschedulable"})
    assert scheduler in ready.message
    assert told({"count": 1}, FULL, EIGHT)[0].reason == "WaitingForGPU"


@pytest.mark.capability("OP-18")
def test_a_claim_of_the_template_that_does_not_exist_is_for_its_author():
    _, stalled, warnings = told({"count": 1}, 'persistentvolumeclaim "data" not found.', EIGHT)

    assert (stalled.reason, warnings) == ("InvalidSpec", {"InvalidSpec"})
    assert "create the PersistentVolumeClaim data, or change the volumes of spec.template" in stalled.message


@pytest.mark.capability("OP-18")
def test_a_rollout_without_a_spare_gpu_names_the_remedy_in_reconciling_and_in_one_event():
    """review/operator-users.md 12: silent until progressDeadlineSeconds."""
    before = promised(a_service(), 1)
    service = edited(before, runtime={"maxModelLen": 99})
    old, new = a_pod(service=before).ready(), a_pod(service=service).slot(1).unschedulable()
    events = []
    for minute in range(3):
        made = plan(seen(service, old, new), T0 + minutes(minute))
        service = service.model_copy(update={"status": made.status})
        events += [event for event in made.events if event.reason == "WaitingForGPU"]

    said = find_condition(made.status.conditions, "Reconciling").message
    assert "maxSurge 0 and maxUnavailable 1" in said
    assert "Insufficient nvidia.com/gpu" in said
    assert len(events) == 1


def a_node(name: str, gpus: str, **labels: str) -> Node:
    body = {"metadata": {"name": name, "labels": labels}, "status": {"allocatable": {"nvidia.com/gpu": gpus}}}
    return msgspec.json.decode(msgspec.json.encode(body), type=Node)


def test_the_nodes_say_what_the_cluster_has_and_whether_it_may_get_more():
    h100 = {"nvidia.com/gpu.product": "NVIDIA-H100"}
    nodes = [a_node("a", "8", **h100), a_node("b", "4", **{"nvidia.com/gpu.product": "NVIDIA-L4"}), a_node("c", "0")]

    assert read_supply(GPU(count=1, product="NVIDIA-L4"), nodes) == GPUSupply(
        nodes=2, largest=8, largest_of_product=4, products=("NVIDIA-H100", "NVIDIA-L4")
    )
    assert read_supply(GPU(count=1), [*nodes, a_node("d", "0", **{"karpenter.sh/nodepool": "x"})]).may_grow
    assert read_supply(GPU(count=1), []) is None


@pytest.mark.capability("OP-18")
def test_an_address_in_status_belongs_to_a_service_of_ours_with_the_domain_of_the_cluster():
    """review/operator-users.md 10: clients sent prompts to a stranger."""
    service = promised(a_service(), 1)
    observed = seen(service, a_pod(service=service).ready())
    observed = replace(observed, defaults=replace(observed.defaults, cluster_domain="corp.example"))
    foreign = Failure(action="ApplyChild Service/chat", reason="NameConflict", message="there is a Service chat", at=T0)

    ours = plan(observed, T0)
    taken = plan(replace(observed, failures=(foreign,)), T0)

    assert ours.status.addresses[1].url == "http://chat.demo.svc.corp.example/v1"
    assert [one.name for one in taken.status.addresses] == ["gateway"]
    assert [event.reason.value for event in taken.events if event.reason.type == "Warning"] == ["NameConflict"]
