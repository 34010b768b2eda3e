"""What a test leaves running fails its session, and is named: with one process of tests, and with several."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HOOKS = "from e2e.cluster.pytest_hooks import pytest_sessionfinish, pytest_sessionstart, pytest_testnodedown\n"
FORGETFUL = """
from subprocess import PIPE, Popen

def test_it():
    global cat  # it ends when its stdin is closed, with the session
    cat = Popen(["cat", "-u"], stdin=PIPE, stdout=PIPE, bufsize=0)
    cat.stdin.write(b"x")
    assert cat.stdout.read(1) == b"x"
"""


@pytest.mark.parametrize("options", [(), ("-n", "1")], ids=["in one process", "in a process of its own"])
def test_a_process_that_a_test_leaves_running_fails_the_session(tmp_path: Path, options: tuple[str, ...]) -> None:
    (tmp_path / "conftest.py").write_text(HOOKS)
    (tmp_path / "test_it.py").write_text(FORGETFUL)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options]

    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    assert re.search(r"left running by the tests: \d+ cat -u", ended.stdout), ended.stdout
    assert "1 passed" in ended.stdout
    assert ended.returncode == pytest.ExitCode.TESTS_FAILED
