"""The engine: schedule, execute, update. Built once from a checkpoint, then stepped by a thread."""

from pathlib import Path

from slipway_runtime.engine.thread import Engine


def build_engine(
    model_path: Path,
    *,
    dtype: str = "auto",
    max_model_len: int | None = None,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    block_size: int = 16,
    kv_cache_bytes: int | None = None,
    gpu_memory_utilization: float = 0.85,
    extra_eos_token_ids: tuple[int, ...] = (),
    device: str = "auto",
) -> Engine:
    """Load a checkpoint, size its KV cache and warm it up: seconds to minutes, and ready when it returns.

    dtype: auto, bf16, fp16 or fp32. None means: chosen for this model and machine. Raises ModelRefused (a sentence
    for the user) for a checkpoint or settings that this engine cannot honour. The facts hold the timings.
    """
    raise NotImplementedError
