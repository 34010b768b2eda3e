"""The arena: as large as the budget pays for, never larger than the machine allows."""

import pytest
import torch

from slipway_runtime.models.config import ModelRefusedError, parse_config
from slipway_runtime.worker.kv_cache import CacheSize, allocate_cache, available_memory_bytes, size_cache
from tests.runtime.models.test_config import LLAMA

CONFIG = parse_config(LLAMA)  # 2 layers × 2 heads × 8 values, keys and values: 256 bytes a token in float32
MEMINFO = "MemTotal: 9000 kB\nMemAvailable:    8000 kB\n"


def test_the_budget_pays_for_the_blocks_and_the_null_block():
    size = size_cache(CONFIG, dtype=torch.float32, block_size=16, budget_bytes=11 * 16 * 256)
    assert size == CacheSize(num_blocks=10, block_size=16, bytes_per_token=256)
    assert sum(cache.nbytes for cache in allocate_cache(CONFIG, size, torch.float32, torch.device("cpu"))) == 11 * 4096


def test_no_more_than_could_be_used_is_taken():
    size = size_cache(CONFIG, dtype=torch.float32, block_size=16, budget_bytes=1 << 30, useful_tokens=100)
    assert size.num_blocks == 7


def test_too_small_a_budget_is_refused_with_its_arithmetic():
    with pytest.raises(ModelRefusedError, match="9000 bytes for the KV cache hold 1 blocks of 16 tokens at 256 bytes"):
        size_cache(CONFIG, dtype=torch.float32, block_size=16, budget_bytes=9000)


@pytest.mark.capability("KV-6")
@pytest.mark.parametrize(
    ("limit", "used", "available"), [("max", "5", 8_192_000), ("3000", "1000", 2000), ("1000", "3000", 0)]
)
def test_a_containers_limit_counts_before_the_machines_memory(limit, used, available, tmp_path):
    (tmp_path / "meminfo").write_text(MEMINFO)
    (tmp_path / "memory.max").write_text(limit)
    (tmp_path / "memory.current").write_text(used)
    assert available_memory_bytes(cgroup=tmp_path, meminfo=tmp_path / "meminfo") == available


def test_a_new_cache_holds_zeros_so_that_padding_is_harmless():
    caches = allocate_cache(CONFIG, CacheSize(3, 16, 256), torch.float32, torch.device("cpu"))
    assert len(caches) == 2
    assert all(cache.shape == (4, 2, 2, 16, 8) and not cache.any() for cache in caches)
