"""A GPU that is not there: tensors without numbers on `cuda:1`, and a record of what a step does to the device.

torch's fake tensors have a device and a shape. So code that runs on them is held to what a real GPU demands: an
operation on two devices raises, and so does whatever reads a value on the host. What they let pass is watched here:

- a copy to the device from pageable memory, for which the host waits;
- a tensor of the host among the operands of the device, which torch copies unasked;
- a copy from the device in any other place than `upload.Download`;
- an index-less `cuda`, which is `cuda:0` to torch: the device here is number 1, as on the second rank of a group;
- a Triton launch with operands of another device, or by a thread that has not made the device its current one, where
  Triton would launch it; a copy from the host while a graph is captured.

Numbers are not computed. What the host is told of sampled tokens is zero.
"""

import math
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slipway_runtime.kernels import upload
from slipway_runtime.layers.matmul import Tiled
from slipway_runtime.worker.capture import CapturedGraph

DEVICE = torch.device("cuda", 1)
_FREE = frozenset({"lift_fresh", "detach", "alias", "empty", "empty_strided", "new_empty", "new_empty_strided", "set_",
                   "empty_like", "_unsafe_view", "resize_"})  # fmt: skip
_GATHERS = frozenset({"embedding", "index_select", "gather", "index"})  # read what they give, not all that they have
_CODES_IN_A_BYTE = {"_times_codes": 1, "_times_int4": 2}
_PRODUCTS = {"mm": 1, "addmm": 2, "bmm": 1, "_scaled_mm": 1, "linear": 1}  # which operand the weights are


@dataclass(frozen=True, slots=True)
class Operation:
    """One thing that the device does for a step."""

    kind: str  # kernel, upload, download, graph
    name: str
    nbytes: int = 0  # read and written, of device memory; of an upload or download what travels
    flops: int = 0
    programs: int = 0  # of a Triton launch; 0: an operator of torch
    needed: int = 0  # of these bytes, weights, keys and values: no other way to compute the step reads fewer


@dataclass(frozen=True, slots=True)
class Launched:
    """What a launch of an attention kernel moves and computes: its operands are whole caches, and do not tell."""

    nbytes: int
    flops: int = 0
    needed: int = 0

    def operation(self, name: str, programs: int) -> Operation:
        """The launch."""
        return Operation("kernel", name, self.nbytes, self.flops, programs, self.needed)


@dataclass
class Record:
    """What a step asked of the device, in order."""

    operations: list[Operation] = field(default_factory=list)
    inside: list[Operation] = field(default_factory=list)  # kernels of graphs that were replayed
    waits: int = 0  # of the host for the device
    faults: list[str] = field(default_factory=list)

    def count(self, kind: str) -> int:
        """How many of a kind."""
        return sum(one.kind == kind for one in self.operations)

    def names(self) -> Counter[str]:
        """How often each kernel was launched, in graphs and outside."""
        return Counter(one.name for one in (*self.operations, *self.inside) if one.kind == "kernel")

    @property
    def nbytes(self) -> int:
        """Of device memory, read and written by all kernels."""
        return sum(one.nbytes for one in (*self.operations, *self.inside) if one.kind == "kernel")

    @property
    def flops(self) -> int:
        """Of all products."""
        return sum(one.flops for one in (*self.operations, *self.inside))

    def summary(self) -> str:
        """One line."""
        return (
            f"{self.count('kernel')} launches, {self.count('graph')} graphs of {len(self.inside)} kernels, "
            f"{self.count('upload')} pinned copies to the device, {self.count('download')} from it, {self.waits} waits"
        )


