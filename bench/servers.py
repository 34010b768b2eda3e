"""Starts and stops the server processes of benchmarks: a runtime with the embedded model, a gateway."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

EMBEDDED_MODEL = Path(__file__).resolve().parent.parent / "models" / "tiny"
MODEL_NAME = "tiny"
START_SECONDS = 120.0
STOP_SECONDS = 15.0


class ServerFailedError(Exception):
    """A process ended, or did not become ready; the message has the end of its log."""


@dataclass(frozen=True)
class Server:
    """One running process with its two ports on 127.0.0.1."""

    process: subprocess.Popen[bytes]
    port: int
    admin_port: int
    log: Path
    version: str = ""  # of a peer's program

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def admin_url(self) -> str:
        return f"http://127.0.0.1:{self.admin_port}"

    def cpu_seconds(self) -> float:
        """CPU time of the process and its children so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(int(field) for field in fields[11:15]) / os.sysconf("SC_CLK_TCK")

    def rss_bytes(self) -> int:
        """Resident memory now."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def a_runtime(*flags: str, model: Path = EMBEDDED_MODEL, name: str = MODEL_NAME, threads: int = 1) -> Iterator[Server]:
    """`slipway-runtime serve`, ready. One thread by default: spinning barriers on shared cores ruin every figure."""
    with tempfile.TemporaryDirectory(prefix="slipway-run-") as run:
        environment = {"OMP_NUM_THREADS": str(threads), "SLIPWAY_RUN_DIR": run}
        command = [_script("slipway-runtime"), "serve", f"file://{model}", "--served-name", name, *flags]
        with _serving(command, Path(run) / "runtime.log", environment) as server:
            yield server


@contextmanager
def a_gateway(*routes: tuple[str, str], environment: Mapping[str, str] | None = None) -> Iterator[Server]:
    """`slipway-gateway`, ready: with these pairs of model and URL, or watching the cluster of `environment`."""
    with tempfile.TemporaryDirectory(prefix="slipway-run-") as run:
        static = ["--static", ",".join(f"{model}={url}" for model, url in routes)] if routes else []
        command = [_script("slipway-gateway"), *static]
        with _serving(command, Path(run) / "gateway.log", environment or {}) as server:
            yield server


@contextmanager
def a_module(name: str, *flags: str) -> Iterator[Server]:
    """`python -m bench.<name>`: a server that exists to be measured against."""
    with tempfile.TemporaryDirectory(prefix="slipway-run-") as run:
        environment = {"PYTHONPATH": str(EMBEDDED_MODEL.parent.parent)}
        command = [sys.executable, "-m", f"bench.{name}", *flags]
        with _serving(command, Path(run) / f"{name}.log", environment) as server:
            yield server


@contextmanager
def _serving(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> Iterator[Server]:
    port, admin_port = free_ports(2)
    arguments = ["--host", "127.0.0.1", "--port", str(port), "--admin-port", str(admin_port)]
    with served_by([*command, *arguments], log, environment, (port, admin_port)) as server:
        yield server


@contextmanager
def served_by(
    command: Sequence[str],
    log: Path,
    environment: Mapping[str, str],
    ports: tuple[int, int],
    *,
    ready: str = "/ready",
    version: str = "",
) -> Iterator[Server]:
    """Any command that answers on these two ports, with the path `ready` on the second one, once it is ready."""
    port, admin_port = ports
    # The process goes when we go, even if we are killed.
    tied = ["setpriv", "--pdeathsig", "TERM"] if shutil.which("setpriv") else []
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*tied, *command], env={**os.environ, **environment}, stdout=output, stderr=subprocess.STDOUT
        )
    server = Server(process, port, admin_port, log, version)
    try:
        _await_ready(server, ready)
        yield server
    finally:
        stop(server)


def stop(server: Server) -> int:
    """SIGTERM, and SIGKILL when that is not enough; the exit status."""
    if server.process.poll() is None:
        server.process.send_signal(signal.SIGTERM)
    try:
        return server.process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        server.process.kill()
        return server.process.wait()


def _await_ready(server: Server, path: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise ServerFailedError(f"exit status {server.process.returncode}:\n{_tail(server.log)}")
        try:
            with urllib.request.urlopen(f"{server.admin_url}{path}", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise ServerFailedError(f"not ready after {START_SECONDS:.0f} s:\n{_tail(server.log)}")


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-2000:]


def _script(name: str) -> str:
    return str(Path(sys.executable).parent / name)


def free_ports(count: int) -> list[int]:
    """Free ports; all are held until all are known, so that they differ."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [held.getsockname()[1] for held in sockets]
    for held in sockets:
        held.close()
    return ports
