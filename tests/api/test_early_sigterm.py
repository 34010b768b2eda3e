"""SIGTERM during the imports: process 1 of a container is told to end before it has begun (ADR 81)."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

# Imports go as far as the first module that is neither of the standard library nor needed to handle the signal.
START = """
import importlib.abc, os, signal, sys, time
package, command = sys.argv[1:]
if os.getpid() != 1:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as the kernel does for process 1
first = {package, f"{package}.main", "slipway_api", "slipway_api.early_sigterm", "slipway_api.names"}
class Slow(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] not in sys.stdlib_module_names and name not in first:
            print(os.getpid(), name, flush=True)
            for _ in range(6000):  # a signal that comes just before a sleep does not end it
                time.sleep(0.1)
sys.meta_path.insert(0, Slow())
sys.argv = [command]
__import__(f"{package}.main", fromlist=["main"]).main()
"""
NAMESPACE = ["unshare", "--pid", "--fork", "--kill-child"]


def _may_unshare() -> bool:
    return subprocess.run([*NAMESPACE, "true"], check=False, capture_output=True).returncode == 0


@pytest.mark.capability("RD-1")
@pytest.mark.parametrize("command", ["slipway-runtime", "slipway-gateway", "slipway-operator"])
@pytest.mark.parametrize("as_process_1", [False, True])
def test_sigterm_during_the_imports_ends_the_process_at_once(command: str, as_process_1: bool):
    if as_process_1 and not _may_unshare():
        pytest.skip("no namespace of processes may be made here")
    line = [*(NAMESPACE if as_process_1 else ()), sys.executable, "-c", START, command.replace("-", "_"), command]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            seen, imported = process.stdout.readline().split()
            assert imported.startswith(command.replace("-", "_")), "a dependency is imported first"
            assert (int(seen) == 1) == as_process_1
            os.kill(_child_of(process.pid) if as_process_1 else process.pid, signal.SIGTERM)
            assert process.wait(30) == 128 + signal.SIGTERM
        finally:
            process.kill()


def _child_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text())
