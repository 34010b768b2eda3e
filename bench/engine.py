"""Benchmark of our engine against others through their Python APIs, random weights in real shapes, and a lower bound.

    python -m bench.peers.environments       # once: makes the peers' environments
    python -m bench engine
    SLIPWAY_BENCH_THREADS=2 SLIPWAY_BENCH_CASES=32/64/8 python -m bench engine     # one case only, on two threads
    SLIPWAY_BENCH_CASES=all python -m bench engine                                 # hours

Prefill and decode are reported apart, and batch 1 never stands alone. Every case has a row for every peer: a ratio,
below 1 or not, or the reason why there is none. The last rows are versions and settings, as each engine reported them.
"""

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it

from bench.figures import Figure, Section
from bench.peers.environments import PEERS, environment, interpreter
from bench.plan import Percentiles
from bench.shapes import checkpoint, linear_sizes

SHAPE = os.environ.get("SLIPWAY_BENCH_SHAPE", "135m")
# (prompt tokens, output tokens, at once, rounds)
CASES = ((32, 64, 1, 2), (32, 64, 8, 1), (32, 64, 32, 1), (512, 32, 1, 1), (512, 32, 8, 1), (512, 32, 32, 1))
# Without SLIPWAY_BENCH_CASES, which names others (`all`, or some like 32/64/8): 40 minutes in all.
USUAL = {1: ("32/64/8", "32/64/32", "512/32/8"), 2: ("32/64/32",)}  # by threads
ONLY = os.environ.get("SLIPWAY_BENCH_CASES", "").split()
# Of weights; arithmetic and KV cache are float32 for fp32, else whatever the engine has for bfloat16.
KINDS = tuple(os.environ.get("SLIPWAY_BENCH_KINDS", "fp32,bf16,int8").split(","))
CLOCK = os.environ.get("SLIPWAY_BENCH_CLOCK", "wall")  # cpu: see `peers.waves`
SECONDS = 900  # the longest that one engine may take over one case
AIM = 1.3  # times as fast as each peer
THREADS = tuple(int(count) for count in os.environ.get("SLIPWAY_BENCH_THREADS", "1,2").split(","))


def measure() -> Section:
    """All cases, engine after engine within each, so that other load affects all of them."""
    if unknown := set(KINDS) - {"fp32", "bf16", "int8"}:
        raise ValueError(f"SLIPWAY_BENCH_KINDS has {', '.join(sorted(unknown))}: fp32, bf16 and int8 are known")
    figures: list[Figure] = []
    settings: dict[str, tuple[str, float]] = {}
    for threads in THREADS:
        cases = _cases(threads)
        floor = {rows: linear_floor_seconds(rows, threads) for rows in sorted({case[2] for case in cases})}
        for rows, seconds in floor.items():
            name = f"{_threads(threads)}, floor: linears alone, {rows} rows"
            figures.append(Figure(name, rows / seconds, "tok/s", "fp32, F.linear"))
        for case in cases:
            figures += _case(*case, threads, floor, settings)
    for name, (words, seconds) in settings.items():
        figures.append(Figure(f"{name}: longest load and compile, not counted", seconds, "s", words))
    return Section(f"Engine: random weights in the shape of {SHAPE}", tuple(figures))


def _cases(threads: int) -> list[tuple[int, int, int, int]]:
    """Those that are asked for, or the usual ones."""
    names = {f"{prompt}/{tokens}/{users}": (prompt, tokens, users, rounds) for prompt, tokens, users, rounds in CASES}
    wanted = ONLY or USUAL.get(threads, USUAL[1])
    if unknown := set(wanted) - names.keys() - {"all"}:
        raise ValueError(f"SLIPWAY_BENCH_CASES has {', '.join(unknown)}: all, {', '.join(names)} are known")
    return [case for name, case in names.items() if name in wanted or "all" in wanted]


