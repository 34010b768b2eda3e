"""The driver of OpenVINO GenAI: continuous batching, int8 or fp16 weights. Runs inside its own environment.

The checkpoint is exported once by `optimum-intel`.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.peers.waves import Wave, main


def open_engine(task: dict[str, Any]) -> Wave:
    """Open the exported model."""
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    folder = _exported(Path(task["checkpoint"]), int8=task["weights"] == "int8")
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 2
    scheduler.max_num_seqs = max(task["concurrency"], 4)
    scheduler.max_num_batched_tokens = 512 + task["concurrency"]
    scheduler.enable_prefix_caching = False
    number = "f32" if task.get("dtype") == "fp32" else "bf16"
    kind = "int8 weights" if task["weights"] == "int8" else "fp16 weights"
    task["settings"] = f"OpenVINO GenAI {genai.__version__}, {kind}, computes in {number}"
    pipeline = genai.ContinuousBatchingPipeline(
        str(folder),
        scheduler,
        "CPU",
        {"INFERENCE_NUM_THREADS": task["threads"], "INFERENCE_PRECISION_HINT": number},
    )
    config = genai.GenerationConfig()
    config.do_sample = False
    config.ignore_eos = True
    serial = 0

    def wave(prompts: Sequence[list[int]], max_tokens: int, tick: Callable[[int], None]) -> None:
        nonlocal serial
        config.max_new_tokens = max_tokens
        handles = []
        for index, prompt in enumerate(prompts):
            ids = ov.Tensor(np.array([prompt], dtype=np.int64))
            handles.append((index, pipeline.add_request(serial + index, ids, config)))
        serial += len(prompts)
        while pipeline.has_non_finished_requests():
            pipeline.step()
            for index, handle in handles:
                while handle.can_read():
                    for output in handle.read().values():
                        for _ in output.generated_ids:
                            tick(index)

    return wave


def _exported(checkpoint: Path, *, int8: bool) -> Path:
    folder = checkpoint / ("openvino-int8" if int8 else "openvino-fp16")
    if (folder / "openvino_model.xml").exists() and (folder / "openvino_tokenizer.xml").exists():
        return folder
    import openvino as ov
    from openvino_tokenizers import convert_tokenizer
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig
    from transformers import AutoTokenizer

    quantization = OVWeightQuantizationConfig(bits=8) if int8 else None
    model = OVModelForCausalLM.from_pretrained(checkpoint, export=True, compile=False, quantization_config=quantization)
    model.save_pretrained(folder)
    tokenizer, detokenizer = convert_tokenizer(AutoTokenizer.from_pretrained(checkpoint), with_detokenizer=True)
    ov.save_model(tokenizer, folder / "openvino_tokenizer.xml")
    ov.save_model(detokenizer, folder / "openvino_detokenizer.xml")
    return folder


if __name__ == "__main__":
    main(open_engine)
