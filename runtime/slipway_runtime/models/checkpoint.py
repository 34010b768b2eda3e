"""A checkpoint on disk: its weight files, its digest, and its tensors by name from memory-mapped safetensors files.

Only safetensors is read: a pickle could run code. The library checks the header of each file and refuses inconsistent
ones (wrong sizes, overlapping tensors, holes). This module refuses what the library would block on: files that are not
regular files, and headers that are too long.

A tensor is copied piece by piece from the map to its final memory and converted on the way, and each piece of the map
is released at once. So a load never holds more than the weights, one piece for each thread, and what the caller makes
of the tensors that it holds.
"""

import contextlib
import hashlib
import json
import mmap
import os
import struct
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Final, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from slipway_runtime.models.config_values import ModelRefusedError, read_json
from slipway_runtime.models.wrappers import text_tensors

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


PIECE_BYTES: Final = 16 << 20
MOST_HEADER_BYTES: Final = 16 << 20  # a thousand tensors need a tenth of a megabyte
_TYPES: Final = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of the file: dtype, shape, and range of bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.end - self.start

    def rows(self, rows: slice) -> "Entry":
        """The entry of some contiguous rows of the tensor."""
        start, stop, _ = rows.indices(self.shape[0])
        size = self.nbytes // self.shape[0]
        shape = (stop - start, *self.shape[1:])
        return replace(self, shape=shape, start=self.start + start * size, end=self.start + stop * size)


class SafetensorsFile:
    """A memory-mapped safetensors file and its entries."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():  # a pipe would block, a device would never end
            raise ModelRefusedError(f"{path.name} is not a file")
        self._name = path.name
        with path.open("rb") as file:
            data_start = self._check_header(path, file.read(8))
            self.entries = self._entries(file.read(data_start - 8), data_start)
            self._map = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        with warnings.catch_warnings():
            # This tensor is never written; a writable private map would be charged as memory.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def _check_header(self, path: Path, first: bytes) -> int:
        """Check the header; returns the offset of the first tensor."""
        if len(first) < 8:
            raise ModelRefusedError(f"{path.name} is not a safetensors file: it has {len(first)} bytes")
        (length,) = struct.unpack("<Q", first)
        if length > MOST_HEADER_BYTES:
            raise ModelRefusedError(f"{path.name} is not a safetensors file: it claims a header of {length} bytes")
        try:
            with safe_open(path, framework="pt"):
                return 8 + int(length)
        except SafetensorError as error:
            raise ModelRefusedError(f"{path.name} is not a safetensors file: {str(error)[:200]}") from error

    def _entries(self, header: bytes, data_start: int) -> dict[str, Entry]:
        entries = {}
        for name, about in json.loads(header).items():
            if name == "__metadata__":
                continue
            dtype = _TYPES.get(about["dtype"])
            if dtype is None:
                raise ModelRefusedError(f"{name[:80]} holds {about['dtype']}: this type is not supported")
            start, end = about["data_offsets"]
            entries[name] = Entry(dtype, tuple(about["shape"]), data_start + start, data_start + end)
        return entries

    def copy_into(self, flat: Tensor, entry: Entry, tell: Callable[[int], None]) -> None:
        """Copy a tensor into `flat`, (numel,), converted to its dtype; `tell` is called with each piece's bytes."""
        size = entry.dtype.itemsize
        step = PIECE_BYTES // size
        for first in range(0, flat.numel(), step):
            start = entry.start + first * size
            end = min(start + PIECE_BYTES, entry.end)
            piece = self._bytes[start:end]
            if start % size:
                piece = piece.clone()  # older writers did not align tensors
            flat[first : first + step].copy_(piece.view(entry.dtype))
            self._release_pages(start, end)
            tell(end - start)

    def _release_pages(self, start: int, end: int) -> None:
        """Release this part's pages to the kernel; otherwise the file would stay in memory beside the weights."""
        start -= start % mmap.PAGESIZE
        self._map.madvise(mmap.MADV_DONTNEED, start, end - start)

    def close(self) -> None:
        """Unmap the file."""
        del self._bytes
        with contextlib.suppress(BufferError):  # after an error, the traceback still refers to the map
            self._map.close()


_DERIVED: Final = (".rotary_emb.inv_freq",)  # computed from the configuration; older checkpoints stored it
_MOST_THREADS: Final = 8  # with more, a disk is no faster, and each thread holds a layer's tensors
_T = TypeVar("_T")


