"""Prometheus metric of objects whose newest generation no pass has recorded in `status.observedGeneration`.

It is read from the caches at each scrape, so it also grows when no pass runs or no status can be written.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

Bodies = Callable[[], Mapping[str, Iterable[Mapping[str, Any]]]]


class GenerationMetrics(Collector):
    """One series for each object that is behind; none while all generations are observed."""

    def __init__(self, bodies: Bodies) -> None:
        """`bodies` returns the known objects by kind."""
        self._bodies = bodies

    def collect(self) -> Iterator[Metric]:
        """The objects that are behind, each with the number of its unobserved generations."""
        family = GaugeMetricFamily(
            "slipway_operator_unobserved_generations",
            "Generations of an object that no pass has recorded in its status; absent while there are none.",
            labels=["kind", "namespace", "name"],
        )
        for kind, bodies in self._bodies().items():
            for body in bodies:
                if behind := unobserved_generations(body):
                    family.add_metric([kind, body["metadata"].get("namespace", ""), body["metadata"]["name"]], behind)
        yield family


def unobserved_generations(body: Mapping[str, Any]) -> int:
    """How many generations the status is behind. A deletion raises the generation too, and is not counted."""
    metadata = body["metadata"]
    if metadata.get("deletionTimestamp"):
        return 0
    observed = (body.get("status") or {}).get("observedGeneration") or 0
    return max(0, int(metadata.get("generation", 0)) - int(observed))
