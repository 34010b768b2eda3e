"""A minimal streaming proxy in the gateway's HTTP library: the peer that the gateway's cost is compared with.

It has no routing, retries, accounting, log or error events: the gateway's cost beyond it is the cost of those.
"""

import argparse
import asyncio

import aiohttp
import uvloop
from aiohttp import web


async def serve(upstream: str, host: str, port: int, admin_port: int) -> None:
    """Serve until killed."""
    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), auto_decompress=False)

    async def pass_on(request: web.Request) -> web.StreamResponse:
        async with session.post(upstream + request.path_qs, data=await request.read()) as reply:
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
    for number in (port, admin_port):
        await web.TCPSite(runner, host, number, backlog=1024).start()
    await asyncio.Event().wait()


def main() -> None:
    """`python -m bench.bare_proxy`."""
    parser = argparse.ArgumentParser(prog="python -m bench.bare_proxy")
    parser.add_argument("--upstream", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--admin-port", type=int, required=True)
    options = parser.parse_args()
    uvloop.run(serve(options.upstream, options.host, options.port, options.admin_port))


if __name__ == "__main__":
    main()