class Checkpoint:
    """Reads tensors, checked and converted. On exit, raises ModelRefusedError for tensors neither read nor ignored.

    `take` may be called from several threads. `on_progress` gets the bytes read and the bytes of all tensors.
    """

    def __init__(
        self,
        model_path: Path,
        dtype: torch.dtype,
        device: torch.device,
        on_progress: Callable[[int, int], object] = lambda done, total: None,
    ) -> None:
        self.dtype = dtype  # of the tensors that `take` returns
        self.device = device
        self._files = [SafetensorsFile(path) for path in weight_files(model_path)]
        self._places: dict[str, tuple[SafetensorsFile, Entry]] = {}
        for file in self._files:
            for name, entry in file.entries.items():
                if name in self._places:
                    raise ModelRefusedError(f"the checkpoint holds the tensor {name} twice")
                self._places[name] = (file, entry)
        self._places = text_tensors(self._places)
        # Embedding models are published without the head, and their tensor names without the prefix "model.".
        if "embed_tokens.weight" in self._places:
            self._places = {f"model.{name}": place for name, place in self._places.items()}
        self._left = set(self._places)
        self._lock = threading.Lock()
        self._on_progress = on_progress
        self._read = 0
        self._total = sum(entry.nbytes for _, entry in self._places.values())
        self.bytes = 0  # memory of the tensors that were read

    def __contains__(self, name: str) -> bool:
        """Whether there is a tensor of this name."""
        return name in self._places

    def check_shape(self, name: str, *shape: int) -> None:
        """Refuse a tensor of another shape."""
        entry = self._places[name][1]
        if entry.shape != shape:
            raise ModelRefusedError(f"{name} has the shape {entry.shape}; config.json says {shape}")

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor; () if the checkpoint lacks it."""
        return tuple(self._places[name][1].shape) if name in self._places else ()

    def dtype_of(self, name: str) -> torch.dtype:
        """The stored dtype of a tensor; KeyError if the checkpoint lacks it."""
        return self._places[name][1].dtype

    def take_raw(self, name: str, *, taken: bool = True) -> Tensor:
        """The tensor `name` in its stored dtype and shape. taken: False to inspect it, without counting it as read."""
        if name not in self._places:
            raise ModelRefusedError(f"the checkpoint lacks the tensor {name}")
        file, entry = self._places[name]
        tensor = torch.empty(entry.shape, dtype=entry.dtype, device=self.device)
        file.copy_into(tensor.view(-1), entry, self._report if taken else lambda _: None)
        if taken:
            with self._lock:
                self._left.discard(name)
                self.bytes += tensor.nbytes
        return tensor

    def take(self, name: str, *shape: int, rows: slice | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor `name`, which must have this shape, or only some of its rows: other rows are not read.

        dtype: of the result; None: that of the model.
        """
        if name not in self._places:
            raise ModelRefusedError(f"the checkpoint lacks the tensor {name}")
        file, entry = self._places[name]
        self.check_shape(name, *shape)
        if not entry.dtype.is_floating_point or entry.dtype.itemsize < 2:
            raise ModelRefusedError(
                f"{name} holds {entry.dtype}, and config.json has no quantization_config that says what the codes mean"
            )
        wanted = entry if rows is None else entry.rows(rows)
        tensor = torch.empty(wanted.shape, dtype=dtype or self.dtype, device=self.device)
        file.copy_into(tensor.view(-1), wanted, self._report)
        if rows is not None:
            self._report(entry.nbytes - wanted.nbytes)
        with self._lock:
            self._left.discard(name)
            self.bytes += tensor.nbytes
        return tensor

    def in_parallel(self, make: Callable[[int], _T], count: int) -> list[_T]:
        """`[make(0), …, make(count - 1)]`, in several threads: one converts while another waits for the disk."""
        threads = min(_MOST_THREADS, count, os.cpu_count() or 1)
        with ThreadPoolExecutor(threads, "weights", self._use_device) as pool:
            futures = [pool.submit(make, index) for index in range(count)]
            try:
                return [future.result() for future in futures]
            finally:
                for future in futures:
                    future.cancel()  # after an error the remaining results are not needed

    def _use_device(self) -> None:
        """Set the thread's CUDA device: Triton launches on the current device, which is 0 in each new thread."""
        if self.device.index is not None:
            torch.cuda.set_device(self.device)

    def ignore(self, name: str) -> None:
        """Accept that tensor `name`, if the checkpoint has it, is not read."""
        self._left.discard(name)

    def ignore_if(self, is_not_needed: Callable[[str], bool]) -> None:
        """Accept that tensors whose names match are not read."""
        self._left -= {name for name in self._left if is_not_needed(name)}

    def _report(self, count: int) -> None:
        with self._lock:
            self._read += count
            self._on_progress(self._read, self._total)

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files:
            file.close()
        self._places.clear()
        unexpected = sorted(name for name in self._left if not name.endswith(_DERIVED))
        if unexpected and error is None:
            more = f" and {len(unexpected) - 3} more" if len(unexpected) > 3 else ""
            raise ModelRefusedError(
                f"the checkpoint holds tensors that this model has no place for: {', '.join(unexpected[:3])}{more}"
            )
