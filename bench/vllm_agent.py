"""Benchmark of the agent beside vLLM: its cost for tokens and for the operator, and the time to a requested pod.

| figure                    | how                                                                                      |
|---------------------------|------------------------------------------------------------------------------------------|
| delay of a token          | streams of a server on schedule, with an agent beside it and without, in turn            |
| requests through an agent | those that reach the server by another way than the clients' own: none                   |
| answer to the operator    | `/signals` of the agent, beside the engine's own metrics page, which it reads for it     |
| saturation → pod created  | as in `bench.saturation`, with the Engine vllm and a real agent in each pod              |
"""

import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import cast

import aiohttp
import msgspec

from bench import saturation
from bench.control_plane import SERVICE_SPEC, a_control_plane
from bench.figures import Figure, Section, share_of
from bench.servers import Server, a_module, free_ports, served_by
from bench.vllm_pods import ENGINE, VllmPlane
from slipway_api import names
from slipway_api.admin_token import token_digest
from slipway_api.dialect import ENV_DIALECT, built_in

TOKEN = "the token of a benchmark"
STREAMS, TOKENS, INTERVAL_MS = 20, 150, 20
ROUNDS = 3
POLL_SECONDS = 0.5  # the operator asks every 1.5 s
CALLS = 200
SERVICES = 4


def measure(services: int = SERVICES) -> Section:
    """All figures."""
    return Section(
        "The agent beside vLLM", (*asyncio.run(tokens_figures()), *asyncio.run(saturation_figures(services)))
    )


async def tokens_figures(
    streams: int = STREAMS, tokens: int = TOKENS, rounds: int = ROUNDS, calls: int = CALLS
) -> list[Figure]:
    """The delay of tokens with an agent and without, in turn, and the agent's own answers."""
    delays: dict[bool, list[float]] = {True: [], False: []}
    with a_module("vllm_shape") as engine:
        for _ in range(rounds):
            for has_agent in (False, True):
                with ExitStack() as stack:
                    agent = stack.enter_context(_an_agent(engine)) if has_agent else None
                    delays[has_agent] += await _stream(engine, agent, streams, tokens)
        with _an_agent(engine) as agent:
            cpu = agent.cpu_seconds()
            own = await _time(agent.admin_url + names.PATH_SIGNALS, calls)
            cpu = (agent.cpu_seconds() - cpu) / calls
            page = await _time(engine.url + names.PATH_METRICS, calls)
            memory = agent.rss_bytes()
        strangers = await _strangers(engine, expected=2 * rounds * streams)
    how = f"{streams} streams of a token every {INTERVAL_MS} ms"
    with_agent, without = (share_of(delays[has_agent], 0.5) for has_agent in (True, False))
    late, base = (share_of(delays[has_agent], 0.99) for has_agent in (True, False))
    return [
        Figure("a token's delay with the agent, p50", with_agent * 1e6, "µs", f"{without * 1e6:,.0f} without; {how}"),
        Figure("a token's delay with the agent, p99", late * 1e6, "µs", f"{base * 1e6:,.0f} without"),
        Figure("requests of clients through the agent", strangers, "", "tokens take no extra hop", at_most=0),
        Figure("the agent's answer to the operator, p50", share_of(own, 0.5) * 1e3, "ms", "it reads the metrics page"),
        Figure("the engine's metrics page, p50", share_of(page, 0.5) * 1e3, "ms", "without the agent"),
        Figure("the agent's CPU for an answer", cpu * 1e3, "ms", "one every 1.5 s while the replica is busy"),
        Figure("the agent's memory", memory / 2**20, "MiB", "its limit is 64 MiB", at_most=64),
    ]


@contextmanager
def _an_agent(engine: Server) -> Iterator[Server]:
    """An agent process beside this engine, ready."""
    (port,) = free_ports(1)
    with tempfile.TemporaryDirectory(prefix="slw") as run:
        command = [
            *(str(Path(sys.executable).with_name("slipway-agent")), "serve", "--engine-url", engine.url),
            *("--host", "127.0.0.1", "--admin-port", str(port)),
        ]
        environment = {
            "SLIPWAY_RUN_DIR": run,
            ENV_DIALECT: msgspec.json.encode(built_in("vllm").to_json()).decode(),
            names.ENV_ADMIN_TOKEN_SHA256: token_digest(TOKEN),
        }
        with served_by(command, Path(run) / "agent.log", environment, (engine.port, port)) as agent:
            yield agent


async def _stream(engine: Server, agent: Server | None, streams: int, tokens: int) -> list[float]:
    """Seconds from the write of each token to its arrival; the agent, if there is one, is asked for its signals."""
    body = {"model": "tiny", "stream": True, "max_tokens": tokens, "interval_ms": INTERVAL_MS, "messages": []}
    delays: list[float] = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def read() -> None:
            async with http.post(f"{engine.url}/v1/chat/completions", json=body) as response:
                delays.extend([(time.monotonic_ns() - written) / 1e9 async for written in _written(response)])

        async def poll(url: str) -> None:
            while True:
                async with http.get(url, headers={names.HEADER_ADMIN_TOKEN: TOKEN}) as response:
                    response.raise_for_status()
                await asyncio.sleep(POLL_SECONDS)

        polling = asyncio.create_task(poll(agent.admin_url + names.PATH_SIGNALS)) if agent is not None else None
        await asyncio.gather(*(read() for _ in range(streams)))
        if polling is not None:
            polling.cancel()
            outcome = (await asyncio.gather(polling, return_exceptions=True))[0]
            assert isinstance(outcome, asyncio.CancelledError), outcome
    return delays


async def _written(response: aiohttp.ClientResponse) -> AsyncIterator[int]:
    """When each token was written, in nanoseconds of the monotonic clock."""
    async for line in response.content:
        if line.startswith(b"data: {"):
            yield int(msgspec.json.decode(line[6:])["choices"][0]["delta"]["content"])


async def _time(url: str, calls: int) -> list[float]:
    """Seconds of each of so many answers, one after the other."""
    seconds = []
    async with aiohttp.ClientSession(headers={names.HEADER_ADMIN_TOKEN: TOKEN}) as http:
        for _ in range(calls):
            begun = time.perf_counter()
            async with http.get(url) as response:
                response.raise_for_status()
                await response.read()
            seconds.append(time.perf_counter() - begun)
    return seconds


async def _strangers(engine: Server, expected: int) -> int:
    """Requests for tokens that the engine has counted beyond those of the clients."""
    async with aiohttp.ClientSession() as http, http.get(f"{engine.url}/counted") as response:
        counted = (await response.json())["generations"]
    return int(counted) - expected


async def saturation_figures(services: int) -> list[Figure]:
    async with a_control_plane("vllm-saturation", VllmPlane) as plane:
        pods = cast(VllmPlane, plane)
        try:
            await pods.apply_engine()
            spec = dict(SERVICE_SPEC) | {
                "runtime": {"engine": ENGINE, "maxModelLen": 512, "maxNumSeqs": 8},
                "autoscaling": {"minReplicas": 1, "maxReplicas": 4},
            }
            whole, _ = await saturation.react(plane, spec, services)
        finally:
            await pods.close()
    how = f"of {services} services of vLLM with one busy replica and its agent each"
    return [
        Figure("saturation → requested pod of vLLM, p50", share_of(whole, 0.5), "s", how, at_most=2.0),
        Figure("saturation → requested pod of vLLM, worst", max(whole), "s", "asked every 1.5 s", at_most=2.0),
    ]
