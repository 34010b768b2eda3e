"""A minimal streaming proxy in the gateway's HTTP library: the peer that the gateway's cost is compared with.

It has no routing, retries, accounting, log or error events: the gateway's cost beyond it is the cost of those.
"""

import aiohttp
from aiohttp import web

from bench.peer_main import Addresses, serve_until_killed


async def serve(at: Addresses) -> None:
    """Begin to serve."""
    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), auto_decompress=False)

    async def pass_on(request: web.Request) -> web.StreamResponse:
        async with session.post(at.upstream + request.path_qs, data=await request.read()) as reply:
            response = web.StreamResponse(status=reply.status, headers={"Content-Type": reply.headers["Content-Type"]})
            await response.prepare(request)
            async for chunk in reply.content.iter_any():
                await response.write(chunk)
            return response

    async def ready(request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.router.add_post("/v1/chat/completions", pass_on)
    app.router.add_get("/ready", ready)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    for number in (at.port, at.admin_port):
        await web.TCPSite(runner, at.host, number, backlog=1024).start()


if __name__ == "__main__":
    serve_until_killed("bare_proxy", serve, has_upstream=True)
