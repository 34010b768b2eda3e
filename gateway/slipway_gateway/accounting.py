"""Accounts for what tenants use: tokens by kind, refused requests, and an audit record for each request.

| kind     | tokens                                                                              |
|----------|-------------------------------------------------------------------------------------|
| input    | of prompts, those from the cache included                                           |
| cached   | of these, those that the replica had in its cache                                   |
| output   | of answers                                                                          |
| rejected | that refused requests would have used, estimated                                    |

Numbers are the runtime's own where its answer has a `usage`. A stream has one only if its client asked for it
(`stream_options.include_usage`); else each event counts as one token of output, and four bytes of the request as one of
input: `estimated` in the audit record.
"""

from collections.abc import Collection
from typing import Final

import structlog
from prometheus_client import CollectorRegistry, Counter

from slipway_gateway.request_state import RequestState

audit_log = structlog.get_logger("audit")

INPUT: Final = "input"
CACHED: Final = "cached"
OUTPUT: Final = "output"
REJECTED: Final = "rejected"


class Accounting:
    """The counters of all tenants, and the audit log."""

    def __init__(self, registry: CollectorRegistry, *, audit: bool = False) -> None:
        self.registry = registry
        self.audits = audit
        self._tokens = Counter(
            "slipway_gateway_tokens", "Tokens by kind: input, cached (part of input), output, rejected",
            ["tenant", "model", "service", "adapter", "kind"], registry=registry,
        )  # fmt: skip
        self._denied = Counter(
            "slipway_gateway_tenant_denied", "Requests beyond a limit of their tenant", ["tenant", "limit"],
            registry=registry,
        )  # fmt: skip
        self._unauthenticated = Counter(
            "slipway_gateway_unauthenticated", "Requests without a valid key: missing, invalid, no_tenant", ["reason"],
            registry=registry,
        )  # fmt: skip

    def unauthenticated(self, reason: str) -> None:
        """A request came without a valid key."""
        self._unauthenticated.labels(reason).inc()

    def denied(self, record: RequestState, limit: str, tokens: int) -> None:
        """A request of this tenant would have exceeded `limit`."""
        record.tenant_limit = limit
        self._denied.labels(record.tenant, limit).inc()
        self._count(record, REJECTED, tokens)

    def query_denied(self, tenant: str, limit: str) -> None:
        """A request of this tenant that no replica answers would have exceeded `limit`."""
        self._denied.labels(tenant, limit).inc()

    def write(self, record: RequestState) -> None:
        """Count the tokens of an ended request, and write its audit record."""
        usage = record.usage()
        self._count(record, INPUT, usage.input)
        self._count(record, CACHED, usage.cached)
        self._count(record, OUTPUT, usage.output)
        if self.audits:
            audit_log.info(
                "audit",
                request_id=record.request_id,
                tenant=record.tenant,
                key=record.key,
                path=record.path,
                model=record.model,
                adapter=record.adapter,
                service=record.service,
                revision=record.revision,
                endpoint=record.endpoint,
                status=record.status,
                finish=record.finish or record.runtime_finish(),
                body_sha256=record.body_sha256,
                input_tokens=usage.input,
                cached_tokens=usage.cached,
                output_tokens=usage.output,
                estimated=usage.is_estimated,
                request_bytes=record.request_bytes,
                response_bytes=record.response_bytes,
            )

    def remove_stale(self, services: Collection[str], tenants: frozenset[str]) -> None:
        """Remove the series of services and tenants that are gone, so that their number stays bounded."""
        for counter, service_at in ((self._tokens, 2), (self._denied, None)):
            for values in list(counter._metrics):  # prometheus_client has no public list of what it counts
                is_gone = values[0] and values[0] not in tenants
                if is_gone or (service_at is not None and values[service_at] and values[service_at] not in services):
                    counter.remove(*values)

    def _count(self, record: RequestState, kind: str, tokens: int) -> None:
        if tokens > 0:
            labels = (record.tenant, record.model, record.service, record.adapter, kind)
            self._tokens.labels(*labels).inc(tokens)
