"""Reads load, counters, size of the KV cache and start of the engine from a metrics page, by the dialect. Pure."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from slipway_agent.page import Series, UnreadablePage
from slipway_api.dialect import EngineCapacity, EngineMetrics, Metric

Page = Mapping[str, list[Series]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """The meaning of one page. Counters are since the start of the engine."""

    running: int
    waiting: int
    kv_usage: float  # between 0 and 1
    start: str = ""  # changes with every start of the engine; empty: the page does not say
    blocks: int = 0  # 0: unknown
    block_size: int = 0  # tokens
    prompt_tokens: int = 0
    generation_tokens: int = 0
    finished: int = 0
    aborted: int = 0

    @property
    def counters(self) -> tuple[int, ...]:
        """Numbers that never fall while the engine lives."""
        return (self.prompt_tokens, self.generation_tokens, self.finished, self.aborted)


def wanted_names(metrics: EngineMetrics) -> frozenset[str]:
    """The names on the page that `read` needs."""
    lists = (metrics.running, metrics.waiting, metrics.prompt_tokens, metrics.generation_tokens)
    names = {metric.name for metrics_ in (*lists, metrics.finished, metrics.aborted) for metric in metrics_}
    names.add(metrics.kv_usage.name)
    if metrics.start_time is not None:
        names.add(metrics.start_time.name)
    if metrics.capacity is not None:
        names.add(metrics.capacity.metric)
    return frozenset(names)


def read(page: Page, metrics: EngineMetrics) -> Readings:
    """The readings of a page; raises UnreadablePage where a gauge is missing or its value makes no sense."""
    start = _gauge(page, metrics.start_time) if metrics.start_time is not None else None
    blocks, block_size = _capacity(page, metrics.capacity) if metrics.capacity is not None else (0, 0)
    return Readings(
        running=_whole(sum(_total(_gauge(page, one), one) for one in metrics.running), "running requests"),
        waiting=_whole(sum(_total(_gauge(page, one), one) for one in metrics.waiting), "waiting requests"),
        kv_usage=_share(_gauge(page, metrics.kv_usage), metrics.kv_usage),
        start=hashlib.sha256(repr([one.value for one in start]).encode()).hexdigest()[:12] if start else "",
        blocks=blocks,
        block_size=block_size,
        prompt_tokens=_counters(page, metrics.prompt_tokens),
        generation_tokens=_counters(page, metrics.generation_tokens),
        finished=_counters(page, metrics.finished),
        aborted=_counters(page, metrics.aborted),
    )


def matching(page: Page, metric: Metric) -> list[Series]:
    """The series of a metric that have its labels."""
    return [one for one in page.get(metric.name, ()) if one.has(metric.labels)]


def _gauge(page: Page, metric: Metric) -> list[Series]:
    found = matching(page, metric)
    if not found:
        labels = ", ".join(f"{name}={value}" for name, value in sorted(metric.labels.items()))
        named = f"{metric.name} with {labels}" if labels else metric.name
        raise UnreadablePage(f"the metrics page has no {named}, which the dialect names")
    return found


def _total(series: Iterable[Series], metric: Metric) -> float:
    values = [one.value for one in series]
    if min(values) < 0:
        raise UnreadablePage(f"the metric {metric.name} is negative")
    return sum(values)


def _share(series: list[Series], metric: Metric) -> float:
    mean = sum(one.value for one in series) / len(series)
    # Rounding in an engine may pass 1 by a hair; a percentage is a wrong dialect.
    if not 0 <= mean <= 1.001 or min(one.value for one in series) < 0:
        raise UnreadablePage(f"the metric {metric.name} is not between 0 and 1")
    return min(mean, 1.0)


def _counters(page: Page, metrics: Iterable[Metric]) -> int:
    total = 0.0
    for metric in metrics:
        if series := matching(page, metric):
            total += _total(series, metric)
    return _whole(total, "a counter")


def _whole(value: float, what: str) -> int:
    if value > 2**53:
        raise UnreadablePage(f"{what}: the number is too large")
    return round(value)


def _capacity(page: Page, capacity: EngineCapacity) -> tuple[int, int]:
    """Blocks of the KV cache, and tokens of a block; zeros where the page does not say, which is no error."""
    series = page.get(capacity.metric, [])
    if not capacity.blocks_label:
        return (_whole(sum(one.value for one in series), "capacity"), 1) if series else (0, 0)
    try:
        blocks = sum(int(one.labels[capacity.blocks_label]) for one in series)
        size = int(series[0].labels[capacity.block_size_label]) if capacity.block_size_label and series else 1
    except (KeyError, ValueError):
        return 0, 0
    return (blocks, size) if 0 < blocks < 2**53 and 0 < size < 2**20 else (0, 0)
