"""Rounded weights and rounded keys and values: smaller by what is promised, and off by no more than is stated."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from tokenizers import Tokenizer

from slipway_runtime.kernels import kv_pages, native
from slipway_runtime.layers import matmul
from slipway_runtime.layers.matmul import SMALL_TILES, Dense, RowsDifferError, Tiled
from slipway_runtime.layers.matmul_cpu import MklPacked, NativeBf16, NativePacked, OneDnnPacked, prepacked
from slipway_runtime.layers.matmul_quantized import DynamicInt8, WeightOnly
from slipway_runtime.models.config import ModelRefusedError, parse_config
from slipway_runtime.models.quantize import (
    activation_dtype,
    choose_dtype,
    choose_kv_dtype,
    matmul_maker,
    name_of_format,
    quantization_warnings,
)
from slipway_runtime.worker.kv_cache import size_cache
from tests.runtime.machine import CPU, TINY, Machine, Stretch
from tests.runtime.models.test_config import LLAMA
from tests.runtime.models.test_published import published

ROWS = (1, 2, 4, 8, 16, 17, 32, 128)
SHAPES = [(96, 48), (97, 33), (8, 4)]  # (out, in)


def a_matrix(out_size: int, in_size: int) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(out_size, in_size) * torch.rand(out_size, 1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.skipif(not torch._C.has_mkl, reason="torch was built without MKL")
def test_packed_weights_multiply_as_plain_ones(shape, torch_alone):
    weight = a_matrix(*shape)
    packed = prepacked(weight)
    assert isinstance(packed, MklPacked)
    assert packed.nbytes == weight.nbytes
    for rows in ROWS:
        x = torch.randn(rows, shape[1])
        torch.testing.assert_close(packed(x), F.linear(x, weight), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="oneDNN packs bfloat16 on processors with AVX-512")
def test_packed_bfloat16_multiplies_as_plain_one(shape):
    weight = a_matrix(*shape).bfloat16()
    packed = OneDnnPacked(weight)
    for rows in ROWS:
        x = torch.randn(rows, shape[1]).bfloat16()
        torch.testing.assert_close(packed(x), F.linear(x, weight), atol=0.05, rtol=0.02)


@pytest.mark.capability("QZ-1")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "step"), [(torch.int8, 0.5 / 127), (torch.float8_e4m3fn, 2.0**-4)])
def test_a_rounded_weight_is_off_by_half_a_step_of_its_row(shape, dtype, step):
    weight = a_matrix(*shape)
    rounded = WeightOnly(weight, dtype)
    back = rounded.codes.float() * rounded.scales[:, None]
    largest = weight.abs().amax(1, keepdim=True) if dtype == torch.int8 else weight.abs()
    assert bool(((back - weight).abs() <= largest * step * 1.001 + 1e-4).all())
    x = torch.randn(5, shape[1])
    torch.testing.assert_close(rounded(x), F.linear(x, back), atol=1e-4, rtol=1e-4)
    assert rounded.nbytes == weight.numel() + 4 * shape[0]


@pytest.mark.capability("QZ-1")
@pytest.mark.parametrize("shape", SHAPES)
def test_bytes_times_bytes_equals_its_definition_and_no_row_changes_another(shape):
    if not DynamicInt8.works_here():
        pytest.skip("this processor does not multiply bytes")
    weight = a_matrix(*shape)
    dynamic, plain = DynamicInt8(weight), WeightOnly(weight, torch.int8)
    for rows in ROWS:
        x = torch.randn(rows, shape[1]) * torch.logspace(-3, 3, rows)[:, None]
        scale = (x.abs().amax(1, keepdim=True) / 127).clamp_min(1e-12)
        codes = (x / scale).round()
        torch.testing.assert_close(dynamic(x) / scale, plain(codes), atol=1e-2, rtol=1e-5)  # sums up to 10⁴
        assert torch.equal(dynamic(x[-1:]), dynamic(x)[-1:])


@pytest.mark.capability("API-19")
def test_a_library_whose_rows_depend_on_their_place_is_refused():
    class Sloppy(Dense):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return super().__call__(x) * torch.linspace(1, 1.0001, len(x))[:, None]

    with pytest.raises(RowsDifferError, match="another result in another place"):
        Tiled(Sloppy(a_matrix(9, 8)), like=torch.zeros(1))
    weight, x = a_matrix(9, 8), torch.randn(SMALL_TILES[0] * 2 + 3, 8)
    torch.testing.assert_close(Tiled(Dense(weight), like=x)(x), F.linear(x, weight), atol=1e-5, rtol=1e-5)


@pytest.mark.capability("API-19")
def test_a_gpu_multiplies_128_rows_at_a_time_where_no_row_changes_another(monkeypatch):
    """Finding 16: 8192 tokens were 512 launches of each matrix. A library that needs small tiles still gets them."""
    assert matmul.TILES["cuda"] == (128, 16)
    monkeypatch.setattr(matmul, "TILES", {"cpu": (128, 16)})
    calls = []

    class Fixed(Dense):
        """Computes each row alone, and notes how many it was given."""

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(len(x))
            return torch.cat([super(Fixed, self).__call__(row[None]) for row in x])

    class SloppyWhenLarge(Fixed):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return super().__call__(x) * (1 if len(x) <= 16 else torch.linspace(1, 1.0001, len(x))[:, None])

    weight, x = a_matrix(9, 8), torch.randn(300, 8)
    tiled = Tiled(Fixed(weight), like=x)
    calls.clear()
    whole = tiled(x)
    assert calls == [128] * 3
    for row in (0, 130, 299):
        assert torch.equal(tiled(x[row : row + 1])[0], whole[row])
    assert Tiled(SloppyWhenLarge(weight), like=x).tile == 16


# --- drift of the embedded model on text of its own kind

LIMITS = {  # mean KL divergence in nats, share of positions with the same likeliest token
    "int8": ({"quantization": "int8"}, 0.003, 0.95),
    "fp8": ({"quantization": "fp8"}, 0.003, 0.95),
    "int8 kv": ({"kv_dtype": "int8"}, 0.0005, 0.98),
    "fp8 kv": ({"kv_dtype": "fp8"}, 0.004, 0.95),
}
TEXTS = (
    "Once upon a time there was a small boat that lived in a quiet harbour. Every morning the boat",
    "The girl looked at the sea and said that she would wait for the wind. Then she",
    "Question: What is the colour of the sky? Answer:",
)


@pytest.fixture(scope="module")
def stories() -> list[list[int]]:
    """Token ids that the exact model wrote itself."""
    tokenizer, machine = Tokenizer.from_file(str(TINY / "tokenizer.json")), Machine(rows=3)
    texts = [tokenizer.encode(text).ids for text in TEXTS]
    for _ in range(60):
        sampled = machine.logits(*(Stretch(row, text, 0, len(text)) for row, text in enumerate(texts)))
        for row, text in enumerate(texts):
            text.append(int(sampled[row][-1].argmax()))
    return texts


def scores(texts: list[list[int]], **settings: str) -> torch.Tensor:
    """In two chunks, so that the second reads what the first left in the cache."""
    machine = Machine(rows=3, **settings)
    first = machine.logits(*(Stretch(row, text, 0, len(text) // 2) for row, text in enumerate(texts)))
    second = machine.logits(*(Stretch(row, text, len(text) // 2, len(text)) for row, text in enumerate(texts)))
    return torch.cat([part[row] for row in range(3) for part in (first, second)]).log_softmax(-1)


@pytest.mark.capability("QZ-1", "KV-11")
@pytest.mark.parametrize("which", LIMITS)
def test_quality_drifts_no_further_than_stated(which, stories):
    settings, most_kl, least_agreement = LIMITS[which]
    exact, rounded = scores(stories), scores(stories, **settings)
    kl = float((exact.exp() * (exact - rounded)).sum(-1).mean())
    agreement = float((exact.argmax(-1) == rounded.argmax(-1)).float().mean())
    print(f"{which}: KL {kl:.5f} nats, {agreement:.1%} agree")
    assert 0 < kl <= most_kl
    assert agreement >= least_agreement


@pytest.mark.capability("QZ-1")
def test_memory_of_the_weights_is_that_of_their_form():
    exact, int8, fp8 = (Machine(quantization=kind, rows=1).decoder for kind in ("none", "int8", "fp8"))
    layers = {d: sum(linear.nbytes for layer in d.layers for linear in layer.linears) for d in (exact, int8, fp8)}
    size = 2 if native.library() is not None else 4  # the checkpoint has bfloat16 numbers
    assert 0.96 * size < layers[exact] / layers[int8] < 1.05 * size  # a scale; and outputs are padded to other numbers
    assert 0 <= layers[int8] / layers[fp8] - 1 < 0.1
    assert int8.nbytes < exact.nbytes - layers[exact] / 2.2  # the embedding stays as it is


@pytest.mark.capability("KV-11")
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_rounded_cache_has_room_for_twice_the_tokens(kind):
    config = parse_config({**LLAMA, "head_dim": 64})
    budget = 1 << 22
    plain = size_cache(config, dtype=torch.bfloat16, block_size=16, budget_bytes=budget)
    rounded = size_cache(config, dtype=kv_pages.KV_DTYPES[kind], block_size=16, budget_bytes=budget)
    assert rounded.bytes_per_token == plain.bytes_per_token * 68 // 128  # 64 codes and a scale, instead of 64 × 2
    assert 1.85 < rounded.num_blocks / plain.num_blocks < 2


@pytest.mark.capability("KV-11")
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_keys_and_values_come_back_within_a_step_of_their_head(kind):
    torch.manual_seed(0)
    dtype, slots = kv_pages.KV_DTYPES[kind], torch.tensor([1, 6, 7, 9, 15])
    cache = torch.zeros(4, 2, 3, *kv_pages.page_shape(4, 8, dtype), dtype=dtype)
    kv = torch.randn(5, 2, 3, 8) * torch.logspace(-4, 4, 5)[:, None, None, None]
    kv_pages.store(kv, cache, slots)
    block, place = slots // 4, slots % 4
    back = (
        kv_pages.codes(cache, 8)[block, :, :, place].float() * kv_pages.scales(cache, 8)[block, :, :, place][..., None]
    )
    largest = kv.abs().amax(-1, keepdim=True) if kind == "int8" else kv.abs() + kv.abs().amax(-1, keepdim=True) / 1e4
    assert bool(((back - kv).abs() <= largest * (0.5 / 127 if kind == "int8" else 2.0**-4) * 1.01).all())
    whole = kv_pages.dequantized(cache, 8, torch.float32)
    assert torch.equal(whole[block, :, :, place], back)
    assert whole.count_nonzero() == back.count_nonzero(), "no other slot was touched"


@pytest.mark.capability("QZ-1")
def test_formats_that_nobody_knows_are_refused():
    with pytest.raises(ModelRefusedError, match="quantization is 'int3'"):
        matmul_maker("int3", deterministic=False, device=CPU)
    with pytest.raises(ModelRefusedError, match="kv_cache_dtype is 'int3'"):
        choose_kv_dtype("int3", torch.float32)


@pytest.mark.parametrize("size", [2048, 16])
def test_auto_is_bfloat16_for_large_models_with_compiled_kernels(size):
    if native.library() is None:
        pytest.skip("there are no compiled kernels here")
    config = parse_config({**LLAMA, "hidden_size": size, "intermediate_size": 4 * size, "vocab_size": 50_000})
    dtype = choose_dtype("auto", config, CPU)
    assert dtype == (torch.bfloat16 if size == 2048 else torch.float32)
    assert activation_dtype(dtype, CPU) == torch.float32
    weight = torch.randn(8, 6)
    made = matmul_maker("none", deterministic=True, device=CPU, dtype=dtype)(weight)
    assert isinstance(made, NativeBf16 if dtype == torch.bfloat16 else NativePacked)


@pytest.mark.parametrize(("computes", "size", "chosen"), [(True, 2048, torch.bfloat16), (True, 16, torch.float32),
                                                          (False, 2048, torch.float32)])  # fmt: skip
@pytest.mark.usefixtures("torch_alone")
def test_without_compiled_kernels_auto_is_bfloat16_where_the_processor_multiplies_it(
    computes, size, chosen, monkeypatch
):
    monkeypatch.setattr("slipway_runtime.models.quantize.computes_bf16", lambda: computes)
    config = parse_config({**LLAMA, "hidden_size": size, "intermediate_size": 4 * size, "vocab_size": 50_000})
    assert choose_dtype("auto", config, CPU) == chosen


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_large_activations_of_a_float16_checkpoint_stay_finite(dtype: torch.dtype):
    """Finding 3: sums of codes were rounded to float16 before their scale; with 4,096 inputs 15 to 70 % were inf."""
    torch.manual_seed(0)
    weight, x = torch.randn(32, 4096).half() * 0.02, torch.randn(4, 4096).half() * 20

    y = WeightOnly(weight, dtype)(x)

    expected = F.linear(x.float(), weight.float())
    assert y.isfinite().all()
    assert (y.float() - expected).abs().max() < 0.1 * expected.abs().max()


@pytest.mark.capability("QZ-4")
@pytest.mark.parametrize(
    ("file", "origin", "asked", "words"),
    [
        ("llama-3.2-1b", "", "int8", None),
        ("llama-3.2-1b", "unsloth/Llama-3.2-1B-bnb-4bit", "none", None),  # rounded once, and that is past
        ("llama-3.2-1b", "unsloth/Llama-3.2-1B-bnb-4bit", "int8", "looks like bitsandbytes NF4, and are quant"),
        ("qwen2.5-7b-instruct-awq", "unsloth/Qwen2.5-7B-bnb-4bit", "none", "looks like bitsandbytes NF4"),
        ("qwen2.5-7b-instruct-awq", "Qwen/Qwen2.5-7B-Instruct-AWQ", "none", None),  # a copy of itself
        ("qwen2.5-7b-instruct-gptq-int4", "Qwen/Qwen2.5-7B-Instruct-AWQ", "none", "looks like AWQ, and are quantized"),
        ("qwen3-8b-fp8", "Qwen/Qwen3-8B", "none", None),
        ("qwen3-8b-fp8", "", "int8", "is quantized (fp8, fp8) and --quantization int8 rounds it again"),
        ("llama-3.1-8b-instruct-w4a16", "", "none", None),
    ],
)  # fmt: skip
def test_a_second_rounding_is_warned_of(file, origin, asked, words):
    config = parse_config(published(file) | {"_name_or_path": origin})
    warnings = quantization_warnings(config, asked)
    assert len(warnings) == (words is not None)
    assert words is None or words in warnings[0]


@pytest.mark.parametrize(
    ("file", "asked", "name"),
    [
        ("llama-3.2-1b", "none", "none"),
        ("llama-3.2-1b", "fp8", "fp8"),
        ("qwen2.5-7b-instruct-awq", "none", "int4"),
        ("llama-3.1-8b-instruct-w8a8", "none", "int8"),
        ("gpt-oss-20b", "none", "mxfp4"),
    ],
)
def test_the_format_of_the_weights_has_a_name(file, asked, name):
    assert name_of_format(parse_config(published(file)), asked) == name
