"""The plan and the report of a load run. Pure: no network, no clock."""

import ipaddress
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from bench.stream import Timings
from bench.workload import Workload

MAX_DURATION_SECONDS = 3600.0
MAX_CONCURRENCY = 1024


@dataclass(frozen=True)
class Slo:
    """Latency limits that a request must meet to count as good."""

    ttft_seconds: float = 1.0
    itl_seconds: float = 0.1  # the mean over one answer

    def kept_by(self, timings: Timings) -> bool:
        """Whether a finished request met both limits."""
        mean_gap = sum(timings.gaps) / len(timings.gaps) if timings.gaps else 0.0
        return timings.ttft <= self.ttft_seconds and mean_gap <= self.itl_seconds


@dataclass(frozen=True, kw_only=True)
class LoadPlan:
    """Requests to send. With `rate`, arrivals are an open loop; without, `concurrency` users ask again and again."""

    base_url: str  # http://127.0.0.1:8000/v1
    model: str
    concurrency: int = 8  # with `rate`: the most conversations open at once
    duration_seconds: float = 30.0  # new requests start until then; those that run are waited for
    max_requests: int | None = None
    rate: float | None = None  # conversations per second
    burst: float = 1.0  # with `rate`: arrivals come in bursts so many times as dense; 1: Poisson
    max_tokens: int = 64
    temperature: float = 0.7
    ignore_eos: bool = False  # every answer has `max_tokens` tokens, so that runs can be compared
    seed: int = 0
    workload: Workload = field(default_factory=Workload)
    slo: Slo = field(default_factory=Slo)
    cold_requests: int = 0  # the first so many are reported apart
    short_prompt_tokens: int = 0  # prompts of at most so many tokens are reported apart too
    request_timeout_seconds: float = 300.0
    retry_429: bool = True  # False: first attempts are what counts, and a 429 is a failure like any other

    def __post_init__(self) -> None:
        refuse_unless_loopback(self.base_url)
        if not 1 <= self.concurrency <= MAX_CONCURRENCY:
            raise ValueError(f"concurrency is 1..{MAX_CONCURRENCY}, not {self.concurrency}")
        if not 0 < self.duration_seconds <= MAX_DURATION_SECONDS:
            raise ValueError(f"duration is at most {MAX_DURATION_SECONDS:.0f} s, not {self.duration_seconds}")


@dataclass(frozen=True)
class Percentiles:
    """In seconds; zeros when nothing was measured."""

    p50: float = 0.0
    p95: float = 0.0
    p99: float = 0.0

    @classmethod
    def of(cls, values: Sequence[float]) -> "Percentiles":
        """Nearest-rank percentiles of `values`."""
        ordered = sorted(values)
        if not ordered:
            return cls()
        return cls(*(ordered[math.ceil(share * len(ordered)) - 1] for share in (0.50, 0.95, 0.99)))


@dataclass
class Progress:
    """Counts so far; sent = finished + failed + left + open."""

    sent: int = 0
    finished: int = 0
    failed: int = 0
    left: int = 0  # readers that went away in the middle, as planned
    retries_429: int = 0
    open: int = 0
    output_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """Result of a load run. A request that was answered after a 429 is not a failure; it is counted as retried."""

    sent: int
    finished: int
    failed: int
    left: int = 0
    retries_429: int
    retried: int = 0  # requests that were answered, but not at the first attempt
    failures: dict[str, int] = field(default_factory=dict)  # sentence -> how often
    revisions: dict[str, int] = field(default_factory=dict)  # which revision answered how often
    seconds: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    tokens_per_second: float = 0.0
    requests_per_second: float = 0.0
    ttft: Percentiles = field(default_factory=Percentiles)  # of the attempt that was accepted; cold ones are not in it
    itl: Percentiles = field(default_factory=Percentiles)
    cold_ttft: Percentiles = field(default_factory=Percentiles)  # of the first `cold_requests`
    short_ttft: Percentiles = field(default_factory=Percentiles)  # of prompts of at most `short_prompt_tokens`
    good: int = 0  # finished within the SLO: goodput is good / sent, and good / seconds
    shed_wait: Percentiles = field(default_factory=Percentiles)  # waiting that 429s asked for, of requests that met one


def refuse_unless_loopback(url: str) -> None:
    """Raise ValueError unless `url` is an address of this machine; names other than localhost are not looked up."""
    host = urlsplit(url).hostname or ""
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise ValueError(f"load goes only to this machine (127.0.0.1, ::1, localhost), not to {host or url!r}")