def _threads(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"


def linear_floor_seconds(rows: int, threads: int, repeats: int = 3) -> float:
    """The time of one step's matrix products alone, in float32 and without anything between them: the best of a few."""
    import time

    torch.set_num_threads(threads)
    weights = [torch.randn(out, size) for out, size in linear_sizes(SHAPE)]
    inputs = {size: torch.randn(rows, size) for _, size in linear_sizes(SHAPE)}
    best = float("inf")
    with torch.inference_mode():
        for _ in range(repeats + 1):
            begun = time.perf_counter()
            for weight in weights:
                F.linear(inputs[weight.shape[1]], weight)
            best = min(best, time.perf_counter() - begun)
    return best


def _case(
    prompt: int,
    tokens: int,
    users: int,
    rounds: int,
    threads: int,
    floor: dict[int, float],
    settings: dict[str, tuple[str, float]],
) -> Iterator[Figure]:
    at = f"{_threads(threads)}, {prompt}/{tokens} at {users}"

    def drive(name: str, kind: str) -> dict[str, Any]:
        result = drive_peer(name, kind, prompt, tokens, users, rounds, threads)
        if "error" not in result:
            key = f"{name}, {_threads(threads)}, {kind}"
            longest = max(float(result["setup_seconds"]), settings.get(key, ("", 0.0))[1])
            settings[key] = str(result["settings"]), longest
        return result

    for kind in KINDS:
        ours = drive("slipway", kind)
        decode = float(ours["decode_tokens_per_second"])
        share = decode * floor[users] / users
        yield Figure(f"{at}, {kind}: tok/s", float(ours["tokens_per_second"]), "tok/s", _spread(ours))
        yield Figure(f"{at}, {kind}: prefill", float(ours["prefill_tokens_per_second"]), "tok/s")
        yield Figure(f"{at}, {kind}: decode", decode, "tok/s", f"{share:.2f} of the fp32 linears' floor")
        for name, peer in PEERS.items():
            if kind in peer.absent:
                yield Figure(f"{at}, {kind}: ÷ {name}", math.nan, "×", f"no figure: {peer.absent[kind]}")
                continue
            theirs = drive(name, kind)
            if "error" in theirs:
                yield Figure(f"{at}, {kind}: ÷ {name}", math.nan, "×", f"no figure: {theirs['error']}")
                continue
            ratio = float(ours["tokens_per_second"]) / float(theirs["tokens_per_second"])
            note = f"{float(theirs['tokens_per_second']):.0f} tok/s; {_spread(theirs)}"
            yield Figure(f"{at}, {kind}: ÷ {name}", ratio, "×", note, at_least=AIM)


def _spread(result: dict[str, Any]) -> str:
    ttft, gap = Percentiles.of(result["ttft"]), Percentiles.of(result["gaps"])
    return f"TTFT p50 {ttft.p50 * 1e3:.0f} ms, ITL p50 {gap.p50 * 1e3:.1f} ms, {result['at_once']} at once"


def drive_peer(name: str, kind: str, prompt: int, tokens: int, users: int, rounds: int, threads: int) -> dict[str, Any]:
    """One engine over one case, in a process of its own; with `error` where it could not be measured."""
    python = Path(sys.executable) if name == "slipway" else interpreter(name)
    if python is None:
        return {"error": "not installed: python -m bench.peers.environments"}
    driver = "with_slipway.py" if name == "slipway" else PEERS[name].driver
    task = {
        "checkpoint": str(checkpoint(SHAPE)),
        "shape": SHAPE,
        "weights": "int8" if kind == "int8" else "none",
        "dtype": "fp32" if kind == "fp32" else "bf16",
        "threads": threads,
        "clock": CLOCK,
        "rounds": rounds,
        "concurrency": users,
        "prompt_tokens": prompt,
        "max_tokens": tokens,
        **({} if name == "slipway" else PEERS[name].settings),
    }
    root = Path(__file__).parent.parent
    extra = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(root)}
    try:
        done = subprocess.run(
            [str(python), str(root / "bench" / "peers" / driver)],
            input=json.dumps(task).encode(),
            cwd=root,
            env={**os.environ, **extra, **({} if name == "slipway" else environment(name))},
            capture_output=True,
            timeout=SECONDS,
            check=True,
        )
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1] if done.stdout else b"")
    except subprocess.TimeoutExpired:
        return {"error": f"took longer than {SECONDS} s"}
    except json.JSONDecodeError:
        return {"error": "printed no result"}
    except subprocess.CalledProcessError as error:
        if name == "slipway":
            raise
        return {"error": f"exit status {error.returncode}: {error.stderr.decode(errors='replace').strip()[-200:]}"}
    return result