class FakeGpu:
    """The device. Use it inside `fake_gpu`."""

    def __init__(self) -> None:
        self.record = Record()
        self._captured: list[Operation] | None = None  # while a graph is captured
        self._pinned: dict[int, Any] = {}  # storages of pinned memory, kept so that no other gets their number
        self.compiled: set[tuple[object, ...]] = set()  # what Triton would have compiled by now
        self.caches: set[int] = set()  # storages of KV, of which a launch touches a part
        self.attention: dict[str, Launched] = {}  # of the step
        self.is_loading = True  # weights are read: host and device may wait for each other

    @contextmanager
    def step(self) -> Iterator[Record]:
        """What happens inside is a step's."""
        self.is_loading, self.record = False, Record()
        yield self.record
        self.is_loading = True

    def capture(self, compute: Callable[[], object]) -> CapturedGraph:
        """As `worker.capture.CudaCapture`, but captured when it is first replayed: most sizes never are.

        What is computed inside is launched again by each replay.
        """
        captured: list[Operation] = []

        def replay() -> None:
            if not captured:
                self._captured = captured
                compute()
                self._captured = None
            self.record.operations.append(Operation("graph", f"graph of {len(captured)}"))
            self.record.inside += [
                self.attention[one.name].operation(one.name, one.programs) if one.name in self.attention else one
                for one in captured
            ]

        return CapturedGraph(replay)

    def launch(self, name: str, tensors: list[Tensor], programs: int = 0) -> None:
        """A Triton kernel. programs: of its grid."""
        if (current := torch.cuda.current_device()) != DEVICE.index:
            raise RuntimeError(f"{name} is launched on {DEVICE} by a thread whose current device is {current}")
        strangers = {str(one.device) for one in tensors if one.device != DEVICE}
        if strangers:
            raise RuntimeError(f"{name} is launched on {DEVICE} with operands on {sorted(strangers)}")
        if name in self.attention:
            self._add(self.attention[name].operation(name, programs))
            return
        touched = {one.untyped_storage()._cdata: one.nbytes for one in tensors}
        nbytes = sum(touched[key] for key in touched.keys() - self.caches)
        flops = needed = 0
        if name in _CODES_IN_A_BYTE:  # inputs (T, in), codes (out, in) or (out, in / 2), scales, outputs (T, out)
            codes = max((one for one in tensors if one.itemsize == 1), key=lambda one: one.nbytes)
            [inputs, *_] = (one for one in tensors if one.itemsize == 2)
            flops, needed = 2 * len(inputs) * codes.numel() * _CODES_IN_A_BYTE[name], codes.nbytes
        if name == "_grouped":  # inputs, matrices of experts, their scales (or the matrices again), biases, outputs
            x, matrices, scales, _, out, *_ = tensors
            held = sum({one.untyped_storage()._cdata: one.nbytes for one in (matrices, scales)}.values())
            # Rows go to experts as if by chance, so that few rows read a part of the matrices.
            needed = int(held * (1 - (1 - 1 / len(matrices)) ** len(out)))
            nbytes, flops = nbytes - held + needed, 2 * out.numel() * x.shape[1]
        self._add(Operation("kernel", name, nbytes, flops, programs, needed))

    def operation(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """An operator of torch, after it ran."""
        name = func._schema.name.partition("::")[2]
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        made = [one for one in tree_leaves(result) if isinstance(one, Tensor)]
        if name.startswith("empty") and kwargs.get("pin_memory"):
            storage = made[0].untyped_storage()
            self._pinned[storage._cdata] = storage
        if name in ("_to_copy", "copy_", "to") and len({one.device for one in (*given[-1:], *made[:1])}) > 1:
            non_blocking = kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])
            self._copy(given[-1], made[0], non_blocking=bool(non_blocking))
            return
        if (
            not any(one.device.type == "cuda" for one in (*given, *made))
            or name in _FREE
            or _is_view(func, given, made)
        ):
            return
        hosts = [one for one in given if one.device.type == "cpu" and one.dim()]
        if hosts:
            self._fault(f"{name} is given {len(hosts)} tensors of the host: torch copies them and waits")
        read = given[1:] if name in _GATHERS else given  # `index_put_`: counted too high, by the table
        nbytes = sum({one.untyped_storage()._cdata: one.nbytes for one in read}.values())
        nbytes += sum(one.nbytes for one in made) * (2 if name in _GATHERS else 1)
        weights = given[_PRODUCTS[name]].nbytes if name in _PRODUCTS else 0
        self._add(Operation("kernel", name, nbytes, _flops(name, given, made), needed=weights))

    def queue_event(self, device: torch.device) -> Callable[[], object]:
        """In the place of `upload.queue_event`: a wait belongs to the record of the moment when it happens."""
        return self._wait

    def _wait(self) -> None:
        self.record.waits += 1

    def read(self, host: Tensor) -> npt.NDArray[np.uint8]:
        """In the place of `upload._bytes_of`."""
        return np.zeros(host.numel(), dtype=np.uint8)

    def _copy(self, source: Tensor, target: Tensor, *, non_blocking: bool) -> None:
        if source.device.type == "cpu":
            pinned = source.untyped_storage()._cdata in self._pinned
            if not (pinned and non_blocking):
                self._fault(f"{source.nbytes} bytes are copied to the device from pageable memory: the host waits")
            self._add(Operation("upload", "upload", source.nbytes))
        elif target.device.type == "cpu":
            if not (target.untyped_storage()._cdata in self._pinned and non_blocking):
                self._fault(f"{source.nbytes} bytes are read from the device outside of download()")
            self._add(Operation("download", "download", source.nbytes))
        else:
            raise RuntimeError(f"a copy from {source.device} to {target.device}")

    def _add(self, operation: Operation) -> None:
        if self._captured is None:
            self.record.operations.append(operation)
            return
        self._captured.append(operation)
        if operation.kind != "kernel":
            self._fault(f"{operation.kind} while a graph is captured")

    def _fault(self, sentence: str) -> None:
        if not self.is_loading:
            self.record.faults.append(sentence)


