"""Which implementation a device gets."""

import subprocess
import sys

import pytest
import torch

from slipway_runtime.kernels import reference
from slipway_runtime.kernels.dispatch import Kernels, kernels_for

NAMES = [name for name in vars(Kernels) if not name.startswith("_")]


@pytest.mark.capability("KN-1")
def test_a_cpu_is_served_by_the_reference():
    assert kernels_for(torch.device("cpu")) is reference


@pytest.mark.capability("KN-1")
def test_a_gpu_is_served_by_triton_where_a_kernel_is_written():
    chosen = kernels_for(torch.device("cuda"))
    assert {name: getattr(chosen, name).__module__.rsplit(".", 1)[1] for name in NAMES} == {
        "rms_norm": "norms",
        "swiglu": "norms",
        "rope_and_store": "store_kv",
        "plan_attention": "paged_attention",
        "paged_attention": "paged_attention",
        "plan_lora": "lora",
        "add_lora": "lora",
        "penalize": "reference_sampling",
        "draw": "reference_sampling",
    }


def test_a_runtime_on_a_cpu_never_imports_triton():
    code = (
        "import sys, torch, slipway_runtime.engine.build; from slipway_runtime.kernels.dispatch import kernels_for; "
        "kernels_for(torch.device('cpu')); sys.exit('triton' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
