"""The Engines of the cluster: what services name in spec.runtime.engine."""

import time
from collections.abc import Callable

import msgspec

from slipway_kube.client import Client
from slipway_kube.resources import ENGINES
from slipway_operator.core.engines import EngineSeen, see_engine
from slipway_operator.inputs.cluster_objects import ClusterObjects


class Engines(ClusterObjects):
    """The Engines by name. If the kind is not installed, or may not be read, services that name one are told so."""

    def __init__(self, client: Client, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        super().__init__(client, ENGINES, monotonic=monotonic)
        self._seen: dict[str, EngineSeen | None] = {}
        self.on_change(lambda _name: self._seen.clear())

    def seen(self, name: str) -> EngineSeen | None:
        """The Engine of that name as it is now; None for our own runtime."""
        if name not in self._seen:
            self._seen[name] = self._look(name)
        return self._seen[name]

    def _look(self, name: str) -> EngineSeen | None:
        specs = {one.name: one.spec for one in self.objects()}
        if name not in specs and self.refused:
            return EngineSeen(
                fault=f"the API server does not list Engines ({self.refused}); install the CRD and the RBAC"
            )
        decoded = {one: msgspec.json.decode(raw) if one == name else {} for one, raw in specs.items()}
        return see_engine(name, decoded)
