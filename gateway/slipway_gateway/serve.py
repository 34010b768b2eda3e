"""The gateway process: reads the settings, serves until SIGTERM, then shuts down without cutting a stream.

On SIGTERM: `/ready` is 503; the ports stay open while load balancers learn of it; then nothing new is accepted, running
answers finish within a limit, and the process exits with 0. A second signal skips the waiting.
"""

import asyncio
import resource
import signal
import sys

import prometheus_client
import structlog

from slipway_api.logs import configure
from slipway_api.otlp import NoOpenTelemetryError
from slipway_gateway.collector import collect_rarely
from slipway_gateway.event_loop import LOOPS, log_exception
from slipway_gateway.gateway import Gateway
from slipway_gateway.settings import GatewaySettings, SettingsError, read_settings
from slipway_kube.errors import KubeError

log = structlog.get_logger()


def raise_descriptor_limit() -> None:
    """Allow as many open connections as the system does: the default of a shell is far below what streams need."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def serve(settings: GatewaySettings) -> int:
    """Run until a signal; the exit status."""
    signals: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(log_exception)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number)
    async with Gateway(settings) as gateway:
        settled = asyncio.create_task(_collect_rarely_once_routed(gateway))
        signalled = asyncio.create_task(signals.get())
        watching = {gateway.watching} if gateway.watching else set()
        await asyncio.wait({signalled, *watching}, return_when=asyncio.FIRST_COMPLETED)
        if not signalled.done():
            assert gateway.watching is not None
            log.error("the watch ended", exc_info=gateway.watching.exception())
            return 1
        hurry = asyncio.Event()
        second = asyncio.create_task(signals.get())
        second.add_done_callback(lambda _: hurry.set())
        await gateway.leave(hurry)
        second.cancel()
        settled.cancel()
    return 0


async def _collect_rarely_once_routed(gateway: Gateway) -> None:
    await gateway.routes_known.wait()  # so that the routing table, too, is exempt from collections
    collect_rarely()


def run() -> None:
    """Run the gateway with the settings of the command line and the environment; exits with its status."""
    try:
        settings = read_settings(sys.argv[1:])
        configure("gateway", settings.log_level)
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # twice the series, and no dashboard shows them
        raise_descriptor_limit()
        with asyncio.Runner(loop_factory=LOOPS[settings.event_loop]) as runner:
            status = runner.run(serve(settings))
    except (SettingsError, NoOpenTelemetryError, KubeError, OSError) as error:
        sys.exit(f"slipway-gateway: {error}")
    sys.exit(status)
