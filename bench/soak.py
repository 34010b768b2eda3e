"""Benchmark of memory over time: how much the API process and the engine process grow under mixed load.

    SLIPWAY_SOAK_MINUTES=30 python -m bench soak

The mix: chats of several turns, shared system prompts, two adapters, long prompts now and then, readers that leave. The
first fifth warms up; growth is the slope of resident memory over the rest, per hour.
"""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bench.figures import Figure, Section
from bench.load import run_load
from bench.plan import LoadPlan, LoadReport
from bench.servers import EMBEDDED_MODEL, MODEL_NAME, Server, a_runtime
from bench.workload import SMALL_MIXED_MIX, Workload

ADAPTERS: Final = ("sailor", "json")
SAMPLES_A_MINUTE: Final = 12


def measure() -> Section:
    """Both processes, sampled while the load runs."""
    minutes = float(os.environ.get("SLIPWAY_SOAK_MINUTES", "3"))
    flags = ["--max-adapters", "2", "--dtype", "fp32"]
    for name in ADAPTERS:
        flags += ["--adapter", f"{name}=file://{EMBEDDED_MODEL.parent / 'adapters' / name}"]
    with a_runtime(*flags) as server:
        report, api, engine = asyncio.run(_soak(server, minutes))
    figures = (
        Figure(
            "requests",
            float(report.sent),
            "",
            f"{report.finished} finished, {report.left} left, {report.failed} failed {report.failures or ''}".rstrip(),
        ),
        *_figures("API process", api, minutes, note="aim: under 200 MB (191 MiB), no growth"),
        *_figures("engine process", engine, minutes),
    )
    return Section(f"Soak: {minutes:g} minutes of everything", figures)


async def _soak(server: Server, minutes: float) -> tuple[LoadReport, list[float], list[float]]:
    plan = LoadPlan(
        base_url=f"{server.url}/v1",
        model=MODEL_NAME,
        concurrency=6,
        duration_seconds=minutes * 60,
        max_tokens=48,
        workload=Workload(mix=SMALL_MIXED_MIX, turns=3, prefixes=4, prefix_words=80, adapters=ADAPTERS, leaving=0.1),
    )
    load = asyncio.create_task(run_load(plan))
    (child,) = _children(server.process.pid)
    api: list[float] = []
    engine: list[float] = []
    while not load.done():
        api.append(_rss_mib(server.process.pid))
        engine.append(_rss_mib(child))
        await asyncio.wait({load}, timeout=60 / SAMPLES_A_MINUTE)
    return load.result(), api, engine


def _figures(name: str, samples: Sequence[float], minutes: float, note: str = "") -> tuple[Figure, ...]:
    steady = samples[len(samples) // 5 :]
    growth = _slope(steady) * SAMPLES_A_MINUTE * 60
    return (
        Figure(f"{name}: resident at the end", samples[-1], "MiB", note),
        Figure(f"{name}: growth", growth, "MiB/h", f"{samples[0]:.0f} MiB at the start"),
    )


def _slope(values: Sequence[float]) -> float:
    """Least squares, per sample."""
    count = len(values)
    if count < 2:
        return 0.0
    middle, mean = (count - 1) / 2, sum(values) / count
    spread = sum((index - middle) ** 2 for index in range(count))
    return sum((index - middle) * (value - mean) for index, value in enumerate(values)) / spread


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _rss_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
