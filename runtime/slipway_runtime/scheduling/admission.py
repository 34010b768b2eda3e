"""Admission control: limits of the waiting queue, and the retry time of a refused request. Pure: time is an argument.

Refusals, as a tree:

    EngineError
    ├── Refused          this request can never run here (400)
    ├── Overloaded       retry later (429)
    │   └── Draining     this replica accepts no more requests; another one will (503)
    └── EngineDead       the step loop has ended; nothing will run here again (503)
"""

import math
from collections import deque
from dataclasses import dataclass

from slipway_runtime.messages import EngineFacts, EngineStats, Request

WINDOW_SECONDS = 10.0  # how far back the pace of the queue is measured
LONGEST_RETRY_SECONDS = 60.0
_INT32 = 2**31 - 1
_INT64 = 2**63 - 1
_FLOAT32 = 3.4e38  # beyond it a float32 is infinite


class EngineError(Exception):
    """A request that will not be generated."""


class Refused(EngineError):  # noqa: N818  the word of the domain, read in `except` lines
    """The request can never run on this engine; the message says which limit it breaks."""


class Overloaded(EngineError):  # noqa: N818  the word of the domain, read in `except` lines
    """The queue is full or too slow; `retry_after_seconds` is when room is expected."""

    def __init__(self, reason: str, retry_after_seconds: float) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retry_after_seconds = retry_after_seconds


class Draining(Overloaded):
    """The engine finishes its requests and refuses new ones."""


class EngineDead(EngineError):  # noqa: N818  the word of the domain, read in `except` lines
    """The step loop ended with an error."""


def refuse_impossible(request: Request, facts: EngineFacts) -> None:
    """Raise Refused for a request that this engine can never run."""
    length = len(request.prompt_token_ids)
    if length == 0:
        raise Refused("the prompt is empty: at least one token is needed")
    if length + (not facts.pooling) > facts.max_model_len:  # an embedding has no answer that needs a place
        raise Refused(
            f"the prompt has {length} tokens; this model takes {facts.max_model_len} tokens, prompt and output together"
        )
    if request.n < 1 or (request.n > 1 and request.output_token_ids):
        raise Refused(f"n is {request.n}: at least 1, and 1 for an answer that was started elsewhere")
    if request.params.max_tokens < 1:
        raise Refused(f"max_tokens is {request.params.max_tokens}: at least 1 is needed")
    refuse_out_of_range(request, facts)
    for name, tokens in (
        ("prompt", request.prompt_token_ids),
        ("output_token_ids", request.output_token_ids),
        ("stop_token_ids", request.params.stop_token_ids),
    ):
        if tokens and (min(tokens) < 0 or max(tokens) >= facts.vocab_size):
            raise Refused(f"{name} holds a token id outside the vocabulary of {facts.vocab_size} entries")


def refuse_out_of_range(request: Request, facts: EngineFacts) -> None:
    """Raise Refused for a number that the worker's arrays cannot hold.

    The client calls it first, and the engine again: in the worker such a number would end the step of all requests.
    """
    params = request.params
    for name, value, least, most in (
        ("top_k", params.top_k, 0, _INT32),
        ("min_tokens", params.min_tokens, 0, _INT32),
        ("seed", params.seed, -_INT64 - 1, 2 * _INT64 + 1 - request.n),  # its bits count; answer i adds i to it
        ("logprobs", params.logprobs or 0, 0, facts.vocab_size),
        ("prompt_logprobs", params.prompt_logprobs or 0, 0, facts.vocab_size),
        ("priority", request.priority, -_INT32, _INT32),
        *(("logit_bias", token_id, 0, facts.vocab_size - 1) for token_id, _ in params.logit_bias),
    ):
        if not least <= value <= most:
            raise Refused(f"{name} is out of range: from {least} to {most}")
    for name, number in (
        ("temperature", params.temperature),
        ("top_p", params.top_p),
        ("min_p", params.min_p),
        ("repetition_penalty", params.repetition_penalty),
        ("presence_penalty", params.presence_penalty),
        ("frequency_penalty", params.frequency_penalty),
        *(("logit_bias", bias) for _, bias in params.logit_bias),
    ):
        if not abs(number) <= _FLOAT32:
            raise Refused(f"{name} is not a finite number")


@dataclass(frozen=True)
class QueueLimits:
    """How long the queue may get. None: no limit of that kind."""

    max_requests: int = 1024
    max_tokens: int | None = None
    max_wait_seconds: float | None = 60.0


class Admission:
    """Predicts how long a new request would wait, and refuses one that would exceed the limits of the queue.

    The pace is requests started per second since the queue was last empty, at most WINDOW_SECONDS back. While no
    request has started, each batch of requests ahead is assumed to take as long as the queue has stood still so far.
    Prompts differ in length, so a second prediction uses computed tokens per second; the longer one counts. Worked: 3
    requests with 9,000 tokens wait, 2 started and 1,000 tokens were computed in each of the last seconds: 9 s, not 1.5.
    """

    def __init__(self, limits: QueueLimits, max_num_seqs: int) -> None:
        self.limits = limits
        self._max_num_seqs = max_num_seqs
        self._started = 0
        self._computed = 0
        # (time, requests started so far, tokens computed so far) since the queue was empty
        self._seen: deque[tuple[float, int, int]] = deque()

    def observe(self, stats: EngineStats, now: float) -> None:
        """Record the requests started and the tokens computed after one step."""
        self._started, self._computed = stats.started, stats.computed_tokens
        if stats.waiting == 0:
            self._seen.clear()
            return
        self._seen.append((now, stats.started, stats.computed_tokens))
        while len(self._seen) > 2 and self._seen[1][0] <= now - WINDOW_SECONDS:
            self._seen.popleft()

    def predicted_wait_seconds(self, waiting: int, now: float, waiting_tokens: int = 0) -> float:
        """How long a request would wait behind `waiting` others with so many tokens to compute."""
        if waiting == 0 or not self._seen:
            return 0.0
        since, started, computed = self._seen[0]
        seconds, starts, tokens = max(now - since, 0.0), self._started - started, self._computed - computed
        by_requests = seconds * (waiting / starts if starts else max(1.0, waiting / self._max_num_seqs))
        return max(by_requests, seconds * waiting_tokens / tokens if tokens else 0.0)

    def admit(self, *, waiting: int, waiting_tokens: int, prompt_tokens: int, now: float) -> None:
        """Check that a request of `prompt_tokens` may join the queue; raises Overloaded with the time to retry."""
        limits = self.limits
        wait = self.predicted_wait_seconds(waiting, now, waiting_tokens)
        if waiting >= limits.max_requests:
            reason = f"{waiting} requests are waiting, the queue holds {limits.max_requests}"
        elif limits.max_tokens is not None and waiting and waiting_tokens + prompt_tokens > limits.max_tokens:
            reason = f"{waiting_tokens} prompt tokens are waiting, the queue holds {limits.max_tokens}"
        elif limits.max_wait_seconds is not None and wait > limits.max_wait_seconds:
            reason = f"a request would wait about {math.ceil(wait)} s, the limit is {limits.max_wait_seconds:g} s"
        else:
            if not self._seen:
                self._seen.append((now, self._started, self._computed))  # the queue begins here
            return
        # Retry when half of the queue is gone: early enough to find room, late enough not to compete with all clients.
        raise Overloaded(reason, min(max(wait / 2, 1.0), LONGEST_RETRY_SECONDS))
