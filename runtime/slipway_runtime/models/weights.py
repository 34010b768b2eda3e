"""Checkpoint reader: tensors of a checkpoint by name, from memory-mapped safetensors files.

A tensor is copied piece by piece from the map to its final memory and converted on the way, and each piece of the map
is released at once. So a load never holds more than the weights, one piece for each thread, and what the caller makes
of the tensors that it holds.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Final, TypeVar

import torch
from torch import Tensor

from slipway_runtime.models.checkpoint_files import weight_files
from slipway_runtime.models.config_values import ModelRefusedError
from slipway_runtime.models.safetensors_file import Entry, SafetensorsFile

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

    def dtype_of(self, name: str) -> torch.dtype:
        """The stored dtype of a tensor; KeyError if the checkpoint lacks it."""
        return self._places[name][1].dtype

    def take_raw(self, name: str, *, taken: bool = True) -> Tensor:
        """The tensor `name` in its stored dtype and shape. taken: False to inspect it, without counting it as read."""
        if name not in self._places:
            raise ModelRefusedError(f"the checkpoint lacks the tensor {name}")
        file, entry = self._places[name]
        tensor = torch.empty(entry.shape, dtype=entry.dtype, device=self.device)
        file.copy_into(tensor.view(-1), entry, self._tell if taken else lambda _: None)
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
        file.copy_into(tensor.view(-1), wanted, self._tell)
        if rows is not None:
            self._tell(entry.nbytes - wanted.nbytes)
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

    def _tell(self, count: int) -> None:
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
