"""Benchmark of idle connections: the memory that each of 10,000 keep-alive connections needs in the gateway.

Every connection has had one request answered and then waits, as those of clients with a pool do. Peers in the same
run: `bench.bare_proxy` (aiohttp without the gateway's limits), a bare asyncio server, and nginx where its package can
be had (it allocates its table of connections at the start). The clients are in processes of their own.
"""

import contextlib
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from bench.figures import Figure, Section
from bench.nginx import an_nginx
from bench.packages import NoProgramError
from bench.servers import MODEL_NAME, Server, a_gateway, a_module

CONNECTIONS = 10_000
CLIENTS = 4  # processes: the gateway admits 2,500 connections of one address
DESCRIPTORS = 2 * CONNECTIONS + 500  # of a server: the gateway keeps one free for the upstream side of each


def measure(connections: int = CONNECTIONS) -> Section:
    """KiB of resident memory for each idle connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = DESCRIPTORS
    if hard != resource.RLIM_INFINITY:
        with contextlib.suppress(ValueError, PermissionError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, max(hard, DESCRIPTORS)))  # root may
        allowed = min(DESCRIPTORS, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        connections = min(connections, (allowed - 500) // 2)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, max(hard, allowed)))  # the servers inherit it
    figures = []
    try:
        for name, start, path in _servers():
            try:
                figures += _measure_one(name, start, path, connections)
            except NoProgramError as missing:
                print(f"without {name}: {missing}")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, max(hard, allowed)))
    ours = figures[0].value
    ratios = [Figure(f"gateway ÷ {one.name}", ours / one.value, "×", "same run") for one in figures[1:] if one.value]
    return Section(f"Idle connections: memory of each of {connections:,}", (*figures, *ratios))


def _servers() -> Iterator[tuple[str, Callable[[], AbstractContextManager[Server]], str]]:
    yield "gateway", a_watched_gateway, "/v1/models"
    yield "bare aiohttp proxy", lambda: a_module("bare_proxy", "--upstream", "http://127.0.0.1:1"), "/ready"
    yield "bare asyncio server", lambda: a_module("bare_server"), "/ready"
    yield "nginx", lambda: an_nginx("http://127.0.0.1:1", connections=2 * CONNECTIONS), "/ready"


@contextmanager
def a_watched_gateway() -> Iterator[Server]:
    """A gateway that keeps idle connections for the whole measurement."""
    environment = {"SLIPWAY_IDLE_SECONDS": "600", "SLIPWAY_MAX_CONNECTIONS": str(CONNECTIONS + 100)}
    with a_gateway((MODEL_NAME, "http://127.0.0.1:1"), environment=environment) as gateway:
        yield gateway


def _measure_one(
    name: str, start: Callable[[], AbstractContextManager[Server]], path: str, connections: int
) -> list[Figure]:
    with start() as server, ExitStack() as stack:
        time.sleep(0.5)
        before = server.rss_bytes()
        each = connections // CLIENTS
        clients = [stack.enter_context(_client(server, number, each, path)) for number in range(CLIENTS)]
        opened = [client.stdout.readline() for client in clients if client.stdout]
        count = sum(int(line.split()[0]) for line in opened)
        time.sleep(2)
        during = server.rss_bytes()
        still_open = 0
        for client in clients:
            output, _ = client.communicate(timeout=60)
            still_open += int(output.split()[0])
        how = f"{still_open:,} of {count:,} open at the end, {(during - before) / 2**20:.0f} MiB"
        how += f"; {server.version}" if server.version else ""
        if count < each * CLIENTS:
            how += f"; {each * CLIENTS - count} failed: {opened[0].strip()}"
        return [Figure(name, (during - before) / max(1, count) / 1024, "KiB", how)]


def _client(server: Server, number: int, connections: int, path: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "bench.idler", "--host", "127.0.0.1", "--port", str(server.port)]
    command += ["--connections", str(connections), "--source", f"127.0.1.{number + 1}", "--path", path]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
