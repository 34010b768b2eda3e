"""The agent process: watches the engine and answers on the admin port until SIGTERM."""

import asyncio
import signal
import sys
from contextlib import AsyncExitStack
from urllib.parse import urlsplit

import aiohttp
import structlog
from pydantic import ValidationError

from slipway_agent.adapters import Adapters
from slipway_agent.app import AdminPort
from slipway_agent.drain_socket import serve_drain_socket
from slipway_agent.drained_file import DrainedFile
from slipway_agent.engine import Engine
from slipway_agent.engine_certificate import EngineCertificate
from slipway_agent.port import Port
from slipway_agent.refusal import Refusal
from slipway_agent.replica import Replica
from slipway_agent.settings import AgentSettings
from slipway_api import internal_tls, names
from slipway_api.logs import configure
from slipway_api.runtime_api import BootList
from slipway_api.served_certificate import Certificate
from slipway_api.trust import Trust, TrustFile

log = structlog.get_logger()

MOST_ENGINE_CONNECTIONS = 16
MOST_BOOT_LIST_BYTES = 2**20  # of a ConfigMap


async def load_boot_list(settings: AgentSettings, adapters: Adapters) -> None:
    """Load the adapters that every start begins with; one that cannot be loaded is logged and listed as failed."""
    adapters.forget()
    if not adapters.most:
        return
    try:
        with settings.boot_list.open("rb") as file:
            listed = BootList.model_validate_json(file.read(MOST_BOOT_LIST_BYTES)).adapters
    except FileNotFoundError:
        return
    except (OSError, ValidationError) as error:
        log.error("the list of adapters cannot be read", path=str(settings.boot_list), error=type(error).__name__)
        return
    for one in listed:
        try:
            await adapters.load(one, seconds=None)
        except Refusal as refusal:
            log.warning("adapter of the boot list", adapter=one.name, status=refusal.status)


async def serve(settings: AgentSettings, stop: asyncio.Event) -> None:
    """Serve until `stop` is set."""
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=MOST_ENGINE_CONNECTIONS, use_dns_cache=False),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None),
                auto_decompress=False,
                trust_env=False,
            )
        )
        certificate, trust = _tls(settings)
        engine = Engine(session, settings.engine_url, trust=trust, name=settings.tls_name)
        replica = Replica(settings.dialect, engine)
        adapters = Adapters(settings.dialect, engine, most=settings.max_adapters)
        replica.on_boot = lambda: load_boot_list(settings, adapters)
        stack.push_async_callback(adapters.stop)
        stack.push_async_callback(replica.stop)
        if settings.tls_directory is not None and trust is not None:
            engine_port = urlsplit(settings.engine_url).port or names.SERVING_PORT
            served = EngineCertificate(settings.tls_directory, trust, settings.tls_name, engine_port)
            replica.outdated_certificate_ends = served.outdated_ends
            comparing = asyncio.create_task(served.watch())
            stack.callback(comparing.cancel)
        port = Port(AdminPort(settings, replica, adapters).app(), settings.bind, settings.port, certificate)
        await port.open(stack)
        file = DrainedFile(settings.drained_file, replica)
        replica.on_probe = file.follow
        if (control := await serve_drain_socket(replica, settings, file)) is not None:
            stack.callback(control.close)
        log.info("listening", admin_port=port.port, engine=settings.dialect.engine, engine_url=settings.engine_url)
        watching = asyncio.create_task(replica.watch())
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait({watching, stopped}, return_when=asyncio.FIRST_COMPLETED)
        for task in (watching, stopped):
            task.cancel()
        await asyncio.wait({watching, stopped})
        if not watching.cancelled():
            watching.result()  # it never ends by itself: raise what ended it


def _tls(settings: AgentSettings) -> tuple[Certificate | None, Trust | None]:
    """Certificate of the admin port, and authorities that verify the engine. Raises CertificateError."""
    directory = settings.tls_directory
    if directory is None:
        return None, None
    return Certificate(directory), TrustFile(directory / internal_tls.CA_FILE)


def run(settings: AgentSettings) -> int:
    """Run the agent; returns the exit code."""
    configure("agent", settings.log_level)

    async def until_signal() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await serve(settings, stop)

    try:
        asyncio.run(until_signal())
    except OSError as error:
        print(f"slipway-agent: {error}", file=sys.stderr)
        return 1
    return 0
