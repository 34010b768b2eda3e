"""A node that loses its power or its network: what its replicas were sent is answered by others within ten seconds.

The node is a network namespace with replicas in it. When it is lost, its side drops every packet, as a machine without
power does: nothing is acknowledged, and no connection is closed.
"""

import asyncio
import os
import shutil
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.gateway.doubles import Runtime, a_caller, a_gateway

pytestmark = [
    pytest.mark.capability("RD-9"),
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None,
        reason="a network namespace needs root and the command ip: run it as root with iproute2 installed",
    ),
]

ROOT = Path(__file__).parents[2]
MOST_SECONDS = 10.0
THERE = "198.18.77.2"  # RFC 2544: for tests of networks; the other side of a /30
HERE = "198.18.77.1"


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def remove_leftovers():
    """Remove the nodes of test processes that were killed: their links would answer for this one's address."""
    for line in subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout.splitlines():
        name = line.split()[0]
        if name.startswith("lost") and not Path("/proc", name.partition("-")[2]).exists():
            subprocess.run(["ip", "link", "delete", name], check=False, capture_output=True)
            ip("netns", "delete", name)


@asynccontextmanager
async def a_node(*ports):
    """A node with a replica on each port; yields a function that loses it."""
    remove_leftovers()
    name = f"lost{len(ports)}-{os.getpid() % 10**7}"  # of the namespace and of the link to it
    ip("netns", "add", name)
    process = None
    try:
        ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("address", "add", f"{HERE}/30", "dev", name)
        ip("link", "set", name, "up")
        ip("-n", name, "address", "add", f"{THERE}/30", "dev", "eth0")
        ip("-n", name, "link", "set", "eth0", "up")
        process = await asyncio.create_subprocess_exec(
            *("ip", "netns", "exec", name, sys.executable, "-m", "tests.gateway.lost_replicas", THERE),
            *map(str, ports),
            cwd=ROOT,
            stdout=asyncio.subprocess.PIPE,
        )
        assert await process.stdout.readline() == b"ready\n"
        # Without routes it answers nothing; its link stays up, so nothing tells this side.
        yield lambda: ip("-n", name, "route", "flush", "table", "main")
    finally:
        if process is not None:
            process.kill()
            await process.wait()
        # The namespace outlives its name while its sockets wait for acknowledgements; its link would keep the address.
        ip("-n", name, "link", "delete", "eth0")
        ip("netns", "delete", name)


async def first_byte_of(caller, **fields):
    """Seconds until the first byte of an answer with status 200."""
    start = time.monotonic()
    async with caller.chat(**fields) as response:
        assert response.status == 200, await response.text()
        await response.content.readany()
        return time.monotonic() - start


@pytest.mark.parametrize("replicas", [1, 3], ids=["one replica there", "three of four replicas there"])
async def test_requests_to_a_lost_node_are_answered_elsewhere_within_ten_seconds(replicas):
    """Streams and whole answers, sent before the loss and after it, over open connections and new ones."""
    ports = range(8100, 8100 + replicas)
    async with (
        a_node(*ports) as lose,
        Runtime() as here,
        a_gateway(*(f"http://{THERE}:{port}" for port in ports), here) as gateway,
        a_caller(gateway) as caller,
    ):
        for name, endpoint in dict(gateway.fleet.table.endpoints).items():
            gateway.fleet.set_endpoint(name, replace(endpoint, node="there" if THERE in endpoint.url else "here"))
        await asyncio.gather(*(first_byte_of(caller, stream=True) for _ in range(24)))  # leaves open connections
        assert here.requests < 24, "the node that will be lost answered, too"
        held = [
            asyncio.create_task(first_byte_of(caller, stream=stream, user="hold"))
            for stream in (True, False)
            for _ in range(6)
        ]
        await asyncio.sleep(0.5)
        lose()
        lost_at = time.monotonic()
        waits = []
        while time.monotonic() < lost_at + 9:
            waits += [asyncio.create_task(first_byte_of(caller, stream=stream)) for stream in (True, False)]
            await asyncio.sleep(0.25)

        after = await asyncio.gather(*waits)
        held_for = [await one - 0.5 for one in held]  # since the loss
        assert max(after) < MOST_SECONDS, sorted(after)[-5:]
        assert max(held_for) < MOST_SECONDS, sorted(held_for)[-5:]
        print(f"longest first byte: {max(after):.1f} s sent after the loss, {max(held_for):.1f} s held before it")
        assert max(after) < 7, "an attempt on a second replica of the lost node would cost its own timeout"
        # Each probe of an ejected replica costs a connect timeout of 2 s.
        assert max(after[-8:]) < 3, "at the end only probes go to the lost replicas"
