"""Loading of adapters from storage, on a thread of its own, so that no step waits for a file.

The scheduler's residency decides which adapters are in memory; this reads their files, keeps the host copies, and
replies to load and unload calls. Only the step loop's thread calls these methods.
"""

import queue
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from slipway_runtime.messages import AdapterState, AdapterStatus, LoadAdapter, Reply, UnloadAdapter
from slipway_runtime.models.adapter_weights import HostAdapter
from slipway_runtime.scheduling.scheduler import Scheduler

_UNKNOWN: Final = "no adapter with this digest is loaded"


@dataclass(frozen=True)
class _Read:
    """An adapter that was read, or the error."""

    digest: str
    adapter: HostAdapter | None = None
    error: str = ""


class AdapterLoader:
    """Reads adapters, keeps their host copies, replies to load and unload calls."""

    def __init__(
        self,
        scheduler: Scheduler,
        read: Callable[[Path, str], HostAdapter],
        *,
        keep: Callable[[HostAdapter], None],
        forget: Callable[[str], None],
    ) -> None:
        """read: by path and digest; blocks, and raises with a sentence. keep, forget: the worker's host copies."""
        self.wake: Callable[[], None] = lambda: None
        self._scheduler = scheduler
        self._read = read
        self._keep = keep
        self._forget = forget
        self._paths: dict[str, Path] = {}
        self._loading: dict[str, list[int]] = {}  # digest -> calls that wait for it
        self._unloading: dict[str, list[int]] = {}
        self._forget_next: set[str] = set()  # a plan in flight may still copy these into a slot
        self._replies: list[Reply] = []
        self._reported = scheduler.adapters_version
        self._to_read: queue.SimpleQueue[tuple[str, Path] | None] = queue.SimpleQueue()
        self._was_read: queue.SimpleQueue[_Read] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def has_results(self) -> bool:
        """Whether there are replies, changed statuses or adapters that were read."""
        return bool(self._replies) or not self._was_read.empty() or self._reported != self._scheduler.adapters_version

    def control(self, message: LoadAdapter | UnloadAdapter, now: float) -> None:
        """Begin to load or unload an adapter; `take_replies` has the reply once that is done."""
        if isinstance(message, UnloadAdapter):
            if self._scheduler.unload_adapter(message.digest, now):
                self._unloading.setdefault(message.digest, []).append(message.call)
                self._answer_unloads()
            else:
                self._replies.append(Reply(call=message.call, error=_UNKNOWN))
            return
        self._paths[message.digest] = Path(message.path)
        if self._scheduler.register_adapter(message.digest, now, pinned=message.pinned):
            self._loading[message.digest] = [message.call]
            self._start_reading(message.digest)
        elif message.digest in self._loading:
            self._loading[message.digest].append(message.call)
        else:
            self._replies.append(Reply(call=message.call))

    def after_step(self, now: float, *, in_flight: bool) -> None:
        """Register adapters that were read, read wanted ones, forget dropped ones. `in_flight`: a plan is executed."""
        while not self._was_read.empty():
            self._update(self._was_read.get(), now)
        for digest in self._scheduler.take_wanted_adapters():
            self._start_reading(digest)
        for digest in self._forget_next:
            self._forget(digest)
        self._forget_next = set(self._scheduler.take_dropped_adapters())
        if not in_flight:
            for digest in self._forget_next:
                self._forget(digest)
            self._forget_next = set()
        self._answer_unloads()

    def take_replies(self) -> list[Reply]:
        """The replies to the load and unload calls that have ended since the last call."""
        replies, self._replies = self._replies, []
        return replies

    def take_statuses(self) -> tuple[AdapterStatus, ...] | None:
        """The statuses of all adapters, if one has changed since the last call."""
        if self._reported == self._scheduler.adapters_version:
            return None
        self._reported = self._scheduler.adapters_version
        return self._scheduler.adapters()

    def _update(self, read: _Read, now: float) -> None:
        if read.adapter is None:
            self._scheduler.note_adapter_failed(read.digest, read.error, now)
        else:
            self._forget_next.discard(read.digest)
            self._keep(read.adapter)
            self._scheduler.note_adapter_loaded(read.digest, now, num_bytes=read.adapter.bytes, rank=read.adapter.rank)
        # The scheduler may refuse what could be read: too large for the memory of adapters.
        error = read.error or next(
            (s.error for s in self._scheduler.adapters() if s.digest == read.digest and s.state is AdapterState.FAILED),
            "",
        )
        self._replies += [Reply(call=call, error=error) for call in self._loading.pop(read.digest, [])]

    def _answer_unloads(self) -> None:
        if not self._unloading:
            return
        known = {status.digest for status in self._scheduler.adapters()}
        for digest in self._unloading.keys() - known:
            self._replies += [Reply(call=call) for call in self._unloading.pop(digest)]
            if digest not in self._loading:
                self._paths.pop(digest, None)

    def _start_reading(self, digest: str) -> None:
        if self._thread is None:
            # It does not keep this object alive: with it, the engine and the processes of its ranks end.
            work = (self._to_read, self._was_read, self._read, weakref.ref(self))
            self._thread = threading.Thread(target=_read_all, args=work, name="adapters", daemon=True)
            self._thread.start()
            # Not at exit: a thread that frees tensors while the interpreter ends would abort the process.
            weakref.finalize(self, self._to_read.put, None).atexit = False
        self._to_read.put((digest, self._paths[digest]))


def _read_all(
    to_read: "queue.SimpleQueue[tuple[str, Path] | None]",
    was_read: "queue.SimpleQueue[_Read]",
    read: Callable[[Path, str], HostAdapter],
    loader: "weakref.ref[AdapterLoader]",
) -> None:
    """Read adapters until there is None to read, and wake the loader's step loop after each."""
    while (wanted := to_read.get()) is not None:
        digest, path = wanted
        try:
            result = _Read(digest, read(path, digest))
        except Exception as error:  # noqa: BLE001  whatever is wrong with a file, only the calls for it fail
            result = _Read(digest, error=str(error) or type(error).__name__)
        was_read.put(result)
        if (alive := loader()) is not None:
            alive.wake()
        del alive
