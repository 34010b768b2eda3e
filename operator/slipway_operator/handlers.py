"""The kopf handlers: startup, login, watch events of the custom resources, and cleanup. kopf runs nothing else.

`memo.manager` is the `Manager`, `memo.connect` says how to reach the API server, and `memo.watches` is the number of
watches that kopf keeps open; `serve` brings all three. A handler is five lines at most and never raises: an event only
puts an object into the store and its key into the queue. docs/adr/0001 explains what kopf is used for.
"""

import logging
from collections.abc import Mapping
from typing import Any

import aiohttp
import kopf

from slipway_kube.auth import Connection
from slipway_kube.backoff import Backoff
from slipway_kube.resources import INFERENCE_SERVICES, LORA_ADAPTERS, WARM_POOLS

KOPF_CONNECTIONS = 16  # beside its watches; without a bound, a thousand objects at start are a thousand TLS handshakes
FIRST_RETRY_SECONDS, LONGEST_RETRY_SECONDS = 1.0, 30.0


@kopf.on.startup(errors=kopf.ErrorsMode.PERMANENT)
async def start(settings: kopf.OperatorSettings, memo: kopf.Memo, **_: Any) -> None:
    """Fill the caches and campaign; kopf looks which kinds exist only after this returns, so ours do."""
    configure(settings)
    await memo.manager.start()


@kopf.on.cleanup(errors=kopf.ErrorsMode.PERMANENT)  # or kopf would try again in a minute
async def stop(memo: kopf.Memo, **_: Any) -> None:
    """Finish the running passes and release the Lease; kopf has stopped watching, and our tasks still run."""
    await memo.manager.stop()


@kopf.on.login()
async def login(memo: kopf.Memo, **_: Any) -> kopf.AiohttpSession:
    """Log in with the credentials that everything else uses, too."""
    return new_session(memo.connect(), watches=memo.watches)


@kopf.on.event(INFERENCE_SERVICES.group, INFERENCE_SERVICES.version, INFERENCE_SERVICES.plural)
async def inference_service(type: str | None, event: Mapping[str, Any], memo: kopf.Memo, **_: Any) -> None:
    """An InferenceService exists (None, at a listing), was ADDED, MODIFIED or DELETED."""
    memo.manager.heard(INFERENCE_SERVICES.kind, type, event["object"])


@kopf.on.event(WARM_POOLS.group, WARM_POOLS.version, WARM_POOLS.plural)
async def warm_pool(type: str | None, event: Mapping[str, Any], memo: kopf.Memo, **_: Any) -> None:
    """A WarmPool exists (None, at a listing), was ADDED, MODIFIED or DELETED."""
    memo.manager.heard(WARM_POOLS.kind, type, event["object"])


@kopf.on.event(LORA_ADAPTERS.group, LORA_ADAPTERS.version, LORA_ADAPTERS.plural)
async def lora_adapter(type: str | None, event: Mapping[str, Any], memo: kopf.Memo, **_: Any) -> None:
    """A LoRAAdapter exists (None, at a listing), was ADDED, MODIFIED or DELETED."""
    memo.manager.heard(LORA_ADAPTERS.kind, type, event["object"])


def configure(settings: kopf.OperatorSettings) -> None:
    """Switch off what writes, gives up, or needs more than our own kinds."""
    settings.peering.standalone = True  # leadership is a Lease, with a fence
    settings.scanning.disabled = True  # or it would need to list CRDs and namespaces
    settings.posting.enabled = False  # events come from our recorder, with series and a rate
    settings.networking.request_timeout = 30
    settings.networking.connect_timeout = 5
    # The default ends the process after 54 s of an API server that answers 5xx or 403.
    settings.networking.error_backoffs = Backoff(first=FIRST_RETRY_SECONDS, cap=LONGEST_RETRY_SECONDS, least=0.75)
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 330
    settings.watching.connect_timeout = 5
    settings.watching.chunk_size = 500


def new_session(connection: Connection, *, watches: int) -> kopf.AiohttpSession:
    """A new session for each login, since kopf closes the one it was given; the token is read anew per request.

    Each of its `watches` keeps a connection to itself: one for each kind in each watched namespace.
    """

    async def authenticate(
        request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        request.headers.update(await connection.credentials.headers())
        request.server_hostname = connection.tls_server_name
        return await handler(request)

    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=KOPF_CONNECTIONS + watches, ssl=connection.tls or True),
        proxy=connection.proxy,
        middlewares=(authenticate,),
    )
    return kopf.AiohttpSession(server=connection.server, aiohttp_session=session)


class RepeatedRefusals(logging.Filter):
    """Drops kopf's line for each further try of a namespace that may not be read; `ReadAccess` reports it once."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is logged."""
        text = record.getMessage()
        return "APIForbiddenError" not in text or "attempt #1 " in text
