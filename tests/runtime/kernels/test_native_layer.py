"""A decoder layer in one call gives the bits that its parts give one by one, and serves the layers that it should."""

from pathlib import Path

import numpy as np
import pytest
import torch

from slipway_runtime.kernels import cpu, native
from slipway_runtime.kernels.native import Native
from slipway_runtime.layers.decoder_layer import DecoderLayer
from tests.runtime.checkpoints import a_checkpoint
from tests.runtime.machine import Machine, Stretch

FAMILIES = [
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("qwen2", {}),
    ("qwen3", {"head_dim": 20}),
    ("mistral", {"sliding_window": 9, "num_key_value_heads": 1}),
]
FORMS = [{}, {"dtype": torch.bfloat16}, {"quantization": "int8"}]


@pytest.fixture
def alone(library: Native, monkeypatch: pytest.MonkeyPatch) -> Native:
    """One of the libraries, as the only one of this machine."""
    monkeypatch.setattr(native, "library", lambda: library)
    monkeypatch.setattr(cpu, "_native", library)
    return library


def counted_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Fills up with a name for each part that Python calls."""
    called: list[str] = []
    for name in ("rms_norm", "rope_and_store", "paged_attention", "swiglu"):
        original = getattr(cpu, name)
        monkeypatch.setattr(
            cpu, name, lambda *given, own=original, named=name, **more: (called.append(named), own(*given, **more))[1]
        )
    return called


def layers_of(machine: Machine) -> list[DecoderLayer]:
    return machine.decoder.layers


@pytest.mark.capability("API-19")
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("settings", FORMS, ids=str)
@pytest.mark.parametrize(("family", "shape"), FAMILIES)
@pytest.mark.usefixtures("alone")
def test_one_call_gives_the_bits_of_its_parts(
    family: str, shape: dict, settings: dict, stored: torch.dtype, tmp_path: Path
) -> None:
    a_checkpoint(tmp_path, family, **shape).to(stored).save_pretrained(tmp_path)
    whole, parts = (Machine(tmp_path, block=4, rows=3, **settings) for _ in range(2))
    for layer in layers_of(parts):
        if settings != {"quantization": "int8"} or native.library().multiplies_bytes:
            assert layer.native is not None
        layer.native = None
    sample = np.random.default_rng(0)
    texts = [sample.integers(3, 97, 45).tolist() for _ in range(3)]
    steps = [  # prompts of three rows, then decode steps beside a chunk
        [Stretch(0, texts[0], 0, 30), Stretch(1, texts[1], 0, 1), Stretch(2, texts[2], 0, 17)],
        [Stretch(0, texts[0], 30, 31), Stretch(1, texts[1], 1, 40), Stretch(2, texts[2], 17, 18)],
        [Stretch(0, texts[0], 31, 32), Stretch(1, texts[1], 40, 41), Stretch(2, texts[2], 18, 19)],
    ]
    for work in steps:
        ours, expected = whole.logits(*work), parts.logits(*work)
        assert all(torch.equal(ours[row], expected[row]) for row in expected)
    for ours, expected in zip(whole.caches, parts.caches, strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.usefixtures("alone")
def test_a_prompt_that_the_mlp_takes_in_several_parts_has_the_same_bits():
    whole, parts = (Machine(rows=1, longest=304, dtype=torch.bfloat16) for _ in range(2))
    for layer in layers_of(parts):
        layer.native = None
    prompt = [3 + at * 7 % 3000 for at in range(300)]
    work = Stretch(0, prompt, 0, len(prompt))
    assert torch.equal(whole.logits(work)[0], parts.logits(work)[0])


@pytest.mark.usefixtures("alone")
def test_no_part_of_a_dense_layer_is_called_from_python(monkeypatch):
    called = counted_calls(monkeypatch)
    machine = Machine(rows=1)
    machine.logits(Stretch(0, [5, 6, 7], 0, 3))
    assert called == ["rms_norm"], "the norm before lm_head"


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_a_quantized_cache_is_computed_part_by_part(kv_dtype, monkeypatch):
    called = counted_calls(monkeypatch)
    machine = Machine(rows=1, kv_dtype=kv_dtype)
    machine.logits(Stretch(0, [5, 6, 7], 0, 3))
    assert called.count("paged_attention") == len(layers_of(machine))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("family", ["gemma3_text", "mixtral"])
def test_layers_of_other_parts_are_computed_part_by_part(family, tmp_path):
    """Norms of outputs, and experts."""
    a_checkpoint(tmp_path, family)
    machine = Machine(tmp_path, rows=1)
    assert all(layer.native is None for layer in layers_of(machine))


def test_without_compiled_matrices_there_is_no_call(torch_alone):
    assert all(layer.native is None for layer in layers_of(Machine(rows=1)))
