"""Which implementation a device gets."""

import subprocess
import sys

import pytest
import torch

from slipway_runtime.engine import decide as decide_module
from slipway_runtime.engine.options import EngineOptions
from slipway_runtime.kernels import fixed_order, gpu, ordered_plan
from slipway_runtime.kernels.dispatch import Kernels, kernels_for, refusal
from slipway_runtime.models.config import ModelRefusedError
from tests.runtime.checkpoints import a_checkpoint

NAMES = [name for name in vars(Kernels) if not name.startswith("_")]


def test_a_gpu_is_served_by_triton_where_a_kernel_is_written():
    chosen = kernels_for(torch.device("cuda"), torch.bfloat16)
    assert {name: getattr(chosen, name).__module__.rsplit(".", 1)[1] for name in NAMES} == {
        "rms_norm": "norms",
        "add_rms_norm": "norms",
        "geglu": "norms",
        "choose_experts": "expert_rows",
        "mix_experts": "experts",
        "swiglu": "norms",
        "rope_and_store": "store_kv",
        "plan_attention": "decode_work",
        "paged_attention": "paged_attention",
        "plan_lora": "lora",
        "add_lora": "lora",
        "apply_bitmask": "sampling",
        "penalize_rows": "penalties",
        "sample": "sampling",
    }


@pytest.mark.capability("API-19")
def test_one_order_of_sums_is_served_on_either_device():
    assert kernels_for(torch.device("cpu"), torch.bfloat16, deterministic=True) is fixed_order
    chosen = kernels_for(torch.device("cuda"), torch.bfloat16, deterministic=True)
    differing = {name for name in NAMES if getattr(chosen, name) is not getattr(gpu, name)}
    assert differing == {"paged_attention", "plan_attention"}
    assert chosen.plan_attention is ordered_plan.plan_attention


@pytest.mark.capability("KN-8")
@pytest.mark.parametrize(
    ("capability", "changed", "sentence"),
    [
        ((9, 0), {}, ""),
        (
            (7, 5),
            {"dtype": torch.float16},
            "a GPU of compute capability 7.5 is not supported: the kernels need 8.0 or newer (A100, L4, H100); "
            "use another GPU or a CPU",
        ),
        ((8, 0), {}, ""),
        ((8, 0), {"dtype": torch.float32}, ""),
        ((8, 9), {"kv_dtype": torch.float8_e4m3fn}, ""),
        (
            (8, 6),
            {"kv_dtype": torch.float8_e4m3fn},
            "a GPU of compute capability 8.6 has no float8: set kvCache.dtype to int8 or auto",
        ),
        ((8, 6), {"kv_dtype": torch.int8}, ""),
        (
            (9, 0),
            {"head_dim": 512},
            "heads of size 512 do not fit into a GPU's shared memory; at most 256 do",
        ),
    ],
)
def test_what_a_gpu_cannot_compute_is_refused_in_a_sentence(capability, changed, sentence):
    """Finding 5: a T4 was told to take float16, which compiles to 17 KB of spills a thread."""
    model = {"head_dim": 128, "dtype": torch.bfloat16, "kv_dtype": torch.bfloat16} | changed
    assert refusal(torch.device("cuda"), capability, **model) == sentence
    assert not refusal(torch.device("cpu"), (0, 0), **model)


def test_a_runtime_on_a_cpu_never_imports_triton():
    code = (
        "import sys, torch, slipway_runtime.engine.build; from slipway_runtime.kernels.dispatch import kernels_for; "
        "kernels_for(torch.device('cpu'), torch.float32); sys.exit('triton' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.capability("KN-8")
@pytest.mark.parametrize(
    ("capability", "kv_dtype", "sentence"),
    [
        ((7, 5), "auto", "a GPU of compute capability 7.5 is not supported"),
        ((8, 0), "fp8", "a GPU of compute capability 8.0 has no float8: set kvCache.dtype to int8 or auto"),
    ],
)
def test_an_engine_on_a_gpu_that_cannot_compute_it_is_refused_before_anything_loads(
    capability, kv_dtype, sentence, tmp_path, monkeypatch
):
    a_checkpoint(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(decide_module, "default_budget_bytes", lambda device, share: 1 << 30)
    (tmp_path / "model.safetensors").write_bytes(b"nobody reads this")
    options = EngineOptions(device="auto", dtype="fp16", kv_cache_dtype=kv_dtype)
    with pytest.raises(ModelRefusedError, match=sentence):
        decide_module.decide(tmp_path, options)


def test_triton_kernels_do_not_depend_on_the_default_of_fp_fusion(recwarn):
    """review/engine.md F14: Triton 3.10 changes the default, and with it the bits and the speed of all kernels."""
    knobs = pytest.importorskip("triton.knobs")
    assert knobs.language.fp_fusion_enabled(None) is True
    assert not [warning for warning in recwarn if "fusion" in str(warning.message).lower()]
