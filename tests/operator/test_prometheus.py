"""Prometheus as a source of load: a real server that scrapes replicas, its answers, and its outages."""

import asyncio
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import pytest
from aiohttp import web

from slipway_operator.inputs.prometheus import (
    KV_USAGE,
    QUERY,
    RUNNING,
    WAITING,
    Load,
    PrometheusSource,
    connect,
    loads_of,
)
from tests.prometheus_server import find_binary, free_port


def series(name: str, *points: tuple[float, str], pod: str = "chat-0", namespace: str = "team", **labels: str) -> dict:
    return {"metric": {"__name__": name, "namespace": namespace, "pod": pod, **labels}, "values": [*map(list, points)]}


def whole(pod: str = "chat-0", *, at: float = 100.0, kv: str = "0.5", running: str = "3", waiting: str = "2") -> list:
    return [
        series(KV_USAGE, (at - 5, "0.1"), (at, kv), pod=pod),
        series(RUNNING, (at, running), pod=pod),
        series(WAITING, (at, waiting), pod=pod),
    ]


# --- answers --------------------------------------------------------------------------------------------------------


@pytest.mark.capability("AS-4")
def test_the_newest_value_of_each_metric_is_the_load_with_the_time_of_its_scrape():
    assert loads_of([*whole(), *whole("chat-1", running="7")]) == [
        Load("team", "chat-0", datetime.fromtimestamp(100, UTC), 0.5, 3, 2),
        Load("team", "chat-1", datetime.fromtimestamp(100, UTC), 0.5, 7, 2),
    ]


@pytest.mark.capability("AS-4")
@pytest.mark.parametrize(
    "found",
    [
        [],
        whole()[:2],
        [*whole()[:2], series(WAITING)],
        whole(kv="NaN"),
    ],
    ids=["nothing", "a metric is missing", "a metric without a value", "not a number"],
)
def test_half_an_answer_is_none(found):
    assert loads_of(found) == []


def test_several_models_of_one_pod_are_added_up_and_the_oldest_time_counts():
    second = series(RUNNING, (90.0, "4"), model_name="other")

    (load,) = loads_of([*whole(), second])

    assert (load.running, load.at) == (7, datetime.fromtimestamp(90, UTC))


@pytest.mark.capability("AS-4")
@pytest.mark.parametrize("error", [ConnectionError("refused"), KeyError("metric"), ValueError("no JSON")])
async def test_whatever_goes_wrong_nothing_is_learnt_and_the_next_tick_asks_again(error):
    learnt: list[Load] = []
    errors: list[Exception] = []
    answers: list[Callable[[], list]] = [lambda: (_ for _ in ()).throw(error), whole]
    source = PrometheusSource(lambda _query: answers.pop(0)(), learnt.append, on_error=errors.append)

    await source.ask_once()
    assert (learnt, errors) == ([], [error])
    await source.ask_once()
    assert [one.pod for one in learnt] == ["chat-0"]


async def test_a_slow_answer_holds_no_one_up_and_is_the_only_question():
    asked, is_answered = [], asyncio.Event()
    loop = asyncio.get_running_loop()

    def ask(query: str) -> list:
        asked.append(query)
        asyncio.run_coroutine_threadsafe(is_answered.wait(), loop).result()
        return []

    source = PrometheusSource(ask, lambda _load: None, tick_seconds=0.001)
    task = asyncio.create_task(source.run())
    while not asked:  # noqa: ASYNC110  it is set in a thread
        await asyncio.sleep(0.001)  # the loop goes on
    await asyncio.sleep(0.05)
    assert asked == [QUERY], "one query for all, and none beside it"
    is_answered.set()
    while len(asked) < 2:  # noqa: ASYNC110  and that too
        await asyncio.sleep(0.001)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


# --- a real Prometheus ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def prometheus_binary() -> Path:
    return find_binary()


class Replicas:
    """The /metrics of two replicas, as the runtime's names have it."""

    def __init__(self) -> None:
        self.running = {"chat-0": 3, "chat-1": 40}

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[int]:
        app = web.Application()
        app.router.add_get("/{pod}/metrics", self._metrics)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            yield runner.addresses[0][1]
        finally:
            await runner.cleanup()

    async def _metrics(self, request: web.Request) -> web.Response:
        running = self.running[request.match_info["pod"]]
        lines = (f'{KV_USAGE}{{model_name="chat"}} 0.25', f'{RUNNING}{{model_name="chat"}} {running}')
        return web.Response(text="\n".join([*lines, f'{WAITING}{{model_name="chat"}} 1', "other 5", ""]))


CONFIG = """
global: {{scrape_interval: 1s, scrape_timeout: 1s}}
scrape_configs:
{jobs}
"""
JOB = """
  - job_name: {pod}
    metrics_path: /{pod}/metrics
    static_configs: [{{targets: ["127.0.0.1:{port}"], labels: {{namespace: team, pod: {pod}}}}}]
"""


@pytest.fixture
def start_prometheus(prometheus_binary: Path, tmp_path: Path) -> Iterator[Callable[[int, int], subprocess.Popen]]:
    started: list[subprocess.Popen] = []

    def start(port: int, replicas_port: int) -> subprocess.Popen:
        jobs = "".join(JOB.format(pod=pod, port=replicas_port) for pod in ("chat-0", "chat-1"))
        config = tmp_path / "prometheus.yml"
        config.write_text(CONFIG.format(jobs=jobs))
        flags = [f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'data'}"]
        with (tmp_path / "log").open("ab") as log:
            process = subprocess.Popen(
                [prometheus_binary, *flags, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log
            )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


async def until(what: Callable[[], bool], source: PrometheusSource) -> None:
    """Ask until it is so; generous, because a machine may be busy."""
    for _ in range(600):
        await source.ask_once()
        if what():
            return
        await asyncio.sleep(0.1)
    raise AssertionError("not within a minute")


@pytest.mark.capability("AS-4")
async def test_a_real_prometheus_gives_the_load_of_all_replicas_by_one_query_and_its_outage_is_survived(
    start_prometheus,
):
    learnt: dict[str, Load] = {}
    errors: list[Exception] = []
    replicas, port = Replicas(), free_port()
    async with replicas.serving() as replicas_port:
        source = PrometheusSource(
            connect(f"http://127.0.0.1:{port}"), lambda load: learnt.update({load.pod: load}), on_error=errors.append
        )
        await source.ask_once()
        assert (len(errors), learnt) == (1, {}), "it is not there yet"

        process = start_prometheus(port, replicas_port)
        await until(lambda: set(learnt) == {"chat-0", "chat-1"}, source)
        load = learnt["chat-1"]
        assert (load.namespace, load.kv_usage, load.running, load.waiting) == ("team", 0.25, 40, 1)
        assert abs((datetime.now(UTC) - load.at).total_seconds()) < 60

        replicas.running["chat-1"] = 7
        await until(lambda: learnt["chat-1"].running == 7, source)
        assert learnt["chat-1"].at > load.at, "the time of the scrape, so an old value is seen to be old"

        process.kill()
        process.wait()
        errors.clear()
        await source.ask_once()
        assert len(errors) == 1
        start_prometheus(port, replicas_port)
        replicas.running["chat-1"] = 9
        await until(lambda: learnt["chat-1"].running == 9, source)
