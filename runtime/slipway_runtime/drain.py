"""`slipway-runtime drain`: ask the replica of this pod to drain, through its socket, and wait for the end of the drain.

The server side is `server/control.py`. Standard library only: a preStop hook runs this.
"""

import json
import socket
import sys
from pathlib import Path
from typing import Any


def drain(control: Path, timeout_seconds: float | None, refuse_after_seconds: float = 0.0) -> int:
    """Drain the replica, for at most `timeout_seconds` where given; returns the exit code.

    0 where no server runs: then nothing is left to drain, and Kubernetes would report a failing preStop hook.
    """
    try:
        ask_for_drain(control, timeout_seconds, refuse_after_seconds)
    except (FileNotFoundError, ConnectionError) as error:
        print(f"slipway-runtime: nothing to drain: no server answers at {control}: {error.strerror}", file=sys.stderr)
    except OSError as error:
        print(f"slipway-runtime: cannot ask for a drain at {control}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


def ask_for_drain(control: Path, timeout_seconds: float | None, refuse_after_seconds: float = 0.0) -> dict[str, Any]:
    """Send the drain request; returns the replica's answer at the end of the drain. Blocks."""
    body = {"refuseAfterSeconds": refuse_after_seconds}
    if timeout_seconds is not None:
        body["timeoutSeconds"] = timeout_seconds
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(str(control))
        connection.sendall(json.dumps(body).encode() + b"\n")
        with connection.makefile("rb") as answers:
            answer: dict[str, Any] = json.loads(answers.readline() or b"{}")
            return answer
