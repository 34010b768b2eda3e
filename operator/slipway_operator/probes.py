"""Serves /livez, /readyz and /metrics on the operator's admin port, for the kubelet and Prometheus.

Alive means that the data is fresh, not that a port answers: a process whose watch has silently died must be
restarted, one whose API server is down must not, because a restart would not help and would lose the caches.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web

from slipway_operator.metrics import OperatorMetrics

Verdict = tuple[bool, str]
"""Yes or no, and the sentence that says why."""


@asynccontextmanager
async def serve_probes(
    port: int, *, alive: Callable[[], Verdict], ready: Callable[[], Verdict], metrics: OperatorMetrics
) -> AsyncIterator[int]:
    """Serve while the block runs; yields the port, which differs from the given one only if that is 0."""

    def answer(verdict: Callable[[], Verdict]) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handler(_request: web.Request) -> web.StreamResponse:
            is_well, sentence = verdict()
            return web.Response(text=sentence + "\n", status=200 if is_well else 503)

        return handler

    async def exposition(_request: web.Request) -> web.Response:
        return web.Response(body=metrics.exposition(), headers={"Content-Type": metrics.content_type})

    app = web.Application()
    app.router.add_get("/livez", answer(alive))
    app.router.add_get("/readyz", answer(ready))
    app.router.add_get("/metrics", exposition)
    # Nobody here sends a body: none is decompressed, and none is read.
    runner = web.AppRunner(app, access_log=None, handle_signals=False, auto_decompress=False, lingering_time=0)
    await runner.setup()
    try:
        # Port 0 is for tests: on all addresses it would be another port for each family.
        await web.TCPSite(runner, None if port else "127.0.0.1", port).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()