def _is_view(func: Any, given: list[Tensor], made: list[Tensor]) -> bool:
    """Whether nothing is computed: what came out lies where what went in does, and was not written."""
    if not made:
        return True
    if any(one.alias_info is not None and one.alias_info.is_write for one in func._schema.arguments):
        return False
    memory = {one.untyped_storage()._cdata for one in given}
    return all(one.untyped_storage()._cdata in memory for one in made)


def _flops(name: str, given: list[Tensor], made: list[Tensor]) -> int:
    if name not in _PRODUCTS:
        return 0
    a = given[1] if name == "addmm" else given[0]
    return 2 * made[0].numel() * a.shape[-1]


def _specialization(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[object, ...]:
    """What Triton compiles anew for: constants, types, and of integers whether they are 1 or divided by 16.

    Addresses are taken to be aligned, which `upload` and torch's allocator see to.
    """
    unspecialized = getattr(fn, "do_not_specialize", None) or getattr(fn, "kwargs", {}).get("do_not_specialize") or ()
    key: list[object] = [fn.fn.__name__]
    for name, value in [*zip(fn.arg_names, args, strict=False), *sorted(kwargs.items())]:
        if isinstance(value, Tensor):
            key.append((name, value.dtype))
        elif name.isupper() or name in ("num_warps", "num_stages"):  # constants, warps and stages
            key.append((name, value))
        elif isinstance(value, int) and name not in unspecialized:
            key.append((name, value == 1, value % 16 == 0, value >= 1 << 31))
        else:
            key.append((name, type(value)))
    return tuple(key)


class _Watch(TorchDispatchMode):
    def __init__(self, gpu: FakeGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.equal.default and self._gpu.is_loading:
            return True  # a check of weights, which have no numbers here
        result = func(*args, **(kwargs or {}))
        if func.namespace == "prim":  # of a tensor's device, which is no work
            return result
        self._gpu.operation(func, args, kwargs or {}, result)
        return result


@contextmanager
def fake_gpu(capability: tuple[int, int] = (9, 0)) -> Iterator[FakeGpu]:
    """Two GPUs of this compute capability, of which the second one is meant. Triton kernels are not run."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    gpu = FakeGpu()

    def run(fn: Any, *args: Any, grid: tuple[int, ...], warmup: bool = False, **kwargs: Any) -> None:
        gpu.compiled.add(_specialization(fn, args, kwargs))
        gpu.launch(
            fn.fn.__name__, [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)], math.prod(grid)
        )

    current = threading.local()  # as of CUDA: each thread begins with device 0

    def set_device(device: Any) -> None:
        current.index = torch.device(device).index if not isinstance(device, int) else device

    with ExitStack() as stack:
        for target, name, value in (
            (torch.cuda, "get_device_capability", lambda device=None: capability),
            (torch.cuda, "current_device", lambda: getattr(current, "index", 0)),
            (torch.cuda, "set_device", set_device),
            (InterpretedFunction, "run", run),
            (JITFunction, "run", run),
            (upload, "queue_event", gpu.queue_event),
            (upload, "_bytes_of", gpu.read),
            (Tiled, "_rows_are_equal", lambda self, like: True),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(_Watch(gpu))
        stack.enter_context(warnings.catch_warnings())  # two caches of one arena have the same address here too
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor", UserWarning)
        torch.cuda.set_device(DEVICE)  # as `engine.rank` does
        yield gpu
