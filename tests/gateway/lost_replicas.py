"""Replicas of a node that will be lost: `python -m tests.gateway.lost_replicas ADDRESS PORT…` runs in its namespace.

A request whose `user` is "hold" is accepted and never answered; all others are answered immediately.
"""

import asyncio
import sys

from aiohttp import web

from tests.gateway.doubles import Runtime, speak


async def speak_or_hold(runtime: Runtime, request: web.Request) -> web.StreamResponse:
    """Answer, unless the request asks to be held."""
    if runtime.bodies[-1].get("user") == "hold":
        await asyncio.Event().wait()
    return await speak(runtime, request)


async def main() -> None:
    """Serve until the process is killed."""
    address, *ports = sys.argv[1:]
    for port in ports:
        await Runtime(speak_or_hold, address=address, port=int(port)).__aenter__()
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
