"""The answers of a gateway's admin port, which the operator asks: demand for services, and outcomes of requests.

| path               | method | token | query               | answer                                              |
|--------------------|--------|-------|---------------------|-----------------------------------------------------|
| /internal/demand   | GET    | yes   | after, wait_seconds | DemandReport: immediately, or when it changes     |
| /internal/outcomes | GET    | yes   |                     | OutcomesReport: counters since the gateway's start   |

JSON is camelCase by alias, as in `runtime_api`. The operator adds up the reports of all gateways.
"""

from typing import Final

from pydantic import Field

from slipway_api.runtime_api import Body

# Upper bounds of the histograms of outcomes, in seconds; one more bucket counts what is above the last.
OUTCOME_BUCKETS: Final = (
    0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.065, 0.08, 0.1, 0.13, 0.16, 0.2, 0.25, 0.32, 0.4, 0.5, 0.65, 0.8,
    1.0, 1.3, 1.6, 2.0, 2.5, 3.2, 4.0, 5.0, 6.5, 8.0, 10.0, 16.0, 30.0, 60.0, 120.0, 300.0, 600.0,
)  # fmt: skip
LONGEST_DEMAND_WAIT_SECONDS: Final = 30.0


class AdapterDemand(Body):
    """Requests for an adapter in mode OnDemand that no replica has loaded."""

    adapter: str
    """The adapter's model name."""
    waiting_requests: int = Field(ge=1)
    """Requests that the gateway holds until a replica has it."""


class ServiceDemand(Body):
    """What clients ask of one service at one gateway."""

    service: str
    """<namespace>/<name>."""
    waiting_requests: int = Field(default=0, ge=0)
    """Requests that the gateway holds because no replica is ready."""
    waiting_bytes: int = Field(default=0, ge=0)
    """Memory of their bodies."""
    longest_wait_seconds: float = Field(default=0.0, ge=0)
    """How long the oldest of them has waited."""
    refused_requests: int = Field(default=0, ge=0)
    """Requests refused because the waiting room of the service was full, since it was last empty."""
    open_requests: int = Field(default=0, ge=0)
    """Requests sent to replicas and unfinished."""
    idle_seconds: float | None = Field(default=None, ge=0)
    """Since the last request arrived or ended; None: none since the gateway's start."""
    adapters: tuple[AdapterDemand, ...] = ()
    """Adapters of the service that requests wait for. Where the service has ready replicas, these requests are not
    among `waiting_requests`: another replica is not what they need."""


class DemandReport(Body):
    """The demand at one gateway. Asked with `after=<version>`, the gateway answers when the version is another one.

    The version changes when a service gets its first waiting or open request after having none, when the last waiting
    one is gone, when the open requests of a service have doubled, and when an adapter gets its first waiting request or
    has none any more, and at the first refused request and each doubling of their number: never with every request.
    """

    boot_id: str
    version: int = Field(ge=0)
    uptime_seconds: float = Field(default=0.0, ge=0)
    services: tuple[ServiceDemand, ...] = ()
    """Services with requests since the gateway's start."""


class RevisionOutcomes(Body):
    """The outcomes of the requests that one revision of a service has answered through one gateway."""

    service: str
    """<namespace>/<name>."""
    revision: str
    """Hash of the revision."""
    requests: int = Field(default=0, ge=0)
    """Requests that were sent to its replicas and ended; those that their client left do not count."""
    errors: int = Field(default=0, ge=0)
    """Of these, answered with a 5xx status, broken, or given up after attempts at its replicas; a request that another
    revision then answered is an error of this one."""
    ttft: tuple[int, ...] = ()
    """Time to first token of streams, from the attempt's start: a count for each bucket of `OUTCOME_BUCKETS`, and one
    above; not cumulated. Empty: none."""
    itl: tuple[int, ...] = ()
    """Time between two tokens of a stream, counted in the same way."""
    output_tokens: int = Field(default=0, ge=0)
    """Tokens of the answers, by their usage where it was reported, else one for each event of a stream."""


class ServiceOutcomes(Body):
    """The requests of one service as its clients saw them at one gateway: retried and held ones count once.

    Copies for a mirrored revision do not count. SLOs and cost are measured by these, canaries by `RevisionOutcomes`.
    """

    service: str
    """<namespace>/<name>."""
    requests: int = Field(default=0, ge=0)
    """Requests that ended, those without a replica too; not those that their client left or that a limit of the caller
    refused."""
    errors: int = Field(default=0, ge=0)
    """Of these, answered with a 5xx status or broken off."""
    good: int = Field(default=0, ge=0)
    """Of these, without an error and within the latency limits that `spec.slo` has."""
    ttft: tuple[int, ...] = ()
    """Of streams: from the whole request's arrival to the first token, as in `RevisionOutcomes`."""
    itl: tuple[int, ...] = ()
    """Time between two tokens of a stream, counted in the same way."""
    output_tokens: int = Field(default=0, ge=0)
    """Tokens of all answers, those that their client left included."""


class OutcomesReport(Body):
    """The outcomes at one gateway, counted since its start; another `boot_id` means that they began anew."""

    boot_id: str
    uptime_seconds: float = Field(default=0.0, ge=0)
    revisions: tuple[RevisionOutcomes, ...] = ()
    services: tuple[ServiceOutcomes, ...] = ()
