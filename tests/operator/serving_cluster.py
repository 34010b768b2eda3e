"""A simulated cluster in which the service `chat` serves already: how most stories of a whole operator begin."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.operator.simulated_cluster import SimulatedCluster, simulated_cluster


@asynccontextmanager
async def serving_cluster(path: Path, *, replicas: int, quiet: float = 0) -> AsyncIterator[SimulatedCluster]:
    """A cluster with an operator, `replicas` ready replicas of `chat`, and `quiet` seconds after that."""
    async with simulated_cluster(path) as cluster:
        cluster.apply("chat", replicas=replicas)
        cluster.start_operator()
        await ready(cluster, replicas=replicas)
        if quiet:
            await cluster.quiet(quiet)
        yield cluster


async def ready(cluster: SimulatedCluster, name: str = "chat", *, replicas: int) -> None:
    """Wait until so many replicas serve, and nothing is under way."""
    await cluster.until(
        lambda: (
            len(cluster.serving(name)) == replicas == len(cluster.pods(name))
            and cluster.status(name).get("readyReplicas") == replicas
            and cluster.status(name).get("observedGeneration") == cluster.service(name)["metadata"]["generation"]
            and cluster.condition(name, "Reconciling").get("status") != "True"
        ),
        f"{replicas} ready replicas of {name}",
    )
