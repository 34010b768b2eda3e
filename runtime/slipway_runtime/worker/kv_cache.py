"""Size and allocation of the paged KV cache, and the memory that is available for it."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from slipway_api.memory import SMALLEST_POOL, kv_bytes_per_token, pool_blocks
from slipway_runtime.kernels import kv_pages
from slipway_runtime.models.config import DoesNotFitError, ModelConfig
from slipway_runtime.models.quantize import DTYPE_NAMES

CPU_SHARE = 0.25  # of the memory that is left after the weights: a process on a CPU is rarely alone
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class CacheSize:
    """Size of the KV cache in blocks of `block_size` tokens, without the null block."""

    num_blocks: int
    block_size: int
    bytes_per_token: int


def size_cache(
    config: ModelConfig, *, dtype: torch.dtype, block_size: int, budget_bytes: int, useful_tokens: int | None = None
) -> CacheSize:
    """As many blocks as fit into the budget, but no more than `useful_tokens` need. Too few: DoesNotFitError."""
    bytes_per_token = kv_bytes_per_token(config.num_layers, config.num_kv_heads, config.head_dim, DTYPE_NAMES[dtype])
    num_blocks = pool_blocks(budget_bytes, bytes_per_token, block_size)
    if useful_tokens is not None:
        num_blocks = min(num_blocks, -(-useful_tokens // block_size))
    if num_blocks < SMALLEST_POOL:
        raise DoesNotFitError(
            f"{budget_bytes} bytes for the KV cache hold {num_blocks} blocks of {block_size} tokens "
            f"at {bytes_per_token} bytes a token; at least {SMALLEST_POOL} are needed"
        )
    return CacheSize(num_blocks, block_size, bytes_per_token)


def allocate_cache(config: ModelConfig, size: CacheSize, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Allocate one cache per layer, in the layout of `kv_pages`, all in one storage.

    Zeroed: padding of a batch reads memory that was never written, and 0 × NaN would be NaN.
    """
    page = kv_pages.page_shape(size.block_size, config.head_dim, dtype)
    shape = (config.num_layers, size.num_blocks + 1, 2, config.num_kv_heads, *page)
    return list(torch.zeros(shape, dtype=dtype, device=device).unbind(0))


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


def available_memory_bytes(cgroup: Path = _CGROUP, meminfo: Path = Path("/proc/meminfo")) -> int:
    """Host memory that this process may still allocate: MemAvailable, or less if its cgroup's limit leaves less."""
    available = 4 << 30
    if meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        available = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = cgroup / "memory.max", cgroup / "memory.current"
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        available = min(available, max(0, int(text) - int(used.read_text())))
    return available
