"""Benchmark of our runtime, embedded model: TTFT, ITL and tokens per second at 1, 8 and 32 users, against a peer.

The peer is `transformers.generate` with one static batch of the same size, the same prompts, threads and precision, in
the same run; both make the same number of tokens for every prompt.
"""

import asyncio
import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence

import aiohttp

from bench.figures import Figure, Section, share_of
from bench.load import run_load
from bench.plan import LoadPlan, LoadReport, Percentiles
from bench.prompts import Share
from bench.servers import EMBEDDED_MODEL, MODEL_NAME, a_runtime
from bench.stream import chat_stream
from bench.workload import SMALL_MIXED_MIX, Workload

CONCURRENCY = (1, 8, 32)
MAX_TOKENS = 64
ROUNDS = 3  # answers per user
PEER_SECONDS = 600
STARTS, REQUESTS_OF_A_START = 5, 20
# Of ten requests one has a prompt of twelve steps, as 50,000 tokens at 4,096 a step: the embedded model has 2,048.
STEP_TOKENS = 128
BESIDE_LONG_PROMPTS = (Share(0.9, 10, 20), Share(0.1, 1300, 1400))
SHORT_PROMPT_TOKENS = STEP_TOKENS // 2


def measure(concurrency: Sequence[int] = CONCURRENCY, rounds: int = ROUNDS) -> Section:
    """All figures of the runtime."""
    with a_runtime("--dtype", "fp32") as server:
        base_url = f"{server.url}/v1"
        asyncio.run(_load(base_url, 1, 1))  # warm-up
        figures: list[Figure] = []
        for users in concurrency:  # one after the other, so that a busy neighbour hits both
            figures += _figures(users, asyncio.run(_load(base_url, users, rounds)), _peer(users, rounds))
        figures += _mixed(asyncio.run(_mixed_load(base_url)))
        figures.append(Figure("memory after all of it", server.rss_bytes() / 2**20, "MiB", "API process"))
    with a_runtime("--dtype", "fp32", "--max-num-batched-tokens", str(STEP_TOKENS)) as server:
        base_url = f"{server.url}/v1"
        asyncio.run(_load(base_url, 1, 1))
        figures += _beside_long_prompts(asyncio.run(_load_beside_long_prompts(base_url)))
    figures.append(_first_requests())
    title = f"Runtime: embedded model, fp32, {MAX_TOKENS} tokens an answer, 1 thread"
    return Section(title, tuple(figures))


