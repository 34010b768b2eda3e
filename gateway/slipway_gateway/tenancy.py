"""Authenticates requests, applies the limits of their tenants, and accounts for their tokens.

A request passes five points: `authenticate` and `refuse_excess` before its body is read, `check` when its model is
known, `admit` while it is being answered, and `account` when it has ended. Without configured tenants every request is
`ANYONE`'s, and the limits of the settings alone apply.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from typing import Any, Final

import msgspec
from aiohttp import web
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from slipway_api.names import HEADER_PRIORITY, HEADER_TENANT
from slipway_gateway.accounting import Accounting
from slipway_gateway.apis import GENERATING_PATHS, limit_field
from slipway_gateway.errors import (
    Refusal,
    bad_request,
    invalid_key,
    key_without_tenant,
    missing_key,
    rate_headers,
    tenant_limit,
    tenants_unreadable,
)
from slipway_gateway.limits import Denied, Limits
from slipway_gateway.listener import MAY_SEND
from slipway_gateway.request_body import EXPECTED_OUTPUT_TOKENS, Body, InferenceRequest
from slipway_gateway.request_state import BYTES_PER_TOKEN, RequestState
from slipway_gateway.tenants import ANYONE, MAX_KEY_CHARACTERS, Caller, TenantFiles, digest_of

CALLER: Final = web.RequestKey("slipway.caller", Caller)  # of a request that this gateway makes itself, for a batch

# The failed attempts of a request, for the batch worker.
ATTEMPT_FAILURES: Final = web.RequestKey("slipway.attempt_failures", tuple)
# Of a body that was refused by its headers: a client that is known and keeps its connection sends it first.
MAX_UNREAD_BYTES: Final = 16 << 20

_decode_raw = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class Tenancy(Collector):
    """The tenants of one gateway, and what they use."""

    def __init__(
        self,
        accounting: Accounting,
        files: TenantFiles | None = None,
        *,
        gateways: Callable[[], int] = lambda: 1,
        max_tokens: int = 0,
        default_max_tokens: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Without `files`, anyone may call. `max_tokens` and its default hold where a tenant has none; 0: no limit."""
        self._accounting = accounting
        self._files = files
        self._gateways = gateways
        self._max_tokens = max_tokens
        self._default_max_tokens = default_max_tokens
        self._clock = clock
        self._limits = Limits()
        accounting.registry.register(self)

    @property
    def is_open(self) -> bool:
        """Whether anyone may call, because no tenants are configured."""
        return self._files is None

    @property
    def fault(self) -> str:
        """What is wrong with the files of the tenants; empty: nothing."""
        if self._files is None:
            return ""
        self._files.refresh(self._clock())
        return self._files.fault

    @property
    def is_usable(self) -> bool:
        """Whether requests can be authenticated: there are good files, or were."""
        return self._files is None or self._files.refresh(self._clock()) is not None

    @property
    def gateways(self) -> int:
        """By how many gateways the limits are divided."""
        return max(1, self._gateways())

    @property
    def tenant_names(self) -> frozenset[str]:
        """The labels of all tenants that exist."""
        directory = self._files.refresh(self._clock()) if self._files is not None else None
        return directory.names if directory is not None else frozenset()

    def open_requests(self, tenant: str) -> int:
        """How many requests of this tenant are open here."""
        return self._limits.usage(tenant).open

    def authenticate(self, request: web.Request) -> Caller:
        """The caller whose key this request shows, or a Refusal. Requests of a batch bring their caller with them."""
        if isinstance(known := request.get(CALLER), Caller):
            return known
        if self._files is None:
            request[MAY_SEND] = MAX_UNREAD_BYTES
            return Caller(ANYONE)
        directory = self._files.refresh(self._clock())
        if directory is None:
            raise tenants_unreadable()
        key = _shown_key(request)
        if not key:
            self._accounting.unauthenticated("missing")
            raise missing_key()
        digest = digest_of(key) if len(key) <= MAX_KEY_CHARACTERS else ""
        caller = directory.callers.get(digest)
        if caller is not None:
            request[MAY_SEND] = MAX_UNREAD_BYTES
            return caller
        if digest in directory.unclaimed:
            self._accounting.unauthenticated("no_tenant")
            raise key_without_tenant()
        self._accounting.unauthenticated("invalid")
        raise invalid_key()

    def caller_of(self, tenant: str) -> Caller | None:
        """A caller of this tenant; None: there is no such tenant, or the files cannot be read."""
        if self._files is None:
            return None if tenant else Caller(ANYONE)
        directory = self._files.refresh(self._clock())
        found = (one for one in directory.tenants if one.label == tenant) if directory is not None else iter(())
        return next((Caller(one) for one in found), None)

    def check(self, caller: Caller, body: Body, inference: InferenceRequest, record: RequestState) -> None:
        """Refuse more tokens than the tenant may ask for; fill in the default.

        The model was resolved among what the tenant may use, so neither logs nor metrics name what it may not see.
        """
        if self._accounting.audits:
            record.body_sha256 = sha256(body.content).hexdigest()
        if record.path not in GENERATING_PATHS:
            return
        most = caller.tenant.max_tokens or self._max_tokens
        default = caller.tenant.default_max_tokens or self._default_max_tokens or most
        if inference.max_tokens is None:
            if default:
                set_max_tokens(body, min(default, most or default), limit_field(record.path))
        elif most and inference.max_tokens > most:
            name = limit_field(record.path)
            message = f"{name} is {inference.max_tokens}; this caller may ask for at most {most}."
            raise bad_request(message, param=name)

    def refuse_excess(self, caller: Caller, request: web.Request, record: RequestState) -> None:
        """Refuse a request beyond the tenant's rate or concurrency by its headers alone: a flood must cost little.

        Nothing is reserved: `admit` decides again, when the body is here.
        """
        denied = self._limits.over_requests(caller.tenant, self._clock(), gateways=self.gateways)
        if denied is not None:
            needed = (request.content_length or 0) // BYTES_PER_TOKEN + EXPECTED_OUTPUT_TOKENS
            self._accounting.denied(record, denied.limit, needed)
            raise tenant_limit(denied)

    @contextmanager
    def admit_query(self, request: web.Request) -> Iterator[Caller]:
        """Authenticate a request that no replica answers, such as a list of models, within the limits of its tenant.

        It counts as one request, without tokens; raises a Refusal if there is no place for it.
        """
        caller = self.authenticate(request)
        granted = self._limits.admit(caller.tenant, 0, self._clock(), gateways=self.gateways)
        if isinstance(granted, Denied):
            self._accounting.query_denied(caller.tenant.label, granted.limit)
            raise tenant_limit(granted)
        try:
            yield caller
        finally:
            self._limits.settle(caller.tenant, granted, 0, self._clock())

    @contextmanager
    def admit(self, caller: Caller, inference: InferenceRequest, record: RequestState) -> Iterator[None]:
        """Hold a place within the tenant's limits while the request is answered; a Refusal where there is none."""
        tenant, now = caller.tenant, self._clock()
        needed = record.request_bytes // BYTES_PER_TOKEN + (inference.max_tokens or EXPECTED_OUTPUT_TOKENS)
        granted = self._limits.admit(tenant, needed, now, gateways=self.gateways)
        if isinstance(granted, Denied):
            self._accounting.denied(record, granted.limit, needed)
            raise tenant_limit(granted)
        for standing in self._limits.standing(tenant, now, gateways=self.gateways):
            record.limit_headers |= rate_headers(standing)
        try:
            yield
        except asyncio.CancelledError:
            record.is_abandoned = bool(record.sent)
            raise
        except Refusal as refusal:
            record.is_abandoned = bool(record.sent) and refusal.status == 504
            raise
        finally:
            usage = record.usage()
            self._limits.settle(tenant, granted, usage.input + usage.output, self._clock())
            if self._files is not None:
                self._limits.forget_others(self.tenant_names)

    def account(self, record: RequestState) -> None:
        """Count what the ended request used, and write its audit record."""
        self._accounting.write(record)

    def collect(self) -> Iterator[Metric]:
        """The metrics of the tenants' state, read when Prometheus asks."""
        if self.is_open:
            return
        yield GaugeMetricFamily(
            "slipway_gateway_tenants_valid", "0 while the files of the tenants are wrong and the last good ones hold",
            value=int(not self.fault),
        )  # fmt: skip
        yield GaugeMetricFamily(
            "slipway_gateway_limits_divided_by", "Gateways among which the limits of tenants are divided",
            value=self.gateways,
        )  # fmt: skip
        open_now = GaugeMetricFamily(
            "slipway_gateway_tenant_open_requests", "Requests being answered", labels=["tenant"]
        )
        for tenant in sorted(self.tenant_names):
            open_now.add_metric([tenant], self.open_requests(tenant))
        yield open_now


def internal_headers(caller: Caller) -> dict[str, str]:
    """What the runtime is told of the caller. Without tenants nothing is: everybody shares one queue and one cache."""
    if not caller.tenant.label:
        return {HEADER_PRIORITY: str(caller.tenant.priority)} if caller.tenant.priority else {}
    return {HEADER_TENANT: caller.tenant.label, HEADER_PRIORITY: str(caller.tenant.priority)}


def _shown_key(request: web.Request) -> str:
    """The key that a request shows: as OpenAI's clients do, or in `x-api-key` as Anthropic's do; empty: none."""
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return request.headers.get("x-api-key", "").strip()


def set_max_tokens(body: Body, limit: int, name: str = "max_tokens") -> None:
    """Write the limit into a body that has none, or a higher one. Every other field stays as the client wrote it."""
    fields: dict[str, Any] = _decode_raw(body.content)
    fields.pop("max_completion_tokens", None)  # null, or not a number: the runtime would refuse both together
    fields[name] = msgspec.Raw(b"%d" % limit)
    body.content = msgspec.json.encode(fields)
