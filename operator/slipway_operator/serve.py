"""The operator process: reads the settings, builds the manager, and runs kopf.

kopf is the main coroutine of the one event loop. It takes SIGTERM and SIGINT, starts and stops the manager through
the handlers of `handlers.py`, and cancels every task of its loop at the very end, when ours are gone.
"""

import argparse
import asyncio
import logging
import sys
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import kopf
import structlog
from kopf._cogs.clients import watching as kopf_watching
from kopf._core.engines.peering import Identity
from pydantic import ValidationError

from slipway_api import __version__, logs, names
from slipway_api.trust import Trust
from slipway_kube import auth
from slipway_kube.client import Client
from slipway_kube.errors import KubeError, NoCredentials
from slipway_operator import handlers as handlers  # the import registers the handlers
from slipway_operator.ending import run_until_stopped
from slipway_operator.installation_engines import apply_engines, read_engines
from slipway_operator.installation_keys import create_missing_keys
from slipway_operator.keepalive import KeptConnections
from slipway_operator.manager import Manager, exempt_caches_from_collection
from slipway_operator.masters import MissingKey
from slipway_operator.metrics import OperatorMetrics
from slipway_operator.probes import serve_probes
from slipway_operator.replica_client import direct, through_api_server
from slipway_operator.settings import OperatorSettings, explain

log = structlog.get_logger()

HELP = """\
Runs InferenceServices as pods. Credentials for the Kubernetes API server: the account of its own pod, else KUBECONFIG.

environment:
  SLIPWAY_NAMESPACE         namespace of the release and of its Lease (slipway-system)
  SLIPWAY_LEASE_NAME        name of that Lease; each installation has its own (slipway-operator)
  POD_NAME                  name of this replica in the Lease (slipway-operator)
  POD_UID                   uid of this replica's pod: a restarted container takes its own Lease back immediately
  SLIPWAY_RUNTIME_IMAGE     image of runtimes whose service names none
  SLIPWAY_AGENT_IMAGE       image of slipway-agent, which stands beside other engines than the runtime
  SLIPWAY_GATEWAY_URL       base URL of the gateway, for status.url
  SLIPWAY_TENANTS           true: the gateway has tenants; a name may mean another service to each of them (false)
  SLIPWAY_MASTER_DIR        folder with the admin masters: current, and previous while rotating (/etc/slipway/admin)
  SLIPWAY_GATEWAY_KEY_DIR   folder with the gateway's key, likewise (/etc/slipway/gateway)
  SLIPWAY_GATEWAY_SELECTOR  labels of the gateways' pods in SLIPWAY_NAMESPACE; the operator reads their demand
  SLIPWAY_INTERNAL_TLS      true: replicas and the gateways' admin ports speak TLS (false)
  SLIPWAY_INSTALLATION      value `name` of the chart: the names of its certificates begin with it (slipway)
  SLIPWAY_NETWORK_POLICY    on: each service gets a NetworkPolicy for its replicas; off: none (on)
  SLIPWAY_DIRECT_ACCESS     Open or GatewayOnly, for new services whose spec names neither (Open)
  SLIPWAY_CLIENT_NAMESPACES comma-separated; their pods may call services with directAccess GatewayOnly
  SLIPWAY_METRICS_NAMESPACES comma-separated; their pods may scrape the replicas' admin port
  SLIPWAY_WATCH_NAMESPACES  comma-separated; empty means all
  SLIPWAY_POD_USER          USER:GROUP of the replicas, or platform: neither is set (65532:65532)
  SLIPWAY_OTLP_ENDPOINT     collector for the spans of replicas (OTLP over HTTP); empty: none are exported
  SLIPWAY_TRACE_RATIO       share of unremarkable traces that replicas export, as the gateway's (0.01)
  SLIPWAY_TRACE_SLOW_SECONDS seconds to the first token from which a request is slow, as the gateway's (10)
  SLIPWAY_REPLICA_ACCESS    direct: connect to pods; proxy: through the API server, when running outside the cluster
  SLIPWAY_ADMIN_PORT        port of /livez, /readyz and /metrics (8080)
  SLIPWAY_LOG_LEVEL         DEBUG, INFO, WARNING or ERROR (INFO)
"""


