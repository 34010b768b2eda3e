"""Tensors of a checkpoint by name, memory-mapped. Only safetensors is read: a pickle could run code on loading."""

import json
from pathlib import Path
from types import TracebackType

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from slipway_runtime.models.config import ModelRefusedError

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle")
_DERIVED = (".rotary_emb.inv_freq",)  # computed from the configuration; older checkpoints stored it


class Checkpoint:
    """Hands out each tensor once, checked and converted; `close` refuses what nobody asked for."""

    def __init__(self, model_path: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._files = [safe_open(path, framework="pt") for path in _safetensors_files(model_path)]
        self._file_of = {name: file for file in self._files for name in file.keys()}  # type: ignore[no-untyped-call]  # noqa: SIM118  not a dict
        self._left = set(self._file_of)
        self.bytes = 0

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor `name`, which must have this shape."""
        file = self._file_of.get(name)
        if file is None:
            raise ModelRefusedError(f"the checkpoint lacks the tensor {name}")
        tensor: Tensor = file.get_tensor(name)  # type: ignore[no-untyped-call]  # safetensors' stubs say less than it does
        if tuple(tensor.shape) != shape:
            raise ModelRefusedError(f"{name} has the shape {tuple(tensor.shape)}; config.json says {shape}")
        if not tensor.is_floating_point():
            raise ModelRefusedError(f"{name} holds {tensor.dtype}: quantized checkpoints are not supported")
        self._left.discard(name)
        tensor = tensor.to(device=self._device, dtype=self._dtype, copy=True)  # out of the mapped file
        self.bytes += tensor.nbytes
        return tensor

    def ignore(self, name: str) -> None:
        """A tensor that may be there and is not needed."""
        self._left.discard(name)

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.clear()
        self._file_of.clear()
        unexpected = sorted(name for name in self._left if not name.endswith(_DERIVED))
        if unexpected and error is None:
            more = f" and {len(unexpected) - 3} more" if len(unexpected) > 3 else ""
            raise ModelRefusedError(
                f"the checkpoint holds tensors that this model has no place for: {', '.join(unexpected[:3])}{more}"
            )


def _safetensors_files(model_path: Path) -> list[Path]:
    index = model_path / "model.safetensors.index.json"
    if index.exists():
        files = sorted({model_path / name for name in json.loads(index.read_text())["weight_map"].values()})
        for file in files:
            if file.parent != model_path:
                raise ModelRefusedError(f"{index.name} points outside the checkpoint: {file.name}")
            if not file.exists():
                raise ModelRefusedError(f"{index.name} names {file.name}, which is not there")
    else:
        files = sorted(model_path.glob("*.safetensors"))
    if not files:
        pickles = sorted(path.name for pattern in _PICKLES for path in model_path.glob(pattern))
        if pickles:
            raise ModelRefusedError(
                f"the weights are pickled ({pickles[0]}): loading them could run code. Only safetensors is read; "
                "save the model with safe_serialization=True"
            )
        raise ModelRefusedError("there are no *.safetensors files in the checkpoint")
    for file in files:
        try:
            with safe_open(file, framework="pt"):
                pass
        except SafetensorError as error:
            raise ModelRefusedError(f"{file.name} is not a safetensors file: {error}") from error
    return files
