"""The pure parts of the benchmarks of reactions: figures with aims, changes with times, counts of writes."""

import asyncio

import pytest

from bench.changes import Changes, service_of
from bench.control_plane import writes_in
from bench.figures import Figure, share_of
from slipway_api import names
from slipway_kube.resources import PODS
from slipway_operator.metrics import OperatorMetrics
from tests.fakes import FakeApiServer


@pytest.mark.parametrize(
    ("figure", "verdict"),
    [
        (Figure("a", 1.5, "s", at_most=2.0), "aim ≤ 2"),
        (Figure("a", 2.4, "s", at_most=2.0), "aim ≤ 2: gap 0.40"),
        (Figure("a", 12.0, "×", at_least=10.0), "aim ≥ 10"),
        (Figure("a", 4.5, "×", at_least=10.0), "aim ≥ 10: gap 5.50"),
        (Figure("a", 1.0, "s"), ""),
    ],
)
def test_a_figure_says_by_how_much_it_misses_its_aim(figure, verdict):
    assert figure.verdict == verdict


def test_shares_of_values():
    assert share_of([3.0, 1.0, 2.0], 0.5) == 2.0
    assert share_of([3.0, 1.0, 2.0], 1.0) == 3.0
    assert share_of([7.0], 0.99) == 7.0


def a_pod(name: str, service: str, **metadata) -> dict:
    labels = {names.LABEL_SERVICE: service}
    return {"metadata": {"name": name, "namespace": "team", "labels": labels, **metadata}, "spec": {}}


async def test_changes_are_found_by_what_they_are_and_when_they_came():
    server = FakeApiServer()
    server.put(PODS, a_pod("a-0", "a"))
    changes = Changes(server.client(), PODS)
    watching = asyncio.create_task(changes.run())
    try:
        before = asyncio.get_running_loop().time()
        late = asyncio.create_task(changes.first(lambda pod: service_of(pod) == "b", since=before))
        two = asyncio.create_task(changes.until(lambda: len(changes.now) == 2))
        await server.watched()
        server.put(PODS, a_pod("b-0", "b"))
        seen = await late
        await two

        assert seen >= before
        assert await changes.first(lambda pod: service_of(pod) == "b") == seen, "the first version counts"
        server.delete(PODS, "team", "b-0", grace=0)
        await changes.until(lambda: ("team", "b-0") not in changes.now)
        with pytest.raises(TimeoutError):
            await changes.first(lambda pod: service_of(pod) == "c", patience=0.05)
    finally:
        watching.cancel()


def test_writes_are_counted_by_verb_and_resource_without_those_that_were_left_out():
    metrics = OperatorMetrics()
    metrics.writes.labels("apply", "pods", "200").inc(3)
    metrics.writes.labels("apply", "pods", "409").inc()
    metrics.writes.labels("apply", "pods", "skipped").inc(9)
    metrics.writes.labels("patch", "loraadapters/status", "200").inc(2)

    assert writes_in(metrics.exposition().decode()) == {"apply pods": 4, "patch loraadapters/status": 2}
