"""The streams of `kubectl exec` and port-forward: started on first use, through `controlplane stream` (stream.go)."""

import subprocess
import threading
import time
from pathlib import Path

import cri_pb2_grpc as rpc
import grpc

SOCKET = Path("/run/stream.sock")
START_LIMIT = 30.0  # seconds


class Streams:
    """The streaming program of one node, started at its first use: it is large, and most runs never use it."""

    def __init__(self, binary: Path) -> None:
        self._binary = binary
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._stub = rpc.RuntimeServiceStub(grpc.insecure_channel(f"unix://{SOCKET}"))

    def stub(self) -> rpc.RuntimeServiceStub:
        """A client of the streaming program, which runs now."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                SOCKET.unlink(missing_ok=True)
                self._process = subprocess.Popen([str(self._binary), "stream", f"--socket={SOCKET}"])
                self._wait(self._process)
        return self._stub

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + START_LIMIT
        while not SOCKET.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("controlplane stream did not start; see the node's log")
            time.sleep(0.02)
