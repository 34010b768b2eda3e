"""The scorers of candidate endpoints: each returns 0..1, higher is better; they are combined with weights.

| scorer             | 1 for                                                        | weight |
|--------------------|--------------------------------------------------------------|--------|
| adapter_residency  | an endpoint that has the request's adapter loaded            | 16     |
| prefix_match       | an endpoint that was sent the whole prompt before            | 16     |
| home               | the home of the session, or of a prompt that is known nowhere | 2      |
| least_load         | an endpoint without load                                     | 1      |
| kv_headroom        | an endpoint whose KV cache is empty                          | 0.5    |

The weights make an order: a match of an eighth of the prompt beats the home, and the home beats any difference in load
within the bound of `affinity.within_bound`, so that all gateways send a new prompt to the same endpoint.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from slipway_gateway.picker.endpoints import Endpoint

# A request of which only the count is known, as a replica reports it of other gateways' requests.
UNKNOWN_REQUEST_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """The properties of a request that the picker uses."""

    model: str
    cost: int = 0  # of prompt and answer, estimated in tokens
    prompt_tokens: int = 0  # of these, the prompt's
    pin: str = ""  # the revision that the client insists on
    cohort: str = ""  # the user whose requests go to one revision of a split; empty: each request is drawn
    adapter: str = ""  # the adapter that shall answer; empty: the base model
    session: str = ""  # requests of one session go to one endpoint; empty: no session is known
    blocks: tuple[int, ...] = ()  # chained hashes of the prompt's blocks (`prefix.block_hashes`)
    prompt_bytes: int = 0  # of the text that the blocks were cut from


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """What a replica reported of itself beside an answer."""

    kv_usage: float = 0.0  # 0..1
    # Requests that wait there and were not sent by this gateway. Running ones are left out: as a number of the past it
    # made gateways run after each other (bench/routing.py: mean TTFT of LeastLoad 1.3 × round robin's).
    foreign_waiting: int = 0


@dataclass(slots=True)
class Candidate:
    """An endpoint, its load, and what it has in its caches for this request.

    Made anew for every pick and not frozen: a frozen one takes three times as long, and there is one for each endpoint.
    """

    endpoint: Endpoint
    outstanding_tokens: int = 0
    outstanding_requests: int = 0
    reported: ReplicaLoad | None = None  # None: nothing is known, or it is too old
    matched_tokens: int = 0  # of the prompt, which the endpoint was sent before
    matched_share: float = 0.0  # the same as a share of the prompt
    is_home: bool = False
    load_tokens: int = field(init=False)  # of work: this gateway's own, and of others what waits there

    def __post_init__(self) -> None:
        foreign = self.reported.foreign_waiting if self.reported is not None else 0
        self.load_tokens = self.outstanding_tokens + foreign * UNKNOWN_REQUEST_TOKENS


# All candidates at once, since "least" is a comparison; one score for each, in their order.
Scorer = Callable[[RoutingRequest, Sequence[Candidate]], Sequence[float]]


def least_load(request: RoutingRequest, candidates: Sequence[Candidate]) -> list[float]:
    """1 for an idle replica, 0 for the busiest: load is counted in tokens, since requests differ a thousandfold."""
    busiest = max((candidate.load_tokens for candidate in candidates), default=0)
    if busiest == 0:
        return [1.0] * len(candidates)
    return [1.0 - candidate.load_tokens / busiest for candidate in candidates]


def kv_headroom(request: RoutingRequest, candidates: Sequence[Candidate]) -> list[float]:
    """The free share of the KV cache; an endpoint that reported nothing counts as the mean of the others."""
    known = [candidate.reported.kv_usage for candidate in candidates if candidate.reported is not None]
    mean = sum(known) / len(known) if known else 0.0
    usages = (mean if one.reported is None else one.reported.kv_usage for one in candidates)
    return [1.0 - min(1.0, max(0.0, usage)) for usage in usages]


def prefix_match(request: RoutingRequest, candidates: Sequence[Candidate]) -> list[float]:
    """The share of the prompt that the endpoint was sent before."""
    return [candidate.matched_share for candidate in candidates]


def home(request: RoutingRequest, candidates: Sequence[Candidate]) -> list[float]:
    """1 for the home of the request's session or prompt."""
    return [float(candidate.is_home) for candidate in candidates]


def adapter_residency(request: RoutingRequest, candidates: Sequence[Candidate]) -> list[float]:
    """1 for an endpoint that has the request's adapter loaded; without an adapter all are equal."""
    return [float(request.adapter in candidate.endpoint.adapters) for candidate in candidates]


def weighted_scores(
    request: RoutingRequest, candidates: Sequence[Candidate], scorers: Sequence[tuple[Scorer, float]]
) -> list[float]:
    """The weighted mean of all scorers, per candidate."""
    total = sum(weight for _, weight in scorers)
    sums = [0.0] * len(candidates)
    for scorer, weight in scorers:
        for index, score in enumerate(scorer(request, candidates)):
            sums[index] += score * weight / total
    return sums
