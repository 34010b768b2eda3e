"""Prometheus as a source of load: one query a tick for all replicas, in a thread.

The scraper asks replicas itself; that is the default, and the fallback. Where a Prometheus is configured that scrapes
the replicas as often (`scraper.REPLACES_WITHIN`), its samples take the place of most of those calls: a busy replica is
then asked at the idle pace, for what Prometheus does not have (whether it drains, its boot id). A Prometheus that is
away, slow, or does not know a replica changes nothing but the number of calls.

One range query has all metrics of all replicas, with the times at which they were scraped: an instant query would give
a replica that is gone five more minutes with a fresh time. The client library is synchronous, hence the thread; there
is one query at a time, and never one a service.

Series need the labels `namespace` and `pod`, as the scrape configs of Kubernetes set them.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import structlog

log = structlog.get_logger()

TICK_SECONDS: Final = 2.0
TIMEOUT_SECONDS: Final = 5
RANGE: Final = "30s"  # further back nothing is fresh enough to count

KV_USAGE, RUNNING, WAITING = "vllm:kv_cache_usage_perc", "vllm:num_requests_running", "vllm:num_requests_waiting"
QUERY: Final = f'{{__name__=~"{KV_USAGE}|{RUNNING}|{WAITING}",pod!="",namespace!=""}}[{RANGE}]'

Series = Mapping[str, Any]  # {"metric": labels, "values": [[seconds, text], ...]}
Ask = Callable[[str], Iterable[Series]]


@dataclass(frozen=True, slots=True)
class Load:
    """The load of one replica at the moment when Prometheus scraped it."""

    namespace: str
    pod: str
    at: datetime
    kv_usage: float
    running: int
    waiting: int


def connect(url: str) -> Ask:
    """A blocking function that asks this Prometheus."""
    # Here and not above: the library loads an HTTP stack of its own, for installations that name a Prometheus.
    from prometheus_api_client import PrometheusConnect
    from urllib3.util import Retry

    client = PrometheusConnect(url, timeout=TIMEOUT_SECONDS, retry=Retry(total=0), method="POST")

    def ask(query: str) -> Iterable[Series]:
        found: Iterable[Series] = client.custom_query(query)
        return found

    return ask


def loads_of(found: Iterable[Series]) -> list[Load]:
    """The newest load of each replica for which all three metrics are there.

    Several series of one metric and pod (one a served model) are added up; the time is that of the oldest value.
    """
    values: dict[tuple[str, str], dict[str, float]] = {}
    times: dict[tuple[str, str], float] = {}
    for series in found:
        labels, points = series["metric"], series["values"]
        if not points:
            continue
        key = (labels["namespace"], labels["pod"])
        at, text = float(points[-1][0]), float(points[-1][1])
        metrics = values.setdefault(key, {})
        metrics[labels["__name__"]] = metrics.get(labels["__name__"], 0.0) + text
        times[key] = min(at, times.get(key, at))
    return [
        Load(
            namespace=namespace,
            pod=pod,
            at=datetime.fromtimestamp(times[namespace, pod], UTC),
            kv_usage=min(1.0, max(0.0, metrics[KV_USAGE])),
            running=int(metrics[RUNNING]),
            waiting=int(metrics[WAITING]),
        )
        for (namespace, pod), metrics in values.items()
        if {KV_USAGE, RUNNING, WAITING} <= metrics.keys() and all(one == one for one in metrics.values())  # no NaN
    ]


class PrometheusSource:
    """Asks Prometheus again and again, and hands each replica's load on."""

    def __init__(
        self,
        ask: Ask,
        learn: Callable[[Load], None],
        *,
        on_error: Callable[[Exception], None] = lambda _error: None,
        tick_seconds: float = TICK_SECONDS,
    ) -> None:
        self._ask = ask
        self._learn = learn
        self._on_error = on_error
        self._tick = tick_seconds
        self._is_away = False

    async def run(self) -> None:
        """Ask until cancelled. A query that takes longer than a tick delays the next one."""
        while True:
            await self.ask_once()
            await asyncio.sleep(self._tick)

    async def ask_once(self) -> None:
        """One query; without an answer, replicas are asked directly, and nothing else happens."""
        try:
            loads = loads_of(await asyncio.to_thread(self._ask, QUERY))
        except Exception as exc:  # noqa: BLE001  whatever it answers, autoscaling goes on without it
            self._on_error(exc)
            if not self._is_away:  # once an outage, not every two seconds
                log.warning("prometheus does not answer; the operator calls the replicas", error=str(exc))
            self._is_away = True
            return
        if self._is_away:
            log.info("prometheus answers again")
        self._is_away = False
        for load in loads:
            self._learn(load)
