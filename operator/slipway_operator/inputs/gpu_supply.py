"""Reads from the nodes which GPUs the cluster has in all, to tell a full cluster from a request nobody can meet."""

from collections.abc import Iterable
from typing import Final

from slipway_api import names
from slipway_api.inference_service import GPU
from slipway_kube.objects import Node
from slipway_operator.core.observed import GPUSupply

# Labels of nodes that a managed node group or Karpenter made: such a cluster may get nodes that it does not have yet.
AUTOSCALED: Final = (
    *("karpenter.sh/", "cloud.google.com/gke-nodepool", "eks.amazonaws.com/nodegroup"),
    *("kubernetes.azure.com/agentpool", "alpha.eksctl.io/nodegroup-name", "cluster.x-k8s.io/"),
)


def read_supply(gpu: GPU, nodes: Iterable[Node]) -> GPUSupply | None:
    """The GPUs of all nodes; None if no node can be read."""
    nodes = list(nodes)
    if not nodes:
        return None
    counts = [(_count(node, gpu.resource_name), node.labels.get(names.GPU_PRODUCT_LABEL, "")) for node in nodes]
    having = [(count, product) for count, product in counts if count]
    return GPUSupply(
        nodes=len(having),
        largest=max((count for count, _ in having), default=0),
        largest_of_product=max((count for count, one in having if not gpu.product or one == gpu.product), default=0),
        products=tuple(sorted({product for _, product in having if product})),
        may_grow=any(label.startswith(AUTOSCALED) for node in nodes for label in node.labels),
    )


def _count(node: Node, resource: str) -> int:
    text = node.status.allocatable.get(resource, "0")
    return int(text) if text.isdecimal() else 0
