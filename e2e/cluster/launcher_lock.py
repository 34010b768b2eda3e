"""The lock of a cluster's folder: one launcher at a time; processes that a dead launcher left are ended.

Beside the folder lies `<folder>.pid`. The launcher locks it while it lives, and writes its own process and the process
that holds the cluster's namespaces into it. A process is identified by its pid and its start time, so that a reused pid
is never mistaken for it.
"""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

MARK = ".cluster"  # in every folder of ours: others are never emptied
PATIENCE = 10.0  # seconds for the kernel to end what a dead launcher left


class BusyError(RuntimeError):
    """Another launcher runs a cluster in this folder."""


@dataclass(frozen=True)
class Process:
    """A process that cannot be mistaken for a later one with the same pid."""

    pid: int
    started: int  # in clock ticks since the machine started

    @classmethod
    def of(cls, pid: int) -> "Process":
        return cls(pid, _started(pid))

    @property
    def alive(self) -> bool:
        try:
            return _started(self.pid) == self.started
        except ProcessLookupError:
            return False

    def kill(self, how: int) -> None:
        """Send a signal, unless it is gone already."""
        with contextlib.suppress(ProcessLookupError):
            if self.alive:
                os.kill(self.pid, how)

    def gone_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self.alive and time.monotonic() < deadline:
            time.sleep(0.02)
        return not self.alive


class LauncherLock:
    """The lock of `folder`, held from construction to `release`."""

    def __init__(self, folder: Path) -> None:
        if folder.exists() and any(folder.iterdir()) and not (folder / MARK).exists():
            raise SystemExit(f"{folder} has other things in it; give the cluster a folder of its own")
        folder.parent.mkdir(parents=True, exist_ok=True)
        self._file = _pid_file(folder).open("a+")
        self._take(folder)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (folder / MARK).touch()
        self._write(launcher=Process.of(os.getpid()))

    def _take(self, folder: Path) -> None:
        """Lock the pid file, and end the processes that the last launcher left; refuse while that launcher lives."""
        left = _read(self._file)
        # A child that the launcher forked may hold the lock longer than the launcher lives.
        if not _lock(self._file) and ("launcher" not in left or left["launcher"].alive):
            self._file.close()
            raise BusyError(f"a cluster is running in {folder} already")
        _end(left.get("namespaces"))
        deadline = time.monotonic() + PATIENCE
        while not _lock(self._file):
            if time.monotonic() > deadline:
                self._file.close()
                raise BusyError(f"something still holds {_pid_file(folder)}, though its launcher is gone")
            time.sleep(0.05)

    def write_namespaces(self, namespaces: int) -> None:
        """Write the process that holds the cluster's namespaces into the pid file: ending it ends everything."""
        self._write(launcher=Process.of(os.getpid()), namespaces=Process.of(namespaces))

    def _write(self, **processes: Process) -> None:
        self._file.seek(0)
        self._file.truncate()
        json.dump({name: asdict(process) for name, process in processes.items()}, self._file)
        self._file.flush()

    def release(self) -> None:
        """Unlock the folder for the next launcher."""
        self._file.seek(0)
        self._file.truncate()
        self._file.close()


def is_locked(folder: Path) -> bool:
    """Whether a launcher runs a cluster in `folder` now."""
    try:
        with _pid_file(folder).open() as file:
            left = _read(file)
            return not _lock(file) and ("launcher" not in left or left["launcher"].alive)
    except FileNotFoundError:
        return False


def stop(folder: Path) -> bool:
    """End the cluster in `folder`, launcher and all; False when there was none."""
    try:
        with _pid_file(folder).open() as file:
            left = _read(file)
    except FileNotFoundError:
        return False
    launcher, namespaces = left.get("launcher"), left.get("namespaces")
    found = any(process and process.alive for process in (launcher, namespaces))
    if launcher and launcher.pid != os.getpid():
        launcher.kill(signal.SIGTERM)
        if not launcher.gone_within(PATIENCE):
            launcher.kill(signal.SIGKILL)
    _end(namespaces)
    return found


def _end(namespaces: Process | None) -> None:
    if namespaces and namespaces.alive and not namespaces.gone_within(0.5):  # it ends by itself with its launcher
        namespaces.kill(signal.SIGKILL)
        namespaces.gone_within(PATIENCE)


def _pid_file(folder: Path) -> Path:
    return folder.parent / f"{folder.name}.pid"


def _lock(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read(file: TextIO) -> dict[str, Process]:
    file.seek(0)
    try:
        return {name: Process(**process) for name, process in json.load(file).items()}
    except (ValueError, TypeError):
        return {}


def _started(pid: int) -> int:
    """Start time of the process; a zombie counts as gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        raise ProcessLookupError(pid) from None
    if fields[0] == "Z":
        raise ProcessLookupError(pid)
    return int(fields[19])
