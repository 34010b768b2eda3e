"""A checkpoint's files on disk: the weight files, and a digest of the checkpoint from samples of its tensors.

No torch. Only safetensors is supported: a pickle could run code.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Final

from slipway_runtime.models.config_values import ModelRefusedError, read_json

_PICKLES: Final = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle")
_SAMPLE_BYTES: Final = 1024  # at the start, in the middle and at the end of each tensor


def weight_files(model_path: Path) -> list[Path]:
    """The safetensors files of a checkpoint, in a fixed order. Raises ModelRefusedError."""
    index = model_path / "model.safetensors.index.json"
    if index.exists():
        return _of_index(model_path, index)
    files = sorted(model_path.glob("*.safetensors"))
    if files:
        return files
    pickles = sorted(path.name for pattern in _PICKLES for path in model_path.glob(pattern))
    if pickles:
        raise ModelRefusedError(
            f"the weights are pickled ({pickles[0]}): loading them could run code. Only safetensors is read; "
            "save the model with safe_serialization=True"
        )
    raise ModelRefusedError("there are no *.safetensors files in the checkpoint")


def _of_index(model_path: Path, index: Path) -> list[Path]:
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        raise ModelRefusedError(f"{index.name} has no weight_map of names")
    files = sorted({model_path / name for name in shards.values()})
    for file in files:
        if file.parent != model_path or file.suffix != ".safetensors":
            raise ModelRefusedError(f"{index.name} points outside the checkpoint: {file.name[:80]}")
        if not file.exists():
            raise ModelRefusedError(f"{index.name} names {file.name[:80]}, which is not there")
    return files


def checkpoint_digest(model_path: Path) -> str:
    """SHA-256, in hex, over `config.json` and, of each weight file, its size, its header and a sample of every tensor.

    Takes milliseconds for a model of any size: three kilobytes of each tensor are read. The files must have been loaded
    before: their headers are trusted. The digest does not depend on the files' path.

    | two checkpoints that differ in                                        | digest                              |
    |-----------------------------------------------------------------------|-------------------------------------|
    | config, names, shapes, types or order of tensors, how they are cut    | another                             |
    | weights, after training of any kind; a tensor of up to three kB       | another                             |
    | a large tensor, only between its start, its middle and its end        | the same: pin the digest of it all  |
    | the names of the files, tokenizer, chat template, sampling defaults   | the same: KV does not depend on it  |
    """
    digest = hashlib.sha256((model_path / "config.json").read_bytes())
    for path in weight_files(model_path):
        with path.open("rb", buffering=0) as file:
            size, descriptor = os.fstat(file.fileno()).st_size, file.fileno()
            start = 8 + int.from_bytes(os.pread(descriptor, 8, 0), "little")
            header = os.pread(descriptor, start - 8, 8)
            digest.update(size.to_bytes(8, "little") + start.to_bytes(8, "little") + header)
            for name, about in json.loads(header).items():
                if name != "__metadata__":
                    first, end = about["data_offsets"]
                    for offset, count in _samples(first, end):
                        digest.update(os.pread(descriptor, count, start + offset))
    return digest.hexdigest()


def _samples(first: int, end: int) -> list[tuple[int, int]]:
    """Samples of a tensor: (offset, bytes). 0 … 10,000 → 1 kB at 0, 4,488 and 8,976; a small tensor: all of it."""
    if end - first <= 3 * _SAMPLE_BYTES:
        return [(first, end - first)]
    middle = (first + end - _SAMPLE_BYTES) // 2
    return [(offset, _SAMPLE_BYTES) for offset in (first, middle, end - _SAMPLE_BYTES)]
