"""What a block holds survives the way to host memory and back, bit for bit, whatever its format."""

import pytest
import torch

from slipway_runtime.kernels import kv_pages
from slipway_runtime.messages import Demote, FreeHostMemory, Promote
from slipway_runtime.models.config import ModelConfig
from slipway_runtime.worker.host_arena import HostArena
from slipway_runtime.worker.kv_cache import CacheSize, allocate_cache
from tests.runtime.checkpoints import a_checkpoint

LAYERS, HEADS, HEAD_DIM, PAGE, BLOCKS = 3, 2, 8, 4, 5
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> ModelConfig:
    from slipway_runtime.models.config import read_config

    path = tmp_path_factory.mktemp("model")
    shape = {"num_hidden_layers": LAYERS, "num_key_value_heads": HEADS, "num_attention_heads": 4, "head_dim": HEAD_DIM}
    a_checkpoint(path, **shape)
    return read_config(path)


def caches_of(config: ModelConfig, dtype: torch.dtype) -> list[torch.Tensor]:
    """Every byte is another one."""
    caches = allocate_cache(config, CacheSize(BLOCKS, PAGE, 0), dtype, CPU)
    torch.manual_seed(0)
    for cache in caches:
        cache.view(torch.uint8).random_()
    return caches


def bytes_of(caches: list[torch.Tensor], block: int) -> bytes:
    return b"".join(cache[block].contiguous().view(torch.uint8).numpy().tobytes() for cache in caches)


def arena_for(caches: list[torch.Tensor], **options: int) -> HostArena:
    return HostArena(5, sum(cache[0].nbytes for cache in caches), len(caches), CPU, **options)


@pytest.mark.capability("KV-12", "KV-11")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_a_block_of_every_layer_comes_back_as_it_was_into_another_place(config, dtype):
    caches = caches_of(config, dtype)
    arena = arena_for(caches)
    before = [bytes_of(caches, block) for block in range(BLOCKS + 1)]

    arena.make([Demote(2, 1), Demote(5, 2)], caches)
    for cache in caches:
        cache[2] = cache[5] = cache[0]
    arena.make([Promote(2, 1), Promote(1, 5)], caches)

    after = [bytes_of(caches, block) for block in range(BLOCKS + 1)]
    assert after == [before[0], before[5], before[0], before[3], before[4], before[2]]
    assert kv_pages.is_quantized(dtype) == (dtype in kv_pages.KV_DTYPES.values())


@pytest.mark.capability("KV-12")
def test_moves_are_made_in_their_order(config):
    caches = caches_of(config, torch.float32)
    arena = arena_for(caches)
    first, second = bytes_of(caches, 1), bytes_of(caches, 2)

    arena.make([Demote(1, 1), Promote(1, 3), Demote(2, 1), Promote(1, 1), Promote(1, 4)], caches)

    assert [bytes_of(caches, block) for block in (1, 2, 3, 4)] == [second, second, first, second]


@pytest.mark.capability("KV-12")
def test_memory_comes_in_segments_as_it_is_needed_and_goes_all_at_once(config):
    caches = caches_of(config, torch.float32)
    block = sum(cache[0].nbytes for cache in caches)
    arena = arena_for(caches, segment_bytes=2 * block + block // 2)
    arena.reserve(3)
    assert arena.nbytes == 4 * block

    moved = {block: bytes_of(caches, block) for block in range(1, BLOCKS + 1)}
    arena.make([Demote(block, block) for block in moved], caches)
    assert arena.nbytes == 5 * block, "never more than there are slots"
    for cache in caches:
        cache.zero_()
    arena.make([Promote(block, block) for block in moved], caches)
    assert {block: bytes_of(caches, block) for block in moved} == moved

    arena.make([FreeHostMemory()], caches)
    assert arena.nbytes == 0
    arena.make([Demote(3, 1), Promote(1, 5)], caches)
    assert bytes_of(caches, 5) == moved[3]


def test_a_block_larger_than_a_segment_has_one_of_its_own(config):
    caches = caches_of(config, torch.float32)
    arena = arena_for(caches, segment_bytes=1)
    arena.make([Demote(1, 2), Promote(2, 4)], caches)
    assert bytes_of(caches, 4) == bytes_of(caches, 1)
