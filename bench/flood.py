"""Benchmark of isolation: one tenant's time to first token while another tenant floods the gateway and the runtime.

Tenant B asks at its usual rate: alone, beside tenant A at A's usual rate, and while A sends fifty times as much. The
gateway refuses what is beyond A's limits, and the runtime's queue is fair between tenants. Peers in the same run, each
before a runtime of its own: nginx with the same limits by key, and the gateway without tenants.
"""

import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import uvloop
import yaml

from bench.arrivals import poisson
from bench.figures import Figure, Section
from bench.nginx import an_nginx
from bench.packages import NoProgramError
from bench.plan import Percentiles
from bench.servers import MODEL_NAME, Server, a_gateway, a_runtime
from bench.stream import ShedError, StreamFailedError, chat_stream
from slipway_gateway.tenants import digest_of

SECONDS = 10.0  # of each phase
ROUNDS = 2
USUAL_RATE = 2.0  # requests a second, of either tenant; a's limit
FLOOD_RATE = 100.0
CONCURRENCY = 4  # of tenant A
PER_MINUTE = int(60 * USUAL_RATE)  # requests of tenant A, at any time of the minute: the gateway's and nginx's limit
MAX_TOKENS = 16
AIM = 1.5
KEYS = {"a": "sk-flood", "b": "sk-usual"}
PHASES = {"alone": 0.0, "beside": USUAL_RATE, "flooded": FLOOD_RATE}

NGINX_LIMITS = f"""
  limit_req_zone $http_authorization zone=rate:1m rate={USUAL_RATE:.0f}r/s;
  limit_conn_zone $http_authorization zone=open:1m;
  limit_req_status 429; limit_conn_status 429;
"""


@dataclass
class Samples:
    """The samples of one path to a runtime, by phase."""

    version: str = ""  # of a peer's program
    ttft: dict[str, list[float]] = field(default_factory=lambda: {phase: [] for phase in PHASES})
    failed: Counter[str] = field(default_factory=Counter)  # requests of B, by phase
    of_a: Counter[str] = field(default_factory=Counter)  # answers to the flood, by status

    def p95(self, phase: str) -> float:
        """Of B's time to first token, in milliseconds."""
        return Percentiles.of(self.ttft[phase]).p95 * 1e3


def measure(rounds: int = ROUNDS, seconds: float = SECONDS) -> Section:
    """B's P95 TTFT alone, beside A, and flooded by A."""
    paths: dict[str, Samples] = {}
    with ExitStack() as stack:
        servers = {
            "gateway": stack.enter_context(a_limited_gateway(stack.enter_context(a_runtime()))),
            "gateway without limits": stack.enter_context(
                a_gateway((MODEL_NAME, stack.enter_context(a_runtime()).url))
            ),
        }
        try:
            limits = [
                "proxy_buffering off",
                f"limit_req zone=rate burst={PER_MINUTE} nodelay",
                f"limit_conn open {2 * CONCURRENCY}",
            ]
            runtime = stack.enter_context(a_runtime())
            servers["nginx"] = stack.enter_context(an_nginx(runtime.url, *limits, http=NGINX_LIMITS))
        except NoProgramError as missing:
            print(f"without nginx: {missing}")
        for number in range(rounds):
            for name, server in servers.items():
                path = paths.setdefault(name, Samples(server.version))
                for phase, rate in PHASES.items():
                    _run_phase(server, path, phase, rate, seconds, seed=number)
    return _section(paths, rounds, seconds)


