"""Benchmark of everything at once over time: failed requests, growth of memory, and the ledger of requests.

    python -m bench soak --minutes 30

One runtime with every feature that a CPU has: chats of several turns with shared system prompts, two adapters and a
third that comes and goes, grammars, tools, logprobs, penalties, several answers, drafts from the prompt, long prompts,
readers that leave, a host tier under a small KV pool, the other endpoints, and a sleep of either level between rounds.
The run fails where a feature was not used. The first fifth warms up; growth is the slope of resident memory over the
rest, per hour, with its standard error.
"""

import asyncio
import math
import os
import re
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

from bench.figures import Figure, Section
from bench.load import run_load
from bench.plan import LoadPlan
from bench.servers import EMBEDDED_MODEL, MODEL_NAME, Server, a_runtime
from bench.soak_requests import CHAT_EXTRAS, Answers, send_others, sleep_and_wake
from bench.workload import SMALL_MIXED_MIX, Workload
from slipway_api import names
from slipway_api.runtime_api import Signals

ADAPTERS: Final = ("sailor", "json")
SAMPLES_A_MINUTE: Final = 12
ROUNDS: Final = 6  # between them, the replica sleeps
FLAGS: Final = (
    "--max-adapters", "2", "--max-cpu-adapters", "3", "--adapter-endpoints", "--dtype", "fp32",
    "--kv-cache-bytes", "12Mi", "--kv-cache-host-bytes", "32Mi", "--speculation", "promptLookup",
    "--speculation-max-tokens", "4", "--max-num-seqs", "8",
)  # fmt: skip
# Feature -> the metric that is above zero once it was used.
FEATURES: Final = {
    "prefix cache": "vllm:prefix_cache_hits_total",
    "host tier, out": "slipway:kv_host_demotions_total",
    "host tier, back": "vllm:external_prefix_cache_hits_total",
    "speculation": "vllm:spec_decode_num_accepted_tokens_total",
    "grammars": "slipway:mask_seconds_total",
    "answers": "vllm:generation_tokens_total",
}


class Watch:
    """Resident memory of both processes, in MiB, sampled while it runs."""

    def __init__(self, server: Server) -> None:
        (self._engine,) = _children(server.process.pid)
        self._api = server.process.pid
        self.api: list[float] = []
        self.engine: list[float] = []

    async def run(self) -> None:
        """Take samples until cancelled."""
        while True:
            self.api.append(_rss_mib(self._api))
            self.engine.append(_rss_mib(self._engine))
            await asyncio.sleep(60 / SAMPLES_A_MINUTE)


def measure() -> Section:
    """All figures; raises RuntimeError where a feature was not used."""
    minutes = float(os.environ.get("SLIPWAY_SOAK_MINUTES", "3"))
    flags = list(FLAGS)
    for name in ADAPTERS:
        flags += ["--adapter", f"{name}=file://{EMBEDDED_MODEL.parent / 'adapters' / name}"]
    with a_runtime(*flags) as server:
        return Section(f"Soak: {minutes:g} minutes of everything", asyncio.run(_soak(server, minutes)))


