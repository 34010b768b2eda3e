"""`transformers` continuous batching, in our own environment: `python -m bench.peers.with_transformers`."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from bench.peers.waves import Wave, main


def open_engine(task: dict[str, Any]) -> Wave:
    """Load the model and hand out a function that runs one wave through `generate` as one static batch."""
    torch.set_num_threads(task["threads"])
    dtype = torch.float32 if task.get("dtype") == "fp32" else torch.bfloat16
    model: Any = AutoModelForCausalLM.from_pretrained(task["checkpoint"], dtype=dtype).eval()

    def wave(prompts: Sequence[list[int]], max_tokens: int, tick: Callable[[int], None]) -> None:
        def on_step(input_ids: Any, scores: Any) -> Any:
            for index in range(len(prompts)):
                tick(index)
            return scores

        config = GenerationConfig(
            max_new_tokens=max_tokens, min_new_tokens=max_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        ids = torch.tensor(list(prompts))
        with torch.inference_mode():
            model.generate(
                ids, attention_mask=torch.ones_like(ids), generation_config=config, logits_processor=[on_step]
            )

    return wave


if __name__ == "__main__":
    main(open_engine)