@contextmanager
def a_limited_gateway(runtime: Server) -> Iterator[Server]:
    """A gateway with the two tenants, of whom A has limits."""
    with tempfile.TemporaryDirectory(prefix="slipway-flood-") as folder:
        keys = Path(folder) / "keys"
        keys.mkdir()
        for tenant, key in KEYS.items():
            (keys / tenant).write_text(digest_of(key))
        limits = {"requestsPerMinute": PER_MINUTE, "concurrency": CONCURRENCY}
        tenants = [{"name": name, "keys": [name], "models": ["*"]} | (limits if name == "a" else {}) for name in KEYS]
        file = Path(folder) / "tenants.yaml"
        file.write_text(yaml.safe_dump({"tenants": tenants}))
        environment = {"SLIPWAY_TENANTS_FILE": str(file), "SLIPWAY_KEYS_DIRECTORY": str(keys)}
        with a_gateway((MODEL_NAME, runtime.url), environment=environment) as gateway:
            yield gateway


def _run_phase(server: Server, path: Samples, phase: str, rate: float, seconds: float, *, seed: int) -> None:
    with ExitStack() as stack:
        other = None
        if rate:
            # A process of its own: the flood must not delay the client that measures.
            command = [sys.executable, "-m", "bench.flooder", "--url", server.url, "--key", KEYS["a"]]
            other = stack.enter_context(
                subprocess.Popen(
                    [*command, "--rate", str(rate), "--seconds", str(seconds + 3)], stdout=subprocess.PIPE, text=True
                )
            )
            time.sleep(2)  # it starts, and fills what it can
        uvloop.run(_ask(server, path, phase, seconds, seed))
        if other is not None:
            output, _ = other.communicate(timeout=120)
            if phase == "flooded":
                path.of_a.update(json.loads(output))


async def _ask(server: Server, path: Samples, phase: str, seconds: float, seed: int) -> None:
    """Tenant B's requests, at its usual rate."""
    draw = random.Random(seed)
    end = time.monotonic() + seconds
    headers = {"Authorization": f"Bearer {KEYS['b']}"}
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session, asyncio.TaskGroup() as requests:

        async def ask(number: int) -> None:
            body: Mapping[str, object] = {
                "model": MODEL_NAME, "stream": True, "max_tokens": MAX_TOKENS,
                "messages": [{"role": "user", "content": f"Question {seed}.{phase}.{number}. " * 20}],
            }  # fmt: skip
            try:
                path.ttft[phase].append((await chat_stream(session, f"{server.url}/v1", body)).ttft)
            except (ShedError, StreamFailedError):
                path.failed[phase] += 1

        for number, pause in enumerate(poisson(USUAL_RATE, draw)):
            if time.monotonic() >= end:
                break
            requests.create_task(ask(number))
            await asyncio.sleep(pause)


def _section(paths: Mapping[str, Samples], rounds: int, seconds: float) -> Section:
    how = f"{USUAL_RATE:.0f} requests/s, {rounds} × {seconds:.0f} s"
    figures = []
    for name, path in paths.items():
        alone, flooded = path.p95("alone"), path.p95("flooded")
        beside = path.p95("beside")
        aim = f"aim {AIM}" if name == "gateway" else path.version or "peer, same run"
        figures += [
            Figure(f"{name}: B's P95 TTFT alone", alone, "ms", how),
            Figure(f"{name}: B's P95 TTFT beside A", path.p95("beside"), "ms", f"A: {USUAL_RATE:.0f} requests/s"),
            Figure(f"{name}: B's P95 TTFT, A floods", flooded, "ms", f"A: {FLOOD_RATE:.0f} requests/s"),
            Figure(f"{name}: flooded ÷ alone", flooded / alone if alone else float("inf"), "×", aim),
            Figure(f"{name}: flooded ÷ beside A", flooded / beside if beside else float("inf"), "×", "same run"),
            Figure(f"{name}: B's requests that failed", path.failed.total(), "", f"of {_count(path)}"),
            Figure(f"{name}: A's requests refused", path.of_a["429"], "", f"of {path.of_a.total()}"),
        ]
    return Section("Flood: a tenant's time to first token while another one floods", tuple(figures))


def _count(path: Samples) -> int:
    return sum(map(len, path.ttft.values())) + path.failed.total()
