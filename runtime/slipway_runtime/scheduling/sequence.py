"""One answer inside the scheduler: its tokens, how far they are computed, the blocks it holds."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from slipway_runtime.messages import FinishReason, Request, SamplingParams, TokenLogprobs
from slipway_runtime.scheduling.block_pool import block_key
from slipway_runtime.scheduling.fairness import Share

NO_ROW = -1


class State(Enum):
    """Where a sequence is; preempted ones wait again."""

    WAITING = auto()
    RUNNING = auto()
    ENDED = auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """There is no prefill and no decode: `num_planned` chases the tokens, and the last known token samples the next.

    Plans are made before the results of earlier ones are known, so there are two marks. Up to `num_computed` the
    results are in. Up to `num_planned` the KV will be there when the plans in flight are executed. Draws in flight are
    tokens too (`num_pending`): the worker knows them first, and can compute them before they are known here.

    A preemption sets both marks to zero and keeps the tokens, so resuming is the same as starting.
    """

    request: Request
    index: int  # which of the request's answers
    params: SamplingParams  # the request's, with a seed of its own
    adapter: str  # the digest that it holds on to; empty: the base model, or one that was refused
    serial: int  # order of arrival
    max_tokens: int  # length at which it must end, prompt included
    keys: list[bytes]  # of the parent, then of each full block
    queued_at: float
    share: Share  # who is charged
    public_keys: list[bytes] = field(default_factory=list)  # as `keys`, of the service's own prompts: if asked for
    token_ids: list[int] = field(default_factory=list)
    state: State = State.WAITING
    row: int = NO_ROW
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_planned: int = 0
    num_pending: int = 0  # samples in flight, drafts not counted
    in_flight: int = 0  # plans in flight that it is in
    num_published: int = 0  # full blocks that others can find
    preemptions: int = 0
    paused: bool = False  # nobody reads what it says: nothing is planned for it
    cached_tokens: int = 0
    scheduled_at: float | None = None
    first_token_at: float | None = None
    finish_reason: FinishReason | None = None
    leader: "Sequence | None" = None  # computes the prompt for it
    siblings: "list[Sequence]" = field(default_factory=list)  # that wait for this one to compute the prompt
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # until they are told
    history: bytearray = field(default_factory=bytearray)  # the drafter's: its tokens, four bytes each
    draft_length: int = 0  # the drafter's: how many draft tokens are worth making; 0: not asked yet

    def __post_init__(self) -> None:
        self.token_ids.extend(self.request.prompt_token_ids)
        self.token_ids.extend(self.request.output_token_ids)

    @property
    def rank(self) -> tuple[int, int]:
        """Lower goes first: by priority, then by arrival."""
        return (-self.request.priority, self.serial)

    @property
    def num_tokens(self) -> int:
        """Tokens known so far: the prompt and what was sampled."""
        return len(self.token_ids)

    @property
    def num_ahead(self) -> int:
        """Tokens to plan: there, known or sampled in flight, and not planned yet. The last sample is never computed."""
        if self.paused:
            return 0
        length = len(self.token_ids) + self.num_pending
        return 0 if self.num_pending and length >= self.max_tokens else length - self.num_planned

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens that came with the request; stays the same over preemptions."""
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled so far, those sampled elsewhere before included."""
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def reads_cache(self) -> bool:
        """Whether it may use prefixes of others: a prompt that is scored, or averaged, must be computed whole."""
        if self.params.pools_all:
            return False
        return self.params.prompt_logprobs is None or self.first_token_at is not None

    def block_keys(self, count: int, block_size: int) -> list[bytes]:
        """The keys of its first `count` full blocks; each is computed once."""
        for index in range(len(self.keys) - 1, count):
            start = index * block_size
            self.keys.append(block_key(self.keys[index], self.token_ids[start : start + block_size]))
        return self.keys[1 : count + 1]

    def public_block_keys(self, count: int, block_size: int) -> Iterator[bytes]:
        """The same under the public root, each made when it is asked for: most prompts begin like none of them."""
        for index in range(count):
            if len(self.public_keys) == index + 1:
                start = index * block_size
                tokens = self.token_ids[start : start + block_size]
                self.public_keys.append(block_key(self.public_keys[index], tokens))
            yield self.public_keys[index + 1]

    def forget_computed(self) -> None:
        """Nothing of it is in the cache any more."""
        self.num_computed = self.num_planned = self.num_published = 0
        if not self.num_pending:  # else the sample in flight is the first token, and tells them
            self.prompt_logprobs.clear()
