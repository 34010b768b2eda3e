"""pytest hooks: the local cluster's binary is built before the first test, and no process is left after the last.

Before: when a selected test needs the local cluster, the machine is checked and the binary is built, with its output
visible and outside any test's time limit. After: a process that tests started and left running fails the session, and
is named; with pytest-xdist each worker checks its own children, and the controller reports them.
"""

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster.paths import cache_folder

NEEDING = {"apiserver", "cluster"}  # fixtures that need the binary
NEEDING_CONTAINERS = {"real_containers"}  # a fixture that skips its tests where the machine cannot run containers
COMPANIONS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")  # end with the interpreter
_before = pytest.StashKey[set[int]]()
_left = pytest.StashKey[list[str]]()
_needing = pytest.StashKey[set[str]]()


def pytest_sessionstart(session: pytest.Session) -> None:
    session.stash[_before] = set(_children())
    session.config.stash[_left] = []


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build what the selected tests need; exit with one sentence where the machine cannot."""
    fixtures = {item.nodeid: set(getattr(item, "fixturenames", ())) for item in session.items}
    needing = {nodeid for nodeid, names in fixtures.items() if NEEDING & names}
    containers = {nodeid for nodeid, names in fixtures.items() if NEEDING_CONTAINERS & names}
    session.config.stash[_needing] = needing | containers
    if not needing | containers or session.config.option.collectonly:
        return
    from e2e.cluster import build, preflight
    from e2e.containerd import build as containerd

    capture = session.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled() if capture else contextlib.nullcontext():
        try:
            if needing:
                preflight.require()
                build.ensure()
            if containers:
                containerd.ensure_all()
        except SystemExit as missing:
            pytest.exit(str(missing), returncode=pytest.ExitCode.USAGE_ERROR)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Collect what a worker has left running; a worker that crashed reports nothing, and its test has failed."""
    node.config.stash[_left] += getattr(node, "workeroutput", {}).get("left", [])


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    before = session.stash.get(_before, set())
    running = {pid: _command_line(pid) for pid in _children() if pid not in before}
    ours = [f"{pid} {line}" for pid, line in running.items() if line and not any(name in line for name in COMPANIONS)]
    left = session.config.stash.get(_left, []) + ours
    if hasattr(session.config, "workeroutput"):  # the controller reports it
        session.config.workeroutput["left"] = left
    elif left:
        for process in left:
            print(f"\nleft running by the tests: {process}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print where the logs are when a test on the cluster failed."""
    failed = terminalreporter.stats.get("failed", []) + terminalreporter.stats.get("error", [])
    needing = terminalreporter.config.stash.get(_needing, set())
    if any(report.nodeid in needing for report in failed):
        terminalreporter.write_line(f"logs of the clusters: {cache_folder()}/clusters/*/logs")


def _children() -> list[int]:
    """Processes started by any thread of ours, and running still."""
    found: list[int] = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):
            found += map(int, Path(f"/proc/self/task/{task}/children").read_text().split())
    return found


def _command_line(pid: int) -> str:
    """The command; empty for a process that has ended and only waits to be reaped."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""
