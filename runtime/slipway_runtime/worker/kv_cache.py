"""Size and allocation of the paged KV cache, copies of its blocks, and the memory that is available for it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from slipway_api.memory import SMALLEST_POOL, pool_blocks
from slipway_runtime.cgroups import ContainerLimits, read_limits
from slipway_runtime.kernels import kv_pages
from slipway_runtime.kernels.upload import upload
from slipway_runtime.models.config import DoesNotFitError, ModelConfig
from slipway_runtime.models.quantize import DTYPE_NAMES

CPU_SHARE = 0.25  # of the memory that is left after the weights: a process on a CPU is rarely alone


@dataclass(frozen=True)
class CacheSize:
    """Size of the KV cache in blocks of `block_size` tokens, without the null block."""

    num_blocks: int
    block_size: int
    bytes_per_token: int


def size_cache(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    block_size: int,
    budget_bytes: int,
    useful_tokens: int | None = None,
    draft_bytes_per_token: int = 0,
) -> CacheSize:
    """As many blocks as fit into the budget, but no more than `useful_tokens` need. Too few: DoesNotFitError.

    draft_bytes_per_token: of a draft model, whose KV cache has as many blocks in the same budget.
    """
    bytes_per_token = config.shape.kv_bytes_per_token(DTYPE_NAMES[dtype])
    num_blocks = pool_blocks(budget_bytes, bytes_per_token + draft_bytes_per_token, block_size)
    if useful_tokens is not None:
        num_blocks = min(num_blocks, -(-useful_tokens // block_size))
    if num_blocks < SMALLEST_POOL:
        raise DoesNotFitError(
            f"{budget_bytes} bytes for the KV cache hold {num_blocks} blocks of {block_size} tokens "
            f"at {bytes_per_token + draft_bytes_per_token} bytes a token; at least {SMALLEST_POOL} are needed"
        )
    return CacheSize(num_blocks, block_size, bytes_per_token)


def allocate_cache(config: ModelConfig, size: CacheSize, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Allocate one cache per layer, in the layout of `kv_pages`, all in one storage.

    Zeroed: padding of a batch reads memory that was never written, and 0 × NaN would be NaN.
    """
    page = kv_pages.page_shape(size.block_size, config.head_dim, dtype)
    shape = (config.num_layers, size.num_blocks + 1, config.kv_planes, config.num_kv_heads, *page)
    return list(torch.zeros(shape, dtype=dtype, device=device).unbind(0))


def copy_blocks(caches: list[Tensor], copies: Sequence[tuple[int, int]]) -> None:
    """Copy blocks of all layers, each (source, target) after those before it. caches: of each layer, (blocks, …)."""
    if caches[0].device.type != "cpu":
        copy_blocks_at_once(caches, copies)
        return
    for source, target in copies:
        for whole in _in_one_storage(caches):
            whole[:, target] = whole[:, source]


def copy_blocks_at_once(caches: list[Tensor], copies: Sequence[tuple[int, int]]) -> None:
    """`copy_blocks` for GPUs, with few launches: two for 128 answers to a prompt, whatever the number of layers."""
    for group in _independent(copies):
        targets_of: dict[int, list[int]] = {}
        for source, target in group:
            targets_of.setdefault(source, []).append(target)
        arrays = [np.array(targets, dtype=np.int64) for targets in targets_of.values()]
        on_device = upload(arrays, caches[0].device)
        wholes = _in_one_storage(caches)
        # Sources first: a block may be overwritten after it was read.
        read = [[whole[:, source : source + 1].clone() for source in targets_of] for whole in wholes]
        for whole, blocks in zip(wholes, read, strict=True):
            for block, targets in zip(blocks, on_device, strict=True):
                whole.index_copy_(1, targets, block.expand(-1, len(targets), -1))


def _independent(copies: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """The copies in parts whose order does not matter if all sources are read first: no target occurs twice or is read
    later."""
    group: list[tuple[int, int]] = []
    written: set[int] = set()
    for source, target in copies:
        if source in written or target in written:
            yield group
            group, written = [], set()
        group.append((source, target))
        written.add(target)
    if group:
        yield group


def _in_one_storage(caches: list[Tensor]) -> list[Tensor]:
    """Blocks of all layers as words, (layers, blocks, words): one tensor, or one for each layer's own storage."""
    first = caches[0]
    words = torch.int64 if first[0].nbytes % 8 == 0 else torch.uint8
    step = caches[1].storage_offset() - first.storage_offset() if len(caches) > 1 else first.numel()
    together = step >= first.numel() and all(
        cache.untyped_storage()._cdata == first.untyped_storage()._cdata
        and cache.storage_offset() == first.storage_offset() + index * step
        for index, cache in enumerate(caches)
    )
    if not together:
        return [cache.view(len(cache), -1).view(words)[None] for cache in caches]
    whole = first.as_strided((len(caches), *first.shape), (step, *first.stride()))
    return [whole.view(*whole.shape[:2], -1).view(words)]


def default_budget_bytes(device: torch.device, gpu_memory_utilization: float, activations: int = 0) -> int:
    """Memory for the KV cache if none is configured. Call it after weights and adapters are loaded.

    activations: bytes of the widest step, which are not allocated yet.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(0, int(total * gpu_memory_utilization) - (total - free) - activations)
    return max(0, int((available_memory_bytes() - activations) * CPU_SHARE))


def free_bytes(device: torch.device) -> int:
    """Free memory of the device for this process."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else available_memory_bytes()


def available_memory_bytes(limits: ContainerLimits | None = None, meminfo: Path = Path("/proc/meminfo")) -> int:
    """Host memory that this process may still allocate: MemAvailable, or less if its container's limit leaves less.

    limits: those of the container; None: read them now.
    """
    available = 4 << 30
    if meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        available = int(fields["MemAvailable"].split()[0]) * 1024
    left = (limits or read_limits()).memory_left
    return available if left is None else min(available, left)
