"""slipway-operator: reads the settings, starts the manager, and lets kopf watch our kinds for it.

kopf is the shell, not the brain: it keeps one watch of InferenceServices alive and hands each event over. It runs in
a thread with a loop of its own, because when it stops it cancels every task of its loop that it did not find there.
"""

import argparse
import asyncio
import logging
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import aiohttp
import kopf
import structlog

from slipway_api import __version__, logs, names
from slipway_kube import auth, resources
from slipway_kube.client import Client
from slipway_kube.errors import NoCredentials
from slipway_operator.manager import Manager
from slipway_operator.masters import MissingKey
from slipway_operator.metrics import OperatorMetrics
from slipway_operator.probes import serve_probes
from slipway_operator.replica_client import direct, through_api_server
from slipway_operator.settings import InvalidSettings, OperatorSettings

log = structlog.get_logger()

Deliver = Callable[[str | None, Mapping[str, Any]], None]
"""(event type, object): where the shell hands over what it saw; called in the shell's thread."""

KOPF_CONNECTIONS = 16  # without a bound, a thousand objects at start are a thousand TLS handshakes
BACKOFF_SECONDS = 1.0  # the first; each is twice the one before
BACKOFF_CAP_SECONDS = 30.0
JOIN_SECONDS = 5.0

HELP = """\
Runs InferenceServices as pods. Needs credentials for a Kubernetes API server: those of its own pod, else KUBECONFIG.

environment:
  SLIPWAY_NAMESPACE         namespace of the release; the Lease lives there (slipway-system)
  POD_NAME                  name of this replica in the Lease (slipway-operator)
  SLIPWAY_RUNTIME_IMAGE     image of runtimes whose service names none
  SLIPWAY_GATEWAY_URL       base URL of the gateway, for status.url
  SLIPWAY_MASTER_DIR        folder with the admin masters: current, and previous while rotating (/etc/slipway/admin)
  SLIPWAY_GATEWAY_KEY_DIR   folder with the gateway's key, likewise (/etc/slipway/gateway)
  SLIPWAY_NETWORK_POLICY    on: each service gets a NetworkPolicy in front of its replicas; off: none (on)
  SLIPWAY_CLIENT_NAMESPACES comma-separated; their pods may call services with directAccess GatewayOnly
  SLIPWAY_METRICS_NAMESPACES comma-separated; their pods may scrape the replicas' admin port
  SLIPWAY_WATCH_NAMESPACES  comma-separated; empty means all
  SLIPWAY_REPLICA_ACCESS    direct: dial pods; proxy: through the API server, when running outside the cluster
  SLIPWAY_ADMIN_PORT        port of /livez, /readyz and /metrics (8080)
  SLIPWAY_LOG_LEVEL         DEBUG, INFO, WARNING or ERROR (INFO)
"""


class EndlessBackoff:
    """1, 2, 4 … 30, 30 s for ever, each up to a quarter shorter: an outage of the API server must not end kopf."""

    def __iter__(self) -> Iterator[float]:
        seconds = BACKOFF_SECONDS
        while True:
            yield seconds * random.uniform(0.75, 1.0)  # noqa: S311  spreads replicas, protects nothing
            seconds = min(BACKOFF_CAP_SECONDS, seconds * 2)


class NoDiff(kopf.DiffBaseStorage):
    """Keeps no copy of what was last seen: kopf would write it into the user's annotations."""

    def build(self, *, body: kopf.Body, extra_fields: Any = None) -> Any:
        """Nothing of an object is worth comparing: we are level-triggered."""
        return {}

    def fetch(self, *, body: kopf.Body) -> Any:
        """Nothing was stored."""
        return

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: Any) -> None:
        """Store nothing."""


class NoProgress(kopf.ProgressStorage):
    """Keeps no progress of handlers: ours have none."""

    def fetch(self, *, key: Any, body: kopf.Body) -> Any:
        """Nothing was stored."""
        return

    def store(self, *, key: Any, record: Any, body: kopf.Body, patch: kopf.Patch) -> None:
        """Store nothing."""

    def purge(self, *, key: Any, body: kopf.Body, patch: kopf.Patch) -> None:
        """Nothing is there to purge."""

    def touch(self, *, body: kopf.Body, patch: kopf.Patch, value: Any) -> None:
        """Touch nothing."""

    def clear(self, *, essence: Any) -> Any:
        """Nothing of ours is in it."""
        return essence


def kopf_settings() -> kopf.OperatorSettings:
    """kopf with everything switched off that writes, gives up, or needs more than our own kind."""
    settings = kopf.OperatorSettings()
    settings.peering.standalone = True
    settings.scanning.disabled = True
    settings.posting.enabled = False
    settings.persistence.diffbase_storage = NoDiff()
    settings.persistence.progress_storage = NoProgress()
    settings.networking.request_timeout = 30
    settings.networking.connect_timeout = 5
    settings.networking.error_backoffs = EndlessBackoff()
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 330
    settings.watching.connect_timeout = 5
    settings.watching.chunk_size = 500
    return settings


