"""Taints by which cloud providers and node scalers say that a node is going away; all that Slipway knows, in one table.

A taint is not a promise that something evicts the pods: a spot node is taken away whether or not they are gone. So a
node with such a taint is emptied like a cordoned one, and where the provider gives a notice, within that notice.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

SHUT_DOWN: Final = frozenset(
    {
        "node.kubernetes.io/out-of-service",  # set by a person: the machine is off, and stays off
        "node.cloudprovider.kubernetes.io/shutdown",  # set by the cloud controller: the instance does not run
    }
)


@dataclass(frozen=True, slots=True)
class Departure:
    """What a taint says about the end of its node."""

    notice: timedelta | None = None
    """The machine is taken away so long after the notice; None: its pods are evicted first, under their budgets."""


LEAVING: Final = {
    # cluster-autoscaler is about to delete the node. (DeletionCandidateOfClusterAutoscaler is only a candidate.)
    "ToBeDeletedByClusterAutoscaler": Departure(),
    # Karpenter: consolidation, drift, expiry, interruption; the second is the name before version 1.
    "karpenter.sh/disrupted": Departure(),
    "karpenter.sh/disruption": Departure(),
    # AWS node termination handler.
    "aws-node-termination-handler/spot-itn": Departure(timedelta(seconds=120)),
    "aws-node-termination-handler/rebalance-recommendation": Departure(),
    "aws-node-termination-handler/scheduled-maintenance": Departure(),
    "aws-node-termination-handler/asg-lifecycle-termination": Departure(timedelta(seconds=300)),
    # GKE: spot and preemptible VMs have 30 s, of which 15 s are the pods'; and host maintenance.
    "cloud.google.com/impending-node-termination": Departure(timedelta(seconds=30)),
    # AKS: auto-repair, and scheduled events of the VM. Which event it is the taint does not say.
    "remediator.kubernetes.azure.com/unschedulable": Departure(),
}


def find_departure(taints: Iterable[str]) -> tuple[str, Departure] | None:
    """The taint by which the node goes soonest, with what it says; None: it stays."""
    known = [(key, LEAVING[key]) for key in taints if key in LEAVING]
    return min(known, key=lambda one: (one[1].notice or timedelta.max, one[0]), default=None)


def is_shut_down(taints: Iterable[str]) -> bool:
    """Whether a taint says that nothing runs on the node any more."""
    return not SHUT_DOWN.isdisjoint(taints)