async def serve(settings: OperatorSettings, *, stop: asyncio.Event | None = None) -> None:
    """Run the whole operator, until SIGTERM, SIGINT or `stop`."""
    metrics, trust = OperatorMetrics(), Trust()
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(Client(auth.load(), user_agent=user_agent()))
        lease_client = await stack.enter_async_context(Client(auth.load(), user_agent=user_agent(), timeout=5.0))
        if settings.replica_access == "proxy":
            dial, serving_dial = through_api_server(client), through_api_server(client, port=names.SERVING_PORT)
        else:
            connections = KeptConnections(trust)
            stack.callback(connections.close)
            dial, serving_dial = direct(connections), direct(connections, port=names.SERVING_PORT)
        manager = Manager(
            settings,
            client,
            lease_client,
            dial,
            metrics,
            serving_dial=serving_dial,
            trust=trust,
            on_synced=exempt_caches_from_collection,
        )
        admin_port = await stack.enter_async_context(
            serve_probes(settings.admin_port, alive=manager.alive, ready=manager.ready, metrics=metrics)
        )
        log.info("operator started", version=__version__, identity=settings.identity, admin_port=admin_port)
        operator = kopf.operator(
            memo=kopf.Memo(
                manager=manager,
                connect=auth.load,
                watches=len(manager.kinds) * max(1, len(settings.watch_namespaces)),
            ),
            standalone=True,
            # kopf would ask for the name of the user, and on OpenShift a user has none.
            identity=Identity(settings.identity),
            clusterwide=not settings.watch_namespaces,
            namespaces=settings.watch_namespaces,
            stop_flag=stop,
        )
        await run_until_stopped(operator, manager.stopped)
    log.info("operator stopped")


async def create_keys(settings: OperatorSettings, secrets: Sequence[str]) -> None:
    """Create the Secrets that do not exist yet in the namespace of the release."""
    async with Client(auth.load(), user_agent=user_agent()) as client:
        await create_missing_keys(client, settings.namespace, secrets, sleep=asyncio.sleep)


async def apply_shipped_engines(engines: Sequence[dict[str, Any]]) -> None:
    """Apply the Engines of the chart."""
    async with Client(auth.load(), user_agent=user_agent()) as client:
        await apply_engines(client, engines, sleep=asyncio.sleep)


def _command(arguments: argparse.Namespace, settings: OperatorSettings) -> Coroutine[None, None, None]:
    if arguments.command == "create-keys":
        return create_keys(settings, arguments.names)
    if arguments.command == "apply-engines":
        return apply_shipped_engines(read_engines(Path(*arguments.names)))
    return serve(settings)


def user_agent() -> str:
    """The User-Agent header, which the API server's audit log records."""
    return f"slipway-operator/{__version__}"


def run() -> None:
    """Run the operator with the settings of the environment."""
    parser = argparse.ArgumentParser(
        prog="slipway-operator", description=HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"slipway-operator {__version__} ({names.API_VERSION})")
    parser.add_argument(
        "command",
        nargs="?",
        choices=["run", "create-keys", "apply-engines"],
        default="run",
        help="run the operator (the default); or create the Secrets of its keys that do not exist, and end; or apply "
        "the Engines of a folder, and end",
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="of create-keys: Secrets in SLIPWAY_NAMESPACE; of apply-engines: the folder with their JSON files",
    )
    arguments = parser.parse_args()
    try:
        settings = OperatorSettings()
    except ValidationError as exc:
        sys.exit(f"slipway-operator: {explain(exc)}")
    try:
        logs.configure("operator", settings.log_level)
        # kopf logs at INFO that a handler succeeded, for each event of each object; its warnings are kept.
        logging.getLogger("kopf.objects").setLevel(logging.WARNING)
        logging.getLogger(kopf_watching.__name__).addFilter(handlers.RepeatedRefusals())
        asyncio.run(_command(arguments, settings))
    except (NoCredentials, MissingKey, KubeError) as exc:
        sys.exit(f"slipway-operator: {exc}")
