"""The driver of our own engine, through the interface of `waves`: `python -m bench.peers.with_slipway`."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import slipway_api
from bench.peers.waves import Wave, main
from slipway_runtime.engine.build import build_engine
from slipway_runtime.messages import Request, SamplingParams


def open_engine(task: dict[str, Any]) -> Wave:
    """Build the engine as `slipway-runtime serve` would."""
    torch.set_num_threads(task["threads"])
    length = task["prompt_tokens"] + task["max_tokens"] + 16
    options = {"quantization": task["weights"]} if task["weights"] != "none" else {}
    engine = build_engine(
        Path(task["checkpoint"]),
        dtype=task.get("dtype", "auto"),
        max_model_len=length,
        max_num_seqs=max(task["concurrency"], 4),
        max_num_batched_tokens=512 + task["concurrency"],
        kv_cache_bytes=2 << 30,
        **options,
    )
    task["settings"] = f"slipway {slipway_api.__version__}, torch {torch.__version__}, weights {engine.facts.dtype}"
    serial = 0

    def wave(prompts: Sequence[list[int]], max_tokens: int, tick: Callable[[int], None]) -> None:
        nonlocal serial
        serial += 1
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        for index, prompt in enumerate(prompts):
            engine.add(
                Request(id=f"{serial}/{index}", prompt_token_ids=tuple(prompt), params=params, arrived=0.0),
                time.monotonic(),
            )
        while engine.has_work:
            for output in engine.step(time.monotonic()).outputs:
                for _ in output.token_ids:
                    tick(int(output.request_id.partition("/")[2]))

    return wave


if __name__ == "__main__":
    main(open_engine)
