"""The drained file: the stop hook of the engine's container, which has no tool of ours, waits until it exists.

The kubelet runs this hook before each SIGTERM: when the pod is deleted, and when it restarts only the engine because a
probe failed. The file exists when the hook has nothing to wait for.

| the engine                                          | the file                          |
|-----------------------------------------------------|-----------------------------------|
| serves                                              | is absent                         |
| is drained by the agent's own hook                  | exists from the end of that drain |
| does not listen, or its health path answers a fault | exists                            |
| was silent for `restartAfterSeconds`                | exists                            |
"""

from pathlib import Path
from typing import Final

import structlog

from slipway_agent.replica import Replica

log = structlog.get_logger()

FAILED: Final = "the engine cannot finish requests"


class DrainedFile:
    """The file of one pod; without a path it does nothing."""

    def __init__(self, path: Path | None, replica: Replica) -> None:
        """Removes the file of an earlier start of this container."""
        self._path = path
        self._replica = replica
        self._is_drained = False
        self._is_written = False
        self._is_failing = False  # the last attempt to write or remove it
        self._remove()

    def follow(self) -> None:
        """Write the file while the engine cannot finish requests, and remove it once the engine can again."""
        if self._is_drained:
            return
        if self._replica.can_finish_requests:
            if self._is_written:
                self._remove()
        elif not self._is_written:
            self._write(FAILED)

    def write(self, reason: str) -> None:
        """A drain is over: the engine may end, and the file stays."""
        self._is_drained = True
        self._write(reason)

    def _write(self, reason: str) -> None:
        if self._path is None:
            return
        try:
            self._path.write_text(f"{reason}\n")
        except OSError as error:
            self._report("written", error)
        else:
            self._is_written, self._is_failing = True, False

    def _remove(self) -> None:
        if self._path is None:
            return
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            self._report("removed", error)
        else:
            self._is_written = self._is_failing = False

    def _report(self, action: str, error: OSError) -> None:
        if not self._is_failing:
            log.error(f"the drained file cannot be {action}", path=str(self._path), error=error.strerror)
        self._is_failing = True
