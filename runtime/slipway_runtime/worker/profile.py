"""Profile step: the activation memory of the widest step, found before the KV cache is sized from the rest."""

import numpy as np
import torch

from slipway_api.memory import Needs, activation_bytes
from slipway_runtime.kernels.dispatch import Kernels
from slipway_runtime.layers.step import StepContext
from slipway_runtime.models.config import DoesNotFitError, ModelConfig
from slipway_runtime.models.decoder import Decoder
from slipway_runtime.models.quantize import DTYPE_NAMES
from slipway_runtime.worker.kv_cache import CacheSize, allocate_cache


def widest_step_bytes(
    decoder: Decoder,
    config: ModelConfig,
    kernels: Kernels,
    *,
    tokens: int,
    rows: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> int:
    """Activation bytes of a step of `tokens` tokens with `rows` samples: measured on a GPU, computed on a CPU.

    rows: those that verify drafts are samples, too. OOM raises torch's error.
    """
    if device.type != "cuda":
        needs = Needs(dtype=DTYPE_NAMES[dtype], max_model_len=tokens, max_num_seqs=rows, max_num_batched_tokens=tokens)
        return activation_bytes(config.shape, needs)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    dummy_step(decoder, config, kernels, tokens=tokens, rows=rows, block_size=block_size, dtype=dtype, device=device)
    torch.cuda.synchronize(device)
    widest = torch.cuda.max_memory_allocated(device) - before
    # The allocator keeps what the step has freed, and the driver counts it as used: it would be counted twice.
    torch.cuda.empty_cache()
    return widest


def dummy_step(
    decoder: Decoder,
    config: ModelConfig,
    kernels: Kernels,
    *,
    tokens: int,
    rows: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Compute `tokens` tokens of short prompts that all lie in one block, and the logits of `rows` of them."""
    num_new = np.full(-(-tokens // block_size), block_size, dtype=np.int64)
    num_new[-1] = tokens - block_size * (len(num_new) - 1)
    num_new = num_new[np.argsort(num_new != 1, kind="stable")]  # a row of one token comes first
    places = np.concatenate([np.arange(count) for count in num_new])
    caches = allocate_cache(config, CacheSize(1, block_size, 0), dtype, device)
    with torch.inference_mode():
        cos, sin = decoder.rotary(torch.from_numpy(places).to(device))
        plan = kernels.plan_attention(
            np.zeros_like(num_new), num_new, np.ones((len(num_new), 1), dtype=np.int64), block_size, like=cos
        )
        slots = torch.from_numpy(block_size + places).to(device)
        token_ids = torch.zeros(tokens, dtype=torch.int32, device=device)
        hidden = decoder(token_ids, caches, StepContext(cos, sin, slots, plan))
        if decoder.scores_tokens:
            decoder.logits(hidden[:rows]).softmax(-1)  # sampling needs a copy of the logits


def check_remainder(asked: int, activations: int, free: int) -> None:
    """Raise DoesNotFitError if the KV cache and a step exceed the memory that is free beside weights and adapters."""
    if asked + activations > free:
        raise DoesNotFitError(
            f"a KV cache of {asked} bytes and {activations} for the widest step exceed the {free} that weights and "
            "adapters leave: ask for a smaller KV cache, or lower maxNumBatchedTokens or maxNumSeqs"
        )
