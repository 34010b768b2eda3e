"""Latent attention (MLA): the cache of one plane, quantized caches, and settings that are refused in a sentence."""

import pytest
import torch

from slipway_runtime.engine.build import build_engine
from slipway_runtime.kernels import cpu as compiled
from slipway_runtime.kernels import native, reference
from slipway_runtime.kernels.dispatch import kernels_for, refusal_of_latents
from slipway_runtime.models.config import ModelRefusedError, read_config
from tests.runtime.checkpoints import OTHER_FAMILIES, a_checkpoint
from tests.runtime.machine import CPU, Machine, Stretch
from tests.runtime.models.logits import oracle, some_tokens

pytestmark = pytest.mark.capability("API-28")


@pytest.fixture
def model(tmp_path):
    kind, shape = OTHER_FAMILIES["deepseek_v3"]
    return a_checkpoint(tmp_path, kind, **shape)


def test_the_cache_has_one_vector_for_each_token(model, tmp_path):
    machine = Machine(tmp_path, rows=1, block=16)
    assert machine.caches[0].shape[1:] == (1, 1, 16, 20 + 8)
    config = read_config(tmp_path)
    each = machine.caches[0].nbytes * config.num_layers / (machine.caches[0].shape[0] * 16)
    assert each == config.shape.kv_bytes_per_token("fp32"), "the planner counts what is allocated"


@pytest.mark.parametrize(("kv_dtype", "close"), [("int8", 0.08), ("fp8", 0.18)])
def test_a_quantized_cache_of_latents_stays_close(kv_dtype, close, model, tmp_path):
    tokens = some_tokens(40, seed=1)
    machine = Machine(tmp_path, rows=1, kv_dtype=kv_dtype)
    first = machine.logits(Stretch(0, tokens, 0, 25))[0]
    last = machine.logits(Stretch(0, tokens, 25, 40))[0]
    ours, theirs = torch.cat((first, last)), oracle(model, tokens)
    error = float((ours - theirs).pow(2).mean() / theirs.pow(2).mean()) ** 0.5
    assert 0 < error < close


def test_two_ranks_store_the_same_latents_and_half_of_the_heads(model, tmp_path):
    own = read_config(tmp_path)
    from slipway_runtime.models.sharding import part_of

    part = part_of(own, 2)
    assert (part.num_q_heads, part.num_kv_heads, part.kv_planes, part.head_dim) == (2, 1, 1, own.head_dim)


def test_kernels_that_read_two_planes_are_not_chosen_and_refuse_a_cache_of_one():
    assert kernels_for(CPU, torch.float32, latent=True) is reference
    if native.library() is None:
        pytest.skip("there are no compiled kernels here")
    with pytest.raises(AssertionError, match="a cache of latents"):
        compiled.paged_attention(torch.zeros(1, 1, 8), torch.zeros(1, 1, 1, 8), torch.zeros(2, 1, 1, 4, 8), None, 1.0)


def test_a_gpu_is_refused_in_a_sentence():
    assert refusal_of_latents(torch.device("cuda", 0), deterministic=False) == (
        "multi-head latent attention runs on CPUs only: the GPU kernels do not read its cache; set device to cpu"
    )
    assert not refusal_of_latents(CPU, deterministic=False)


def test_a_fixed_order_of_sums_and_adapters_are_refused_in_a_sentence(model, tmp_path):
    with pytest.raises(ModelRefusedError, match="no kernel with a fixed order of sums: set deterministic to false"):
        build_engine(tmp_path, kv_cache_bytes=4 << 20, deterministic=True)
    with pytest.raises(ModelRefusedError, match="adapters for deepseek_v3 models are not supported"):
        build_engine(tmp_path, kv_cache_bytes=4 << 20, max_adapters=2)
