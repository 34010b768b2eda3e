"""The device of an engine: a GPU wherever there is one, and never a CPU in place of a GPU that cannot be used."""

from pathlib import Path

import pytest
import torch

import slipway_runtime.engine.decide as decide_module
from slipway_runtime.engine.decide import choose_device
from slipway_runtime.models.config import ModelRefusedError

OLD_DRIVER = "The NVIDIA driver on your system is too old\n(found version 11040)."


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Makes a machine: whether a GPU's device file is there, whether torch can use it, whether torch has CUDA."""

    def make(*, present: bool, usable: bool, built: str | None = "13.2") -> None:
        file = tmp_path / "nvidiactl"
        if present:
            file.touch()
        monkeypatch.setattr(decide_module, "_NVIDIA_DEVICE", file)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: usable)
        monkeypatch.setattr(torch.version, "cuda", built)

        def init() -> None:
            if not usable:
                raise RuntimeError(OLD_DRIVER)

        monkeypatch.setattr(torch.cuda, "init", init)

    return make


@pytest.mark.parametrize(
    ("asked", "present", "usable", "built", "device"),
    [
        ("auto", True, True, "13.2", "cuda:1"),
        ("auto", False, False, "13.2", "cpu"),
        ("auto", True, False, None, "cpu"),  # an image for CPUs on a node whose default runtime is NVIDIA's
        ("cpu", True, True, "13.2", "cpu"),
        ("cpu", True, False, "13.2", "cpu"),
        ("cuda", True, True, "13.2", "cuda:1"),
    ],
)
def test_the_device_is_a_gpu_wherever_there_is_one(machine, asked, present, usable, built, device):
    machine(present=present, usable=usable, built=built)
    assert choose_device(asked, rank=1) == torch.device(device)


@pytest.mark.parametrize(("asked", "present"), [("auto", True), ("cuda", True), ("cuda", False)])
def test_a_gpu_that_cannot_be_used_is_refused_with_what_cuda_says(machine, asked, present):
    machine(present=present, usable=False)
    with pytest.raises(
        ModelRefusedError, match=r"driver on your system is too old \(found version 11040\).*--device cpu"
    ):
        choose_device(asked)
