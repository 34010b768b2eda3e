"""What a process writes to stderr: one JSON object a line, of our own entries and of libraries' alike."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = r"""
import logging, pathlib, structlog
from slipway_api import logs

logs.configure("gateway", "INFO")
log = structlog.get_logger("any")
log.debug("too quiet")
log.info("scaled", service="team/chat", was=3, now=4, path=pathlib.PurePosixPath("/a"))
log.warning("two\nlines", name="half \udc80 of a pair")
try:
    raise ValueError("no such revision")
except ValueError:
    log.exception("it failed")
logging.getLogger("library").warning("slow: %s s", 3, extra={"host": "here"})
logging.getLogger("library").debug("too quiet")
"""


@pytest.mark.capability("OB-7")
def test_every_entry_is_one_line_of_json_that_names_its_process(tmp_path: Path):
    written = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, cwd=tmp_path, check=True)
    assert written.stdout == b""
    scaled, lines, failed, slow = [json.loads(line) for line in written.stderr.splitlines()]

    assert all(one["part"] == "gateway" for one in (scaled, lines, failed, slow))
    assert all(one["timestamp"].endswith("Z") for one in (scaled, lines, failed, slow))
    assert [one["level"] for one in (scaled, lines, failed, slow)] == ["info", "warning", "error", "warning"]
    assert (scaled["message"], scaled["service"], scaled["was"], scaled["now"]) == ("scaled", "team/chat", 3, 4)
    assert scaled["path"] == "PurePosixPath('/a')"
    assert (lines["message"], lines["name"]) == ("two\nlines", "half \udc80 of a pair")
    assert failed["exception"].endswith("ValueError: no such revision")
    assert (slow["message"], slow["host"]) == ("slow: 3 s", "here")
