"""Sequence: one answer of a request in the scheduler, with its tokens, computed counts and blocks; its stop check.

The stop check (end of sequence, stop tokens, length) ends it, and makes its outputs. Pure.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

import msgspec

from slipway_runtime.messages import FinishReason, Output, Request, SamplingParams, TokenLogprobs
from slipway_runtime.scheduling.block_pool import block_key
from slipway_runtime.scheduling.draft_pace import FIRST_PACE, Pace
from slipway_runtime.scheduling.fairness import Share

NO_ROW = -1


class State(Enum):
    """State of a sequence; a preempted one is waiting again."""

    WAITING = auto()
    RUNNING = auto()
    ENDED = auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """One answer. Prefill and decode are one: `num_planned` catches up with the tokens; the last one samples the next.

    Plans are made before the results of earlier ones are known, so there are two counts. The results of the first
    `num_computed` tokens are known. The KV of the first `num_planned` exists once the plans in flight are executed.
    Samples in flight are tokens too (`num_pending`): the worker can compute them before they are known here.

    A preemption sets both counts to zero and keeps the tokens, so resuming is the same as starting.
    """

    request: Request
    index: int  # which of the request's answers
    params: SamplingParams  # the request's, with a seed of its own
    adapter: str  # digest of its adapter; empty: the base model, or an adapter that was refused
    serial: int  # order of arrival
    max_tokens: int  # length at which it must end, prompt included
    keys: list[bytes]  # the root key, then that of each full block
    queued_at: float
    share: Share  # the counter that its tokens are charged to
    public_keys: list[bytes] = field(default_factory=list)  # as `keys`, under the public root; made on demand
    _tokens: list[int] = field(default_factory=list, init=False)  # empty until `token_ids` is read
    state: State = State.WAITING
    row: int = NO_ROW
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_planned: int = 0
    num_pending: int = 0  # samples in flight, drafts not counted
    in_flight: int = 0  # plans in flight that it is in
    num_published: int = 0  # full blocks that others can find
    has_text_blocks: bool = False  # whether text blocks of its prompt are still to be attached to its blocks
    preemptions: int = 0
    # `returns` of the pool when it last lacked blocks, and the keys with which its prefix would be longer.
    lacked_blocks: tuple[int, tuple[bytes, ...]] | None = None
    paused: bool = False  # not planned: its client does not read, or its grammar is not compiled yet
    cached_tokens: int = 0
    scheduled_at: float | None = None
    first_token_at: float | None = None
    finish_reason: FinishReason | None = None
    leader: "Sequence | None" = None  # computes the prompt for it
    siblings: "list[Sequence]" = field(default_factory=list)  # that wait for this one to compute the prompt
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # until they are sent
    history: bytearray = field(default_factory=bytearray)  # of the drafter: its tokens, four bytes each
    draft_length: int = 0  # draft tokens that prompt lookup makes next, set by Speculation; 0: none made yet
    pace: Pace = FIRST_PACE  # of the draft model
    drafted_by_model: bool = False  # the source of its last draft tokens

    def __post_init__(self) -> None:
        self.has_text_blocks = bool(self.request.text_blocks) and not self.index

    @property
    def rank(self) -> tuple[int, int]:
        """Sort key of running sequences, the lowest first: by priority, then by arrival."""
        return (-self.request.priority, self.serial)

    @property
    def token_ids(self) -> list[int]:
        """Its tokens known so far: the prompt and what was sampled.

        Copied from the request when they are first read: the answers that wait share their prompt.
        """
        if not self._tokens:
            self._tokens.extend(self.request.prompt_token_ids)
            self._tokens.extend(self.request.output_token_ids)
        return self._tokens

    @property
    def num_tokens(self) -> int:
        """The number of tokens known so far."""
        return len(self._tokens) or len(self.request.prompt_token_ids) + len(self.request.output_token_ids)

    @property
    def num_ahead(self) -> int:
        """Tokens, known or sampled in flight, that are not planned yet. The last possible token is never computed."""
        if self.paused:
            return 0
        length = self.num_tokens + self.num_pending
        return 0 if self.num_pending and length >= self.max_tokens else length - self.num_planned

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens that came with the request; stays the same over preemptions."""
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled so far, including those that came with the request."""
        return self.num_tokens - len(self.request.prompt_token_ids)

    @property
    def reads_cache(self) -> bool:
        """Whether it may use cached prefixes: for prompt logprobs or mean pooling, the prompt is computed whole."""
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
        """The same under the public root, each made on demand: most prompts begin like no public prompt."""
        for index in range(count):
            if len(self.public_keys) == index + 1:
                start = index * block_size
                tokens = self.token_ids[start : start + block_size]
                self.public_keys.append(block_key(self.public_keys[index], tokens))
            yield self.public_keys[index + 1]

    def forget_computed(self) -> None:
        """Reset the counts: its KV is no longer in its blocks."""
        self.num_computed = self.num_planned = self.num_published = 0
        self.has_text_blocks = bool(self.request.text_blocks) and not self.index
        if not self.num_pending:  # else the sample in flight is the first token, whose output has them
            self.prompt_logprobs.clear()


def reason_to_stop(sequence: Sequence, eos: frozenset[int]) -> FinishReason | None:
    """Why a sequence ends with its last known token; None: it goes on."""
    params, last = sequence.params, sequence.token_ids[-1]
    if last in eos and sequence.request.grammar is not None:
        return FinishReason.STOP  # the grammar is complete: neither min_tokens nor ignore_eos can add to the answer
    if sequence.num_output_tokens >= max(params.min_tokens, 1) and (
        (last in eos and not params.ignore_eos) or last in params.stop_token_ids
    ):
        return FinishReason.STOP
    return FinishReason.LENGTH if sequence.num_tokens >= sequence.max_tokens else None


def accept(
    sequence: Sequence,
    token_ids: tuple[int, ...],
    logprobs: tuple[TokenLogprobs, ...],
    eos: frozenset[int],
    now: float,
) -> Output:
    """Append sampled tokens up to the one that ends the sequence; the output with them. Later tokens are dropped."""
    count = 0
    for token_id in token_ids:
        sequence.token_ids.append(token_id)
        count += 1
        sequence.finish_reason = reason_to_stop(sequence, eos)
        if sequence.finish_reason is not None:
            break
    reason = sequence.finish_reason
    stop_token_id = sequence.token_ids[-1] if reason is FinishReason.STOP else None
    finished_at = None if reason is None else now
    if sequence.first_token_at is not None:
        return Output(
            request_id=sequence.request.id,
            index=sequence.index,
            token_ids=token_ids[:count],
            logprobs=logprobs[:count],
            finish_reason=reason,
            stop_token_id=stop_token_id,
            finished_at=finished_at,
            preemptions=sequence.preemptions,
        )
    sequence.first_token_at = now
    return Output(
        request_id=sequence.request.id,
        index=sequence.index,
        token_ids=token_ids[:count],
        logprobs=logprobs[:count],
        finish_reason=reason,
        stop_token_id=stop_token_id,
        prompt_logprobs=_prompt_logprobs(sequence),
        cached_tokens=sequence.cached_tokens,
        queued_at=sequence.queued_at,
        scheduled_at=sequence.scheduled_at,
        first_token_at=now,
        finished_at=finished_at,
        preemptions=sequence.preemptions,
    )


def with_embedding(output: Output, embedding: bytes) -> Output:
    """The output of a pooled prompt: its embedding, and no token."""
    return msgspec.structs.replace(output, embedding=embedding, token_ids=(), stop_token_id=None)


def with_drafts(output: Output, drafted: int, accepted: int) -> Output:
    """The output of a step that verified so many draft tokens, and how many of them were accepted."""
    return msgspec.structs.replace(output, draft_tokens=drafted, accepted_tokens=accepted)


def ended(sequence: Sequence, reason: FinishReason, error: str, now: float) -> Output:
    """The final output of an answer that ended without a sampled token, as by an abort."""
    told = sequence.first_token_at is not None
    return Output(
        request_id=sequence.request.id,
        index=sequence.index,
        finish_reason=reason,
        error=error,
        queued_at=None if told else sequence.queued_at,
        scheduled_at=None if told else sequence.scheduled_at,
        finished_at=now,
        preemptions=sequence.preemptions,
    )


def _prompt_logprobs(sequence: Sequence) -> tuple[TokenLogprobs | None, ...] | None:
    if sequence.params.prompt_logprobs is None:
        return None
    scored = tuple(sequence.prompt_logprobs[: sequence.num_prompt_tokens - 1])  # the last one scores the first sample
    sequence.prompt_logprobs.clear()
    return (None, *scored)
