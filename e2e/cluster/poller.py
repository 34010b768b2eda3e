"""One epoll thread for all containers of a node: reads their output for the log files, and notices when they end."""

import contextlib
import os
import select
import threading
from collections.abc import Callable

CHUNK = 65536


class Poller:
    """Calls a function when a descriptor can be read; one call at a time, on the poller's own thread."""

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._callbacks: dict[int, Callable[[], None]] = {}
        threading.Thread(target=self._run, name="poller", daemon=True).start()

    def watch(self, fd: int, callback: Callable[[], None]) -> None:
        """Call `callback` whenever `fd` can be read, until `close(fd)`."""
        self._callbacks[fd] = callback
        self._poll.register(fd, select.EPOLLIN)

    def close(self, fd: int) -> None:
        """Stop watching `fd`, and close it; only from within a callback."""
        with contextlib.suppress(KeyError):
            del self._callbacks[fd]
            self._poll.unregister(fd)
            os.close(fd)

    def _run(self) -> None:
        while True:
            for fd, _ in self._poll.poll():
                if callback := self._callbacks.get(fd):  # an earlier callback of this round may have closed it
                    callback()
