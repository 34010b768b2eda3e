"""The driver of `transformers`' continuous batching, in our environment: `python -m bench.peers.with_transformers`."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig

from bench.peers.waves import Wave, main


def open_engine(task: dict[str, Any]) -> Wave:
    """Load the model and hand out a function that runs one wave through its batching manager."""
    torch.set_num_threads(task["threads"])
    dtype = torch.float32 if task.get("dtype") == "fp32" else torch.bfloat16
    model: Any = AutoModelForCausalLM.from_pretrained(task["checkpoint"], dtype=dtype).eval()
    task["settings"] = f"transformers {transformers.__version__}, torch {torch.__version__}, continuous batching"
    config = GenerationConfig(max_new_tokens=task["max_tokens"], do_sample=False, eos_token_id=-1, pad_token_id=0)
    manager = model.init_continuous_batching(generation_config=config)
    manager.start()

    def wave(prompts: Sequence[list[int]], max_tokens: int, tick: Callable[[int], None]) -> None:
        names: dict[str, int] = {}
        for index, prompt in enumerate(prompts):
            names[manager.add_request(prompt, max_new_tokens=max_tokens, streaming=True, eos_token_id=-1)] = index
        seen = [0] * len(prompts)
        left = len(prompts)
        while left:
            result = manager.get_result(timeout=60)
            assert result is not None, "no token within a minute"
            assert result.error is None, result.error
            index = names[result.request_id]
            for _ in range(len(result.generated_tokens) - seen[index]):
                tick(index)
            seen[index] = len(result.generated_tokens)
            left -= result.is_finished()

    return wave


if __name__ == "__main__":
    main(open_engine)
    # Its thread is not a daemon: what was to be measured is printed, and nothing else is wanted of this process.
    import os

    os._exit(0)