def kopf_registry(connect: Callable[[], auth.Connection], deliver: Deliver) -> kopf.OperatorRegistry:
    """The two handlers that kopf runs: how to log in, and what to do with an event."""
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    async def login(**_: Any) -> kopf.AiohttpSession:
        # A new session for each login, since kopf closes the one it was given; the token is read anew per request.
        connection = connect()

        async def authenticate(
            request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
        ) -> aiohttp.ClientResponse:
            request.headers.update(await connection.credentials.headers())
            request.server_hostname = connection.tls_server_name
            return await handler(request)

        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=KOPF_CONNECTIONS, ssl=connection.tls or True),
            proxy=connection.proxy,
            middlewares=(authenticate,),
        )
        return kopf.AiohttpSession(server=connection.server, aiohttp_session=session)

    kind = resources.INFERENCE_SERVICES

    @kopf.on.event(kind.group, kind.version, kind.plural, registry=registry)
    async def seen(type: str | None, event: Mapping[str, Any], **_: Any) -> None:
        deliver(type, event["object"])

    return registry


class Shell:
    """kopf in its own thread. It is started again should it ever end; the periodic list covers the gap."""

    def __init__(
        self,
        connect: Callable[[], auth.Connection],
        deliver: Deliver,
        *,
        namespaces: tuple[str, ...] = (),
        on_restart: Callable[[], None] = lambda: None,
    ) -> None:
        self._connect = connect
        self._deliver = deliver
        self._namespaces = namespaces
        self._on_restart = on_restart
        self._stopping = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop_flag: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name="kopf", daemon=True)

    def start(self) -> None:
        """Watch from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Ask it to end; `join` waits for that."""
        self._stopping.set()
        loop, flag = self._loop, self._stop_flag
        if loop is not None and flag is not None and not loop.is_closed():
            loop.call_soon_threadsafe(flag.set)

    def join(self, seconds: float = JOIN_SECONDS) -> bool:
        """Wait until it has ended; False when it did not in time. The thread never keeps the process alive."""
        if self._thread.ident is not None:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        for seconds in EndlessBackoff():
            try:
                asyncio.run(self._watch())
            except Exception:
                log.exception("kopf ended")
            if self._stopping.wait(seconds):
                return
            self._on_restart()

    async def _watch(self) -> None:
        self._loop, self._stop_flag = asyncio.get_running_loop(), asyncio.Event()
        if self._stopping.is_set():
            return
        await kopf.operator(
            registry=kopf_registry(self._connect, self._deliver),
            settings=kopf_settings(),
            standalone=True,
            clusterwide=not self._namespaces,
            namespaces=self._namespaces,
            stop_flag=self._stop_flag,
        )


async def run(settings: OperatorSettings, *, stop: asyncio.Event | None = None) -> None:
    """The whole operator, until SIGTERM, SIGINT or `stop`."""
    stop = stop or asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)

    metrics = OperatorMetrics()
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(Client(auth.load(), user_agent=user_agent()))
        lease_client = await stack.enter_async_context(Client(auth.load(), user_agent=user_agent(), timeout=5.0))
        if settings.replica_access == "proxy":
            dial = through_api_server(client)
        else:
            dial = direct(await stack.enter_async_context(aiohttp.ClientSession()))
        manager = Manager(settings, client, lease_client, dial, metrics)

        def deliver(type: str | None, body: Mapping[str, Any]) -> None:
            loop.call_soon_threadsafe(partial(manager.world.saw_service, type, body))

        shell = Shell(
            auth.load,
            deliver,
            namespaces=settings.watch_namespaces,
            on_restart=metrics.shell_restarts.inc,
        )
        admin_port = await stack.enter_async_context(
            serve_probes(settings.admin_port, alive=manager.alive, ready=manager.ready, metrics=metrics)
        )
        starting = asyncio.create_task(_start_when_listed(shell, manager))
        log.info("operator started", version=__version__, identity=settings.identity, admin_port=admin_port)
        try:
            await manager.run(stop)
        finally:
            # The Lease is given back by now: the next leader works already while kopf takes its time.
            starting.cancel()
            shell.stop()
            await asyncio.to_thread(shell.join)
    log.info("operator stopped")


async def _start_when_listed(shell: Shell, manager: Manager) -> None:
    # kopf looks only once which kinds exist; our list has succeeded by then, so ours does.
    await manager.listed.wait()
    shell.start()


def user_agent() -> str:
    """How the API server's audit log names us."""
    return f"slipway-operator/{__version__}"


def main() -> None:
    """Entry point of the `slipway-operator` command."""
    parser = argparse.ArgumentParser(
        prog="slipway-operator", description=HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"slipway-operator {__version__} ({names.API_VERSION})")
    parser.add_argument("command", nargs="?", choices=["run"], default="run", help="run the operator (the default)")
    parser.parse_args()
    try:
        settings = OperatorSettings.from_environment(os.environ)
        logs.configure("operator", settings.log_level)
        # kopf tells at INFO that a handler succeeded, for each event of each object; its warnings are welcome.
        logging.getLogger("kopf.objects").setLevel(logging.WARNING)
        asyncio.run(run(settings))
    except (InvalidSettings, NoCredentials, MissingKey) as exc:
        sys.exit(f"slipway-operator: {exc}")


if __name__ == "__main__":
    main()
