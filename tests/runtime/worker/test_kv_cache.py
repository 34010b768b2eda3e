"""The arena: as large as the budget pays for, never larger than the machine allows."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from slipway_runtime.cgroups import ContainerLimits
from slipway_runtime.models.config import ModelRefusedError, parse_config
from slipway_runtime.worker.kv_cache import (
    CacheSize,
    allocate_cache,
    available_memory_bytes,
    copy_blocks,
    copy_blocks_at_once,
    size_cache,
)
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
@pytest.mark.parametrize(("left", "available"), [(None, 8_192_000), (2000, 2000), (0, 0), (10_000_000, 8_192_000)])
def test_a_containers_limit_counts_before_the_machines_memory(left, available, tmp_path):
    (tmp_path / "meminfo").write_text(MEMINFO)
    assert available_memory_bytes(ContainerLimits(memory_left=left), tmp_path / "meminfo") == available


def test_a_new_cache_holds_zeros_so_that_padding_is_harmless():
    caches = allocate_cache(CONFIG, CacheSize(3, 16, 256), torch.float32, torch.device("cpu"))
    assert len(caches) == 2
    assert all(cache.shape == (4, 2, 2, 16, 8) and not cache.any() for cache in caches)


class Written(TorchDispatchMode):
    """Operators that compute or copy: on a GPU each is a launch."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        self.names += [name] if name in ("copy_", "clone", "index_copy_", "index_select", "index", "index_put_") else []
        return func(*args, **(kwargs or {}))


COPIES = {
    "answers to one prompt": [(3, target) for target in range(10, 40)],
    "several prompts": [(3, 10), (4, 11), (3, 12), (5, 13), (4, 14)],
    "a copy of a copy": [(3, 10), (10, 11), (4, 10), (11, 12)],
    "a block that is overwritten": [(3, 10), (4, 3), (3, 11), (5, 11)],
    "none": [],
}


@pytest.mark.capability("KV-2")
@pytest.mark.parametrize("name", COPIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("copy", [copy_blocks, copy_blocks_at_once])
def test_blocks_are_copied_as_one_after_the_other_would_be(name, dtype, together, copy):
    caches = allocate_cache(CONFIG, CacheSize(40, 16, 0), dtype, torch.device("cpu"))
    caches = caches if together else [cache.clone() for cache in caches]
    generator = torch.Generator().manual_seed(0)
    for cache in caches:
        numbers = torch.randint(0, 120, cache.view(torch.uint8).shape, generator=generator, dtype=torch.uint8)
        cache.view(torch.uint8).copy_(numbers)
    expected = [cache.view(torch.uint8).clone() for cache in caches]
    for source, target in COPIES[name]:
        for cache in expected:
            cache[target] = cache[source]
    copy(caches, COPIES[name])
    assert all(torch.equal(a.view(torch.uint8), b) for a, b in zip(caches, expected, strict=True))


@pytest.mark.capability("KV-2")
def test_copies_for_many_answers_are_two_launches_for_all_layers():
    """128 answers of a model of 32 layers were some 4,000 launches."""
    caches = allocate_cache(CONFIG, CacheSize(40, 16, 0), torch.bfloat16, torch.device("cpu"))
    with Written() as launched:
        copy_blocks_at_once(caches, COPIES["answers to one prompt"])
    assert launched.names == ["clone", "index_copy_"]
    with Written() as launched:
        copy_blocks_at_once([cache.clone() for cache in caches], COPIES["several prompts"])
    assert launched.names.count("index_copy_") == 2 * 3, "for each layer and source"
    with Written() as launched:
        copy_blocks(caches, COPIES["several prompts"])
    assert launched.names == ["copy_"] * 5, "on a CPU, where a call costs little and a copy by index much"
