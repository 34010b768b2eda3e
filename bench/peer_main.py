"""The command line of the small servers that `bench.servers.a_module` starts as processes of their own."""

import argparse
import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import uvloop


@dataclass(frozen=True)
class Addresses:
    """Where a server listens, and whom it asks."""

    host: str
    port: int
    admin_port: int
    upstream: str = ""


def serve_until_killed(name: str, serve: Callable[[Addresses], Awaitable[None]], *, has_upstream: bool = False) -> None:
    """Run `python -m bench.NAME --port … --admin-port …`, with `--upstream …` where it has one, until it is killed."""
    parser = argparse.ArgumentParser(prog=f"python -m bench.{name}")
    if has_upstream:
        parser.add_argument("--upstream", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--admin-port", type=int, required=True)
    addresses = Addresses(**vars(parser.parse_args()))

    async def run() -> None:
        await serve(addresses)
        await asyncio.Event().wait()

    uvloop.run(run())
