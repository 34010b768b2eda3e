"""The tests of the gateway run on its own event loop."""

import asyncio
from collections.abc import Callable, Mapping

from slipway_gateway.event_loop import UvLoop


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Called by pytest-asyncio for each test of this folder."""
    return {"uvloop": UvLoop}