async def _soak(server: Server, minutes: float) -> tuple[Figure, ...]:
    watch, answers, chats, used = Watch(server), Answers(), Counter[str](), Counter[str]()
    watching = asyncio.create_task(watch.run())
    seconds = minutes * 60 / ROUNDS
    for number in range(ROUNDS):
        others = asyncio.create_task(send_others(server, seconds, number, answers))
        report = await run_load(_plan(server, seconds, number))
        await others
        answers.failures.update({f"chat: {failure}": count for failure, count in report.failures.items()})
        chats.update(sent=report.sent, finished=report.finished, left=report.left, failed=report.failed)
        signals = await _at_rest(server)
        used = counters_of(_get(f"{server.admin_url}/metrics"))
        await sleep_and_wake(server, number % 2 + 1, answers)
    watching.cancel()
    unused = [feature for feature, metric in FEATURES.items() if not used[metric]]
    unused += [name for name, happened in (("readers that leave", chats["left"]),) if not happened]
    if unused:
        raise RuntimeError(f"the run was too short to use {', '.join(unused)}")
    failures = "; ".join(f"{count} × {failure}" for failure, count in answers.failures.items())
    kinds = ", ".join(f"{count} × {kind}" for kind, count in sorted(answers.sent.items()))
    return (
        Figure("requests", float(chats["sent"] + answers.sent.total()), "", f"{chats['left']} left; chats and {kinds}"),
        Figure("failed requests", float(answers.failures.total()), "", failures, at_most=0.0),
        Figure(
            "ledger: admitted − finished − aborted − handed over",
            float(signals.admitted - signals.finished - signals.aborted - signals.handed_over),
            "",
            f"{signals.admitted} = {signals.finished} + {signals.aborted} + {signals.handed_over}",
            at_most=0.0,
        ),
        *(Figure(f"used: {feature}", used[metric], "", metric) for feature, metric in FEATURES.items()),
        *_growth("API process", watch.api, note="aim: under 200 MB (191 MiB), no growth"),
        *_growth("engine process", watch.engine),
    )


def _plan(server: Server, seconds: float, number: int) -> LoadPlan:
    return LoadPlan(
        base_url=f"{server.url}/v1",
        model=MODEL_NAME,
        concurrency=6,
        duration_seconds=seconds,
        max_tokens=48,
        seed=number,
        workload=Workload(
            mix=SMALL_MIXED_MIX,
            turns=3,
            prefixes=4,
            prefix_words=80,
            adapters=ADAPTERS,
            leaving=0.1,
            extras=CHAT_EXTRAS,
        ),
    )


async def _at_rest(server: Server) -> Signals:
    """The ledger once no request is open: the server notices a reader that left after a moment."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        signals = Signals.model_validate_json(_get(f"{server.admin_url}{names.PATH_SIGNALS}"))
        if not signals.running + signals.waiting:
            return signals
        await asyncio.sleep(0.2)
    raise RuntimeError(f"{signals.running} requests still run and {signals.waiting} wait, a minute after the load")


def counters_of(metrics: str) -> Counter[str]:
    """The sum of each metric over its labels."""
    sums: Counter[str] = Counter()
    for line in metrics.splitlines():
        if found := re.match(r"([a-zA-Z_:][\w:]*)(?:\{.*\})? ([\d.e+-]+)", line):
            sums[found[1]] += float(found[2])  # type: ignore[assignment]  a Counter may hold floats
    return sums


def _growth(name: str, samples: Sequence[float], note: str = "") -> tuple[Figure, ...]:
    steady = samples[len(samples) // 5 :]
    slope, error = (value * SAMPLES_A_MINUTE * 60 for value in slope_with_error(steady))
    return (
        Figure(f"{name}: resident at the end", samples[-1], "MiB", note),
        Figure(f"{name}: growth", slope, "MiB/h", f"± {error:.1f} (standard error); {samples[0]:.0f} MiB at the start"),
    )


def slope_with_error(values: Sequence[float]) -> tuple[float, float]:
    """Least squares per sample, and its standard error; neighbouring samples are alike, which widens the error.

    The residuals are taken as an AR(1) process: with a correlation of r between neighbours, n samples say as much as
    n (1 - r) / (1 + r) independent ones.
    """
    count = len(values)
    if count < 4:
        return 0.0, math.inf
    middle, mean = (count - 1) / 2, sum(values) / count
    spread = sum((index - middle) ** 2 for index in range(count))
    slope = sum((index - middle) * (value - mean) for index, value in enumerate(values)) / spread
    residuals = [value - mean - slope * (index - middle) for index, value in enumerate(values)]
    squares = sum(residual**2 for residual in residuals)
    if not squares:
        return slope, 0.0
    alike = sum(one * next_one for one, next_one in pairwise(residuals)) / squares
    alike += (1 + 4 * alike) / count  # the estimate from few samples is too low (Kendall 1954)
    alike = min(max(alike, 0.0), 0.99)
    variance = squares / (count - 2) * (1 + alike) / (1 - alike)
    return slope, math.sqrt(variance / spread)


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as response:
        return str(response.read().decode())


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _rss_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
