"""Benchmark of our engine against others through their Python APIs, random weights in real shapes, and a lower bound.

    python -m bench.peers.environments       # once: makes the peers' environments
    python -m bench engine

Prefill and decode are reported apart, and batch 1 never stands alone. Peers that are not installed are named as such.
"""

import json
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
# Of weights; arithmetic and KV cache are float32 for fp32, else whatever the engine has for bfloat16.
KINDS = tuple(os.environ.get("SLIPWAY_BENCH_KINDS", "fp32,bf16,int8").split(","))
CLOCK = os.environ.get("SLIPWAY_BENCH_CLOCK", "wall")  # cpu: see `peers.waves`
SECONDS = 900  # the longest that one engine may take over one case
THREADS = int(os.environ.get("SLIPWAY_BENCH_THREADS", "1"))


def measure() -> Section:
    """All cases, engine after engine within each, so that other load affects all of them."""
    if unknown := set(KINDS) - {"fp32", "bf16", "int8"}:
        raise ValueError(f"SLIPWAY_BENCH_KINDS has {', '.join(sorted(unknown))}: fp32, bf16 and int8 are known")
    figures: list[Figure] = []
    floor = {rows: linear_floor_seconds(rows) for rows in (1, 8, 32)}
    for rows, seconds in floor.items():
        figures.append(Figure(f"floor: linears alone, {rows} rows", rows / seconds, "tok/s", "fp32, F.linear"))
    for case in CASES:
        figures += _case(*case, floor)
    title = f"Engine: random weights in the shape of {SHAPE}, {THREADS} thread{'s' if THREADS > 1 else ''}"
    return Section(title, tuple(figures))


def linear_floor_seconds(rows: int, repeats: int = 3) -> float:
    """The time of one step's matrix products alone, in float32 and without anything between them: the best of a few."""
    import time

    torch.set_num_threads(THREADS)
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


def _case(prompt: int, tokens: int, users: int, rounds: int, floor: dict[int, float]) -> Iterator[Figure]:
    at = f"{prompt}/{tokens} at {users}"
    for kind in KINDS:
        ours = _drive("slipway", kind, prompt, tokens, users, rounds)
        decode = float(ours["decode_tokens_per_second"])
        share = decode * floor[users] / users
        yield Figure(f"{at}, {kind}: tok/s", float(ours["tokens_per_second"]), "tok/s", _spread(ours))
        yield Figure(f"{at}, {kind}: prefill", float(ours["prefill_tokens_per_second"]), "tok/s")
        yield Figure(f"{at}, {kind}: decode", decode, "tok/s", f"{share:.2f} of the fp32 linears' floor")
        for name, peer in PEERS.items():
            if kind not in peer.weights:
                continue
            theirs = _drive(name, kind, prompt, tokens, users, rounds)
            if "error" in theirs:
                yield Figure(f"{at}, {kind}: ÷ {name}", float("nan"), "×", str(theirs["error"]))
                continue
            ratio = float(ours["tokens_per_second"]) / float(theirs["tokens_per_second"])
            note = f"{float(theirs['tokens_per_second']):.0f} tok/s; {_spread(theirs)}"
            yield Figure(f"{at}, {kind}: ÷ {name}", ratio, "×", note)


def _spread(result: dict[str, Any]) -> str:
    ttft, gap = Percentiles.of(result["ttft"]), Percentiles.of(result["gaps"])
    return f"TTFT p50 {ttft.p50 * 1e3:.0f} ms, ITL p50 {gap.p50 * 1e3:.1f} ms"


def _drive(name: str, kind: str, prompt: int, tokens: int, users: int, rounds: int) -> dict[str, Any]:
    """One engine over one case, in a process of its own."""
    python = Path(sys.executable) if name == "slipway" else interpreter(name)
    if python is None:
        return {"error": "not installed: python -m bench.peers.environments"}
    driver = "with_slipway.py" if name == "slipway" else PEERS[name].driver
    task = {
        "checkpoint": str(checkpoint(SHAPE)),
        "shape": SHAPE,
        "weights": "int8" if kind == "int8" else "none",
        "dtype": "fp32" if kind == "fp32" else "bf16",
        "threads": THREADS,
        "clock": CLOCK,
        "rounds": rounds,
        "concurrency": users,
        "prompt_tokens": prompt,
        "max_tokens": tokens,
    }
    root = Path(__file__).parent.parent
    extra = {"OMP_NUM_THREADS": str(THREADS), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(root)}
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
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"error": f"took longer than {SECONDS} s"}
    except subprocess.CalledProcessError as error:
        if name == "slipway":
            raise
        return {"error": f"exit status {error.returncode}: {error.stderr.decode(errors='replace').strip()[-200:]}"}
    return result