def _first_requests() -> Figure:
    """TTFT of the first request to a replica that has just become ready ÷ that of later ones, which are as long."""
    firsts, steady = [], []
    for start in range(STARTS):
        with a_runtime("--dtype", "fp32") as server:
            first, *later = asyncio.run(_one_by_one(f"{server.url}/v1", start))
        firsts.append(first)
        steady += later[len(later) // 2 :]
    usual, ratio = share_of(steady, 0.5), share_of(firsts, 0.5) / share_of(steady, 0.5)
    note = f"{usual * 1e3:.1f} ms; of {STARTS} starts " + ", ".join(f"{first / usual:.2f}" for first in firsts)
    return Figure("TTFT of the first request ÷ of later ones", ratio, "×", note, at_most=1.2)


async def _one_by_one(base_url: str, seed: int) -> list[float]:
    """TTFT of requests one after the other, each on a connection of its own, none with the prefix of another."""
    draw, found = random.Random(seed), []
    for _ in range(REQUESTS_OF_A_START):
        text = " ".join(str(draw.randrange(1000)) for _ in range(60))
        body = {"model": MODEL_NAME, "messages": [{"role": "user", "content": text}], "stream": True, "max_tokens": 4}
        async with aiohttp.ClientSession() as session:
            found.append((await chat_stream(session, base_url, body)).ttft)
    return found


async def _load(base_url: str, users: int, rounds: int) -> LoadReport:
    plan = LoadPlan(
        base_url=base_url,
        model=MODEL_NAME,
        concurrency=users,
        duration_seconds=300,
        max_requests=users * rounds,
        max_tokens=MAX_TOKENS,
        temperature=0.0,
        ignore_eos=True,
    )
    report = await run_load(plan)
    if report.failed:
        raise RuntimeError(f"{report.failed} of {report.sent} requests failed: {report.failures}")
    return report


async def _mixed_load(base_url: str) -> LoadReport:
    """Chats with an occasional very long prompt: its effect on the inter-token latency of the others."""
    return await run_load(
        LoadPlan(
            base_url=base_url,
            model=MODEL_NAME,
            concurrency=8,
            duration_seconds=300,
            max_requests=64,
            max_tokens=MAX_TOKENS,
            temperature=0.0,
            ignore_eos=True,
            workload=Workload(mix=SMALL_MIXED_MIX),
        )
    )


def _mixed(report: LoadReport) -> list[Figure]:
    name, mean = "chats and long prompts, 8 at once", report.prompt_tokens / max(1, report.finished)
    ttft, itl = report.ttft, report.itl
    return [
        Figure(f"{name}: tokens/s", report.tokens_per_second, "tok/s", f"{mean:.0f} prompt tokens mean"),
        Figure(f"{name}: TTFT p50", ttft.p50 * 1e3, "ms", f"p99 {ttft.p99 * 1e3:.0f} ms, of the long prompts"),
        Figure(f"{name}: ITL p50", itl.p50 * 1e3, "ms", f"p99 {itl.p99 * 1e3:.0f} ms"),
    ]


async def _load_beside_long_prompts(base_url: str, seed: int = 0) -> LoadReport:
    """Chats beside long prompts that are computed much of the time: the effect of these on the chats' first tokens."""
    return await run_load(
        LoadPlan(
            base_url=base_url,
            model=MODEL_NAME,
            concurrency=8,
            duration_seconds=300,
            max_requests=160,
            seed=seed,
            max_tokens=16,
            temperature=0.0,
            ignore_eos=True,
            workload=Workload(mix=BESIDE_LONG_PROMPTS),
            short_prompt_tokens=SHORT_PROMPT_TOKENS,
        )
    )


def _beside_long_prompts(report: LoadReport) -> list[Figure]:
    name, short, ttft = "chats beside long prompts, 8 at once", report.short_ttft, report.ttft
    return [
        Figure(f"{name}: tokens/s", report.tokens_per_second, "tok/s", f"{report.finished} answers of 16 tokens"),
        Figure(f"{name}: TTFT of chats p50", short.p50 * 1e3, "ms", f"p95 {short.p95 * 1e3:.0f} ms"),
        Figure(f"{name}: TTFT of chats p99", short.p99 * 1e3, "ms", f"p99 of all {ttft.p99 * 1e3:.0f} ms"),
    ]


def _peer(users: int, rounds: int) -> dict[str, list[float]]:
    command = [sys.executable, "-m", "bench.peer_transformers", "--concurrency", str(users)]
    command += ["--rounds", str(rounds), "--max-tokens", str(MAX_TOKENS)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command,
        cwd=EMBEDDED_MODEL.parent.parent,
        env=environment,
        capture_output=True,
        timeout=PEER_SECONDS,
        check=True,
    )
    result: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return result


def _figures(users: int, ours: LoadReport, peer: dict[str, list[float]]) -> list[Figure]:
    theirs = float(peer["tokens_per_second"])  # type: ignore[arg-type]
    ttft, itl = Percentiles.of(peer["ttft"]), Percentiles.of(peer["gaps"])
    at = f"{users} at once"
    return [
        Figure(f"{at}: tokens/s", ours.tokens_per_second, "tok/s", f"{ours.finished} answers"),
        Figure(
            f"{at}: ÷ transformers.generate", ours.tokens_per_second / theirs, "×", f"{theirs:.0f} tok/s, static batch"
        ),
        Figure(f"{at}: TTFT p50", ours.ttft.p50 * 1e3, "ms", f"{ttft.p50 * 1e3:.0f} ms for the peer's batch"),
        Figure(f"{at}: TTFT p99", ours.ttft.p99 * 1e3, "ms"),
        Figure(f"{at}: ITL p50", ours.itl.p50 * 1e3, "ms", f"{itl.p50 * 1e3:.1f} ms for the peer"),
        Figure(f"{at}: ITL p99", ours.itl.p99 * 1e3, "ms"),
    ]
