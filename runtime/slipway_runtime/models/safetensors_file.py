"""Reader of one safetensors file: the library checks the header, tensors are copied from a memory map of the file.

The library refuses inconsistent headers (wrong sizes, overlapping tensors, holes). This module refuses what the library
would block on: files that are not regular files, and headers that are too long.
"""

import contextlib
import json
import mmap
import struct
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from slipway_runtime.models.config_values import ModelRefusedError

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
