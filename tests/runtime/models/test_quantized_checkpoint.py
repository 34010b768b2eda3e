"""Quantized checkpoints mean the numbers that their formats say, and models answer as models of these numbers."""

import json
from functools import partial

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from safetensors.torch import load_file, save_file

from slipway_runtime.kernels.reference_experts import mxfp4_numbers
from slipway_runtime.layers.matmul import Dense, MatmulMakers
from slipway_runtime.layers.matmul_cpu import NativeInt8
from slipway_runtime.layers.matmul_quantized import DynamicInt8, Int4, ScaledFp8, WeightOnly
from slipway_runtime.layers.quantized_weight import QuantizedWeight, concatenated
from slipway_runtime.models.checkpoint import Checkpoint
from slipway_runtime.models.config import ModelRefusedError, parse_config
from slipway_runtime.models.quantize import choose_dtype, matmul_maker
from slipway_runtime.models.quantized_checkpoint import WeightReader, parse_quantization
from tests.runtime import quantized_checkpoints as writers
from tests.runtime.checkpoints import a_checkpoint
from tests.runtime.models.logits import CPU, Bench, assert_close, oracle, some_tokens
from tests.runtime.models.test_published import published

SIZES = {"hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2}


def compressed(form: str, **weights: object) -> dict:
    inputs = weights.pop("inputs", None)
    group = {"weights": {"symmetric": True, **weights}, "input_activations": inputs, "targets": ["Linear"]}
    return {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"], "config_groups": {"g": group}}


DYNAMIC = {"dynamic": True, "strategy": "token", "num_bits": 8, "type": "int"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
FORMATS = {
    "fp8, one scale": (writers.fp8_tensor, {"quant_method": "fp8", "activation_scheme": "static"}),
    "fp8, a scale per row": (writers.fp8_rows, compressed("float-quantized", type="float", num_bits=8, inputs=DYNAMIC)),
    "fp8, blocks": (writers.fp8_blocks, {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}),
    "int8, W8A8": (writers.int8_rows, compressed("int-quantized", type="int", num_bits=8, inputs=DYNAMIC)),
    "int8, W8A16": (writers.int8_rows, compressed("int-quantized", type="int", num_bits=8)),
    "int4, pack-quantized": (
        writers.pack_quantized, compressed("pack-quantized", type="int", num_bits=4, group_size=32, strategy="group")),
    "int4, pack-quantized, zeros": (
        partial(writers.pack_quantized, symmetric=False),
        compressed("pack-quantized", type="int", num_bits=4, group_size=32, symmetric=False)),
    "int4, pack-quantized, in the order of activations": (
        partial(writers.pack_quantized, permuted=True),
        compressed("pack-quantized", type="int", num_bits=4, group_size=32, actorder="group")),
    "gptq": (writers.gptq, GPTQ),
    "gptq, in the order of activations": (partial(writers.gptq, permuted=True), {**GPTQ, "desc_act": True}),
    "gptq of 8 bits": (partial(writers.gptq, bits=8), {**GPTQ, "bits": 8}),
    "awq": (writers.awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}),
}  # fmt: skip


def a_quantized_checkpoint(path, write, said, family="llama", sizes=(), **kept):
    """Write one; the `transformers` model of the numbers that its codes stand for."""
    model = a_checkpoint(path, family, **SIZES | dict(sizes))
    state = {name: tensor.clone() for name, tensor in load_file(path / "model.safetensors").items()}
    stored, meant = writers.quantize_state(state, write, **kept)
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(raw | {"quantization_config": said}))
    model.load_state_dict(meant, strict=False)
    return model


@pytest.mark.capability("QZ-4")
@pytest.mark.parametrize("name", FORMATS)
def test_a_quantized_checkpoint_answers_as_the_numbers_that_its_codes_stand_for(name, tmp_path):
    torch.manual_seed(5)
    model = a_quantized_checkpoint(tmp_path, *FORMATS[name])
    tokens = some_tokens(30, seed=1)
    theirs = oracle(model, tokens)
    (exact,) = Bench(tmp_path).step((0, tokens, 0, 30))
    assert_close(exact, theirs)
    # In the format that this machine multiplies: rows of x are rounded to bytes or to bfloat16.
    bench = Bench(tmp_path, makers=MatmulMakers(matmul_maker("none", deterministic=False, device=CPU)))
    (kept,) = bench.step((0, tokens, 0, 30))
    loss = 0.08 if name == "int8, W8A8" else 0.04
    assert (kept - theirs).abs().mean() < loss * theirs.abs().mean()
    (decode,) = bench.step((0, tokens, 29, 30))
    assert (decode - theirs[29:]).abs().mean() < loss * theirs[29:].abs().mean()


@pytest.mark.capability("QZ-4")
def test_codes_stay_codes_where_the_machine_multiplies_them(tmp_path):
    kept = {
        "int8, W8A8": (NativeInt8, DynamicInt8),
        "int4, pack-quantized": (Int4,),
        "gptq, in the order of activations": (Int4,),
        "awq": (Int4,),
    }
    if not DynamicInt8.works_here():  # it multiplies no bytes: their codes become numbers
        del kept["int8, W8A8"]
    for name, kinds in kept.items():
        a_quantized_checkpoint(tmp_path / name, *FORMATS[name])
        bench = Bench(tmp_path / name, makers=MatmulMakers(matmul_maker("none", deterministic=False, device=CPU)))
        for layer in bench.decoder.layers:
            assert all(isinstance(linear.matmul, kinds) for linear in layer.linears[:3]), name
            # 4096 × 4096 takes 8.5 MB in groups of 128, and 67 MB in float32
            down = layer.mlp.down
            assert down.nbytes < (0.4 if kinds != (Int4,) else 0.2) * 4 * down.in_features * down.out_features
        assert isinstance(bench.decoder._head.matmul, Dense), "lm_head is as it was published"


@pytest.mark.capability("QZ-4")
def test_what_was_left_in_high_precision_stays_so(tmp_path):
    """Some publishers leave o_proj: the file decides for each matrix."""
    model = a_quantized_checkpoint(tmp_path, *FORMATS["awq"], keep=("lm_head", "o_proj"))
    bench = Bench(tmp_path)
    own = load_file(tmp_path / "model.safetensors")["model.layers.0.self_attn.o_proj.weight"]
    assert torch.equal(bench.decoder.layers[0].attention.out.matmul.weight, own)
    tokens = some_tokens(20, seed=1)
    assert_close(bench.step((0, tokens, 0, 20))[0], oracle(model, tokens))


@pytest.mark.capability("QZ-4")
@pytest.mark.parametrize("name", ["fp8, blocks", "gptq", "awq"])
def test_families_with_biases_and_merged_projections_may_be_quantized(name, tmp_path):
    for family in ("qwen2", "phi3"):
        path = tmp_path / family
        model = a_quantized_checkpoint(path, *FORMATS[name], family=family)
        tokens = some_tokens(20, seed=1)
        assert_close(Bench(path).step((0, tokens, 0, 20))[0], oracle(model, tokens))


@pytest.mark.capability("QZ-4")
def test_determinism_holds_on_kept_codes(tmp_path):
    a_quantized_checkpoint(tmp_path, *FORMATS["awq"])
    make = matmul_maker("none", deterministic=True, device=CPU)
    bench = Bench(tmp_path, makers=MatmulMakers(make, make))
    tokens = some_tokens(20, seed=1)
    (whole,) = bench.step((0, tokens, 0, 20))
    bench.step((1, tokens, 0, 13))
    (rest,) = bench.step((1, tokens, 13, 20))
    (single,) = bench.step((1, tokens, 19, 20))
    assert torch.equal(rest, whole[13:])
    assert torch.equal(single, whole[19:])


@pytest.mark.capability("QZ-4")
def test_mxfp4_blocks_are_signs_exponents_and_fractions_times_powers_of_two():
    """E2M1: 1 sign, 2 exponent, 1 fraction bits with bias 1; the scale's exponent has bias 127 (OCP MX, 2023)."""
    blocks = torch.arange(256, dtype=torch.uint8).view(2, 8, 16)
    scales = torch.tensor([120, 121, 126, 127, 128, 129, 130, 140], dtype=torch.uint8).expand(2, 8)
    numbers = mxfp4_numbers(blocks, scales, torch.float32)
    assert numbers.shape == (2, 256)

    def number(code: int) -> float:
        sign, exponent, fraction = code >> 3, code >> 1 & 3, code & 1
        size = fraction / 2 if exponent == 0 else (1 + fraction / 2) * 2 ** (exponent - 1)
        return -size if sign else size

    for row in range(2):
        for column in range(256):
            byte = int(blocks[row, column // 32, column % 32 // 2])
            code = byte >> 4 if column % 2 else byte & 15
            assert numbers[row, column] == number(code) * 2.0 ** (int(scales[row, column // 32]) - 127)


@pytest.mark.capability("API-21", "QZ-4")
def test_gpt_oss_in_mxfp4_answers_as_the_numbers_that_its_codes_stand_for(tmp_path):
    torch.manual_seed(2)
    shape = {
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 16,
    }
    model = a_checkpoint(tmp_path, "gpt_oss", **shape)
    state = {name: tensor.clone() for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    meant = {}
    for name in [name for name in state if name.endswith("_proj") and "experts" in name]:
        turned = state.pop(name).transpose(1, 2)  # (E, out, in)
        blocks = torch.randint(0, 256, (*turned.shape[:2], turned.shape[2] // 32, 16), dtype=torch.uint8)
        scales = torch.randint(123, 126, blocks.shape[:3], dtype=torch.uint8)
        state |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        meant[name] = mxfp4_numbers(blocks, scales, torch.float32).transpose(1, 2).contiguous()
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["quantization_config"] = published("gpt-oss-20b")["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert not model.load_state_dict(meant, strict=False).unexpected_keys
    tokens = some_tokens(30, seed=1)
    assert_close(Bench(tmp_path).step((0, tokens, 0, 30))[0], oracle(model, tokens))


@pytest.mark.capability("QZ-4")
@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method is 'bitsandbytes'; fp8, compressed-t"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq of the version 'gemv'; only 'gemm'"),
        ({"quant_method": "gptq", "bits": 3}, "gptq with 3 bits is not supported"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "float8 of the format 'e5m2'"),
        (
            compressed("nvfp4-pack-quantized", type="float", num_bits=4),
            "format 'nvfp4-pack-quantized' with float of 4 bits",
        ),
        (compressed("int-quantized", type="int", num_bits="8"), "num_bits is '8'; a whole number"),
        ({"quant_method": "compressed-tensors"}, "has no config_groups"),
    ],
)
def test_a_format_that_is_not_known_is_refused_in_a_sentence(said, sentence):
    config = parse_config(published("llama-3.2-1b") | {"quantization_config": said})
    with pytest.raises(ModelRefusedError, match=sentence):
        parse_quantization(config.quantization)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"qzeros": torch.zeros(2, 7, dtype=torch.int32)}, "scales of .* and zeros of"),
        ({"qweight": torch.zeros(8, 60, dtype=torch.int32)}, "qweight holds a matrix of .60, 64.; config.json says"),
        ({"qweight": torch.zeros(8, 64)}, "packed codes of torch.float32"),
        ({"g_idx": torch.zeros(64, dtype=torch.int32)}, "groups of other sizes than 32"),
    ],
)
def test_codes_that_do_not_fit_together_are_refused(change, sentence, tmp_path):
    tensors, _ = writers.gptq(torch.randn(64, 64))
    save_file({f"m.{key}": value for key, value in (tensors | change).items()}, tmp_path / "model.safetensors")
    form = parse_quantization(GPTQ)
    with pytest.raises(ModelRefusedError, match=sentence), Checkpoint(tmp_path, torch.float32, CPU) as checkpoint:
        WeightReader(checkpoint, form, torch.float32).matrix("m", 64, 64)


def test_matrices_of_different_orders_are_merged_as_numbers():
    torch.manual_seed(0)
    one = QuantizedWeight(torch.randint(0, 16, (4, 8), dtype=torch.uint8), torch.rand(4, 2), 4, torch.float32, bits=4)
    other = QuantizedWeight(one.codes, one.scales, 4, torch.float32, order=torch.arange(7, -1, -1), bits=4)
    both = concatenated([one, other])
    assert isinstance(both, torch.Tensor)
    assert torch.equal(both, torch.cat([one.dequantized(), one.dequantized().flip(1)]))
    assert isinstance(concatenated([one, one]), QuantizedWeight)


@pytest.mark.capability("QZ-4")
def test_four_bits_compute_in_the_type_that_their_kernel_has():
    """Published in float16; as numbers they would take four times the memory."""
    gpu = torch.device("cuda")
    assert choose_dtype("auto", parse_config(published("qwen2.5-7b-instruct-awq")), gpu) == torch.bfloat16
    assert choose_dtype("auto", parse_config(published("qwen2.5-7b-instruct-gptq-int4")), gpu) == torch.bfloat16
    assert choose_dtype("fp16", parse_config(published("qwen2.5-7b-instruct-awq")), gpu) == torch.float16


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn])
def test_kept_rows_multiply_as_their_numbers(kind):
    torch.manual_seed(0)
    codes = torch.randint(-100, 100, (32, 48)).to(kind)
    weight = QuantizedWeight(codes, torch.rand(32, 1), 48, torch.float32)
    x = torch.randn(5, 48)
    kept = WeightOnly(weight.as_one_scale_rows(), kind)
    torch.testing.assert_close(kept(x), F.linear(x, weight.dequantized()), atol=1e-3, rtol=1e-4)
    assert not ScaledFp8.fits(weight.as_one_scale_rows()), "a CPU has no product of float8"
