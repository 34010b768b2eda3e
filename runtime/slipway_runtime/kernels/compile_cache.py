"""Triton's cache of compiled kernels, extended by the folder that the replicas of a service share on a node.

Triton asks its cache manager for a kernel by the hash of the kernel's source, constants, options, target and compiler.
The manager looks into the process's own cache (TRITON_CACHE_DIR) first, then into the shared folder. What it finds
there is copied into the own cache, and only that copy, of bytes whose seal was checked, is ever loaded.
"""

# Triton has no types.
# mypy: disable-error-code="import-untyped,misc"

import platform
import sys
from pathlib import Path
from typing import ClassVar, Final

import torch
import triton
from triton import knobs
from triton.runtime.cache import FileCacheManager

import slipway_api
from slipway_runtime.storage.kernel_store import KernelStore

# Of a kernel, what a GPU executes, and its launch parameters. Intermediate texts of the compiler are not shared.
_EXECUTED: Final = (".cubin", ".hsaco", ".json")
_LIBRARY: Final = ".so"  # host code that Triton has the C compiler make, such as its calls of the driver
_DRIVER: Final = Path("/proc/driver/nvidia/version")


class SharedCacheManager(FileCacheManager):
    """Triton's cache manager for one kernel; without a store it is Triton's own."""

    store: ClassVar[KernelStore | None] = None  # Triton makes the managers, so they find the store here

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        super().__init__(key, override, dump)
        self._store = None if override or dump else self.store

    def get_group(self, filename: str) -> dict[str, str] | None:
        """The paths of a kernel's files, by name; None: it must be compiled."""
        found: dict[str, str] | None = super().get_group(filename)
        if found is not None or self._store is None:
            return found
        files = self._store.load(self.key)
        if files is None or filename not in files:
            return None
        group = {name: self._copy(content, name) for name, content in files.items()}
        super().put_group(filename, group)
        return group

    def put_group(self, filename: str, group: dict[str, str]) -> str:
        """Keep the files of a kernel that was compiled."""
        path: str = super().put_group(filename, group)
        if self._store is not None:
            executed = {name: Path(path) for name, path in group.items() if name.endswith(_EXECUTED)}
            self._store.save(self.key, {name: path.read_bytes() for name, path in executed.items()})
        return path

    def get_file(self, filename: str) -> str | None:
        """The path of a library; None: it must be compiled."""
        found: str | None = super().get_file(filename)
        if found is not None or self._store is None or not filename.endswith(_LIBRARY):
            return found
        files = self._store.load(self._of_library(filename))
        return None if files is None or filename not in files else self._copy(files[filename], filename)

    def put(self, data: bytes | str, filename: str, binary: bool = True) -> str:
        """Keep a file; a library is complete with it, other files are complete with `put_group`."""
        path = self._copy(data, filename)
        if self._store is not None and isinstance(data, bytes) and filename.endswith(_LIBRARY):
            self._store.save(self._of_library(filename), {filename: data})
        return path

    def _copy(self, data: bytes | str, filename: str) -> str:
        path: str = super().put(data, filename)
        return path

    def _of_library(self, filename: str) -> str:
        return f"{self.key}-{filename}"


def share_kernels(root: Path, key: str, device: torch.device) -> KernelStore:
    """Share the kernels that this process compiles from now on, in the folder `root`; the store counts them."""
    card = torch.cuda.get_device_properties(device)
    store = KernelStore(root, key.encode(), toolchain(f"{card.name} {card.major}.{card.minor}"))
    use(store)
    return store


def use(store: KernelStore) -> None:
    """Have Triton look for compiled kernels in this store."""
    SharedCacheManager.store = store
    knobs.cache.manager_class = SharedCacheManager


def toolchain(card: str) -> str:
    """What a compiled kernel depends on besides its source: versions, compilers, driver and card."""
    ptxas = knobs.nvidia.ptxas
    parts = {
        "slipway": slipway_api.__version__,
        "triton": triton.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "ptxas": ptxas.version if ptxas is not None else "",
        "driver": _driver(),
        "card": card,
        # Of libraries.
        "python": sys.implementation.cache_tag,
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()),
    }
    return "\n".join(f"{name} {value}" for name, value in parts.items())


def _driver() -> str:
    """The line with the driver's version; empty where the kernel does not show it."""
    try:
        return _DRIVER.read_text().partition("\n")[0]
    except OSError:
        return ""
