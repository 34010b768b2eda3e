"""The driver of vLLM's CPU build, through its offline engine's `step`. Runs inside its own environment.

As it is by default it compiles its graph, which takes minutes on two cores; the limits are the same for all cases, so
the first case compiles and the others find the result in vLLM's cache. `eager` in the task turns compiling off.
"""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_LOGGING_LEVEL": "ERROR"}

from bench.peers.waves import Wave, main


def open_engine(task: dict[str, Any]) -> Wave:
    """Build the engine in this process."""
    os.environ["OMP_NUM_THREADS"] = str(task["threads"])
    # Its default takes every core that it finds, whatever the number of threads.
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    import torch
    import vllm
    from vllm import SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=task["checkpoint"],
            dtype={"fp32": "float32"}.get(task.get("dtype", ""), "bfloat16"),
            max_model_len=1024,
            max_num_seqs=32,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            enforce_eager=bool(task.get("eager")),
        )
    )
    mode = "eager" if task.get("eager") else "compiled"
    threads = f"{torch.get_num_threads()} torch threads"
    task["settings"] = f"vLLM {vllm.__version__}, torch {torch.__version__}, {mode}, {threads}"
    serial = 0

    def wave(prompts: Sequence[list[int]], max_tokens: int, tick: Callable[[int], None]) -> None:
        nonlocal serial
        serial += 1
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        seen = [0] * len(prompts)
        for index, prompt in enumerate(prompts):
            engine.add_request(f"{serial}/{index}", {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                index = int(output.request_id.partition("/")[2])
                for _ in range(len(output.outputs[0].token_ids) - seen[index]):
                    tick(index)
                seen[index] = len(output.outputs[0].token_ids)

    return wave


if __name__ == "__main__":
    main(open_engine)
