"""A folder has one launcher at a time, and what a dead one left is ended."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from e2e.cluster.launcher_lock import BusyError, LauncherLock, Process, is_locked, stop


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cluster"


def a_sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "600"])


def test_a_folder_is_refused_while_another_launcher_has_it(folder: Path) -> None:
    lock = LauncherLock(folder)
    assert is_locked(folder)

    with pytest.raises(BusyError, match=r"running in .* already"):
        LauncherLock(folder)

    lock.release()
    assert not is_locked(folder)
    LauncherLock(folder).release()


def test_a_folder_with_other_things_in_it_is_never_emptied(folder: Path) -> None:
    folder.mkdir()
    (folder / "thesis.txt").touch()

    with pytest.raises(SystemExit, match="has other things in it"):
        LauncherLock(folder)

    assert (folder / "thesis.txt").exists()


def test_what_a_dead_launcher_left_is_ended_by_the_next_one(folder: Path) -> None:
    with a_sleeper() as left:
        # The launcher was killed, and a child that it had forked still holds its lock.
        program = (
            "import os, sys, time; from pathlib import Path; from e2e.cluster.launcher_lock import LauncherLock\n"
            f"LauncherLock(Path({str(folder)!r})).write_namespaces({left.pid})\n"
            "if os.fork() == 0: time.sleep(2)\n"
            "else: os._exit(9)\n"
        )
        subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[2], check=False)
        assert not is_locked(folder)

        LauncherLock(folder).release()

        assert left.wait(5) == -signal.SIGKILL


def test_stop_ends_a_launcher_and_its_namespaces(folder: Path) -> None:
    with a_sleeper() as launcher, a_sleeper() as namespaces:
        folder.parent.mkdir(exist_ok=True)
        processes = {"launcher": Process.of(launcher.pid), "namespaces": Process.of(namespaces.pid)}
        written = {name: vars(process) for name, process in processes.items()}
        (folder.parent / "cluster.pid").write_text(json.dumps(written))

        assert stop(folder)

        assert launcher.wait(5) == -signal.SIGTERM
        assert namespaces.wait(5) == -signal.SIGKILL
    assert not stop(folder)


def test_a_pid_used_again_is_not_mistaken_for_the_process_that_had_it() -> None:
    mine = Process.of(os.getpid())

    assert mine.alive
    assert not Process(mine.pid, mine.started - 1).alive
