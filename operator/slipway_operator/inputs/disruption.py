"""Counts the nodes of the cluster that are not ready, so that a decision can tell lost nodes from a lost network."""

from slipway_kube.objects import Node
from slipway_operator.core.observed import is_disruption


class NodeCounts:
    """How many nodes there are and which are not ready; updated by informer changes, so no pass iterates over all."""

    def __init__(self) -> None:
        self._nodes: set[str] = set()
        self._not_ready: set[str] = set()

    @property
    def disrupted(self) -> bool:
        """Whether most nodes look lost at once."""
        return is_disruption(len(self._not_ready), len(self._nodes))

    def saw(self, old: Node | None, new: Node | None) -> None:
        """Apply one change of the informer; a deleted node has no `new`."""
        if old is not None:
            self._nodes.discard(old.name)
            self._not_ready.discard(old.name)
        if new is not None:
            self._nodes.add(new.name)
            if not new.is_ready:
                self._not_ready.add(new.name)
