"""Starts a cluster in the background: its launcher runs on after the command that started it, until it is stopped."""

import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from e2e.cluster import launcher_lock
from e2e.cluster.access import STATE, Access
from e2e.cluster.paths import CHECKOUT

START_LIMIT = 180.0  # seconds, without the build


def start(folder: Path, *, ports: Mapping[str, int] | None = None, emulated_version: str | None = None) -> Access:
    """Start a cluster in the background; return when its nodes are Ready. `launcher_lock.stop(folder)` ends it."""
    from e2e.cluster import build, preflight

    preflight.require()
    build.ensure()  # here, where its progress is seen
    if launcher_lock.is_locked(folder):
        raise SystemExit(f"a cluster is running in {folder} already")
    argv = [sys.executable, "-m", "e2e.cluster", "--folder", str(folder), "up"]
    argv += [f"--port={name}={port}" for name, port in (ports or {}).items()]
    argv += [f"--emulated-version={emulated_version}"] if emulated_version else []
    folder.parent.mkdir(parents=True, exist_ok=True)
    said = folder.parent / f"{folder.name}.log"
    with said.open("wb") as log:
        launcher = subprocess.Popen(
            argv, cwd=CHECKOUT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    deadline = time.monotonic() + START_LIMIT
    try:
        while b"ready after" not in said.read_bytes():
            if launcher.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the cluster did not start:\n{said.read_text()}")
            time.sleep(0.1)
    except BaseException:
        launcher.terminate()
        launcher.wait()
        raise
    assert (folder / STATE).exists()
    return Access.attach(folder)
