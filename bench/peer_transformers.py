"""The peer of `bench.runtime`: `transformers.generate` on the same model and prompts, one static batch, JSON on stdout.

    python -m bench.peer_transformers --concurrency 8 --rounds 2 --max-tokens 64

A static batch waits for its slowest member, and no request joins it later: every answer has the same length here, which
is the best case for it.
"""

import argparse
import json
import time
from itertools import pairwise
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, LogitsProcessorList

from bench.prompts import prompts
from bench.servers import EMBEDDED_MODEL


class Stopwatch(LogitsProcessor):
    """Notes when each step has its logits: the first is the TTFT of the whole batch, the rest are gaps."""

    def __init__(self) -> None:
        self.ticks: list[float] = []

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.ticks.append(time.monotonic())
        return scores


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.peer_transformers")
    parser.add_argument("--concurrency", type=int, required=True)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_MODEL, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model: Any = AutoModelForCausalLM.from_pretrained(EMBEDDED_MODEL, dtype=torch.float32)
    model.eval()
    stream = prompts(options.seed)
    _generate(model, tokenizer, [next(stream)], 4)  # warm-up
    stream = prompts(options.seed)
    ttft, gaps, tokens, started = [], [], 0, time.monotonic()
    for _ in range(options.rounds):
        batch = [next(stream) for _ in range(options.concurrency)]
        begun = time.monotonic()
        ticks = _generate(model, tokenizer, batch, options.max_tokens)
        ttft.append(ticks[0] - begun)
        gaps += [after - before for before, after in pairwise(ticks)]
        tokens += len(ticks) * options.concurrency
    seconds = time.monotonic() - started
    print(json.dumps({"ttft": ttft, "gaps": gaps, "tokens_per_second": tokens / seconds}))


def _generate(model: Any, tokenizer: Any, texts: list[str], max_tokens: int) -> list[float]:
    chats = [[{"role": "user", "content": text}] for text in texts]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, return_tensors="pt", padding=True, return_dict=True
    )
    watch = Stopwatch()
    with torch.inference_mode():
        model.generate(
            **inputs,
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
            logits_processor=LogitsProcessorList([watch]),
        )
    return watch.ticks


if __name__ == "__main__":
    main()
