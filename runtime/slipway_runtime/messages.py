"""What crosses between the API side and the engine: requests in, outputs out. No torch, no clock.

Times are seconds of one monotonic clock, read by the side that makes the message.
"""

from enum import StrEnum

import msgspec


class FinishReason(StrEnum):
    """Why a request ended; the words of the wire are made from these by the server."""

    STOP = "stop"  # end-of-sequence token, stop token, or stop string
    LENGTH = "length"  # max_tokens, or the context is full
    CANCELLED = "cancelled"  # the client went away
    TIMEOUT = "timeout"  # the request's deadline passed
    ERROR = "error"  # the engine failed; the message says how


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are chosen. Everything is resolved: no field means "the default of someone else"."""

    max_tokens: int
    temperature: float = 1.0  # below 1e-5: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0  # draws are keyed by (seed, position): the same under any batching
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()  # beside the model's own end-of-sequence tokens
    ignore_eos: bool = False


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate."""

    id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    arrived: float
    deadline: float | None = None  # same clock as `arrived`
    tenant: str = ""
    priority: int = 0  # higher goes first
    cache_salt: str = ""  # prefixes are shared only under the same salt


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine step brought for one request; the last one carries `finish_reason`."""

    request_id: str
    token_ids: tuple[int, ...] = ()  # new since the last Output; an end-of-sequence token is included
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the token that ended it, when one did
    error: str = ""  # with FinishReason.ERROR: a sentence without prompt text
    cached_tokens: int = 0  # prompt tokens found in the prefix cache; set on the first Output
    queued_at: float | None = None  # when it entered the queue; set on the first Output
    scheduled_at: float | None = None  # when it left the queue; set on the first Output
    first_token_at: float | None = None  # when prefill ended; set on the first Output
    finished_at: float | None = None  # set on the last Output


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot after a step. Blocks: live + cached + free = total."""

    running: int
    waiting: int
    waiting_tokens: int  # prompt tokens not yet computed of waiting requests
    blocks_total: int
    blocks_live: int  # referenced by a running request: the KV usage that autoscaling sees
    blocks_cached: int  # reusable prefixes, free on demand
    steps: int
    preemptions: int
    prefix_queries: int  # prompt tokens looked up
    prefix_hits: int  # prompt tokens found
    admitted: int  # the ledger: admitted = finished + aborted + handed_over + running + waiting
    finished: int
    aborted: int
    handed_over: int
    last_step_at: float  # same clock as Request.arrived; readiness drops when it stalls with work to do
    prompt_tokens: int = 0  # prompt tokens taken in, cached ones included; a counter
    generated_tokens: int = 0  # tokens that left as output; a counter
    computed_tokens: int = 0  # positions computed, prefill and decode, recomputation included; a counter
    started: int = 0  # requests that left the queue for the first time; a counter


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a loaded engine is: fixed from start to end."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int  # prompt and output together; the smallest of the model's, the asked one and the pool's
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int
    bytes_per_token: int  # of KV, all layers
    weight_bytes: int
    dtype: str
    device: str
    load_seconds: float
    warmup_seconds: float


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one step tells the API side: one message a step, whatever the batch."""

    outputs: tuple[Output, ...]
    stats: EngineStats


class NewRow(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence takes a row of the worker: all that the worker must know to compute it."""

    row: int
    token_ids: tuple[int, ...]  # prompt, and after a preemption what was generated so far
    num_prompt_tokens: int
    params: SamplingParams


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What one step computes. Rows of one new token come first; all tuples run parallel to `rows`."""

    step: int
    new_rows: tuple[NewRow, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()  # (from block, to block), before anything is computed
    rows: tuple[int, ...] = ()
    num_computed: tuple[int, ...] = ()  # tokens of the row whose KV is there already
    num_new: tuple[int, ...] = ()  # tokens to compute now
    new_blocks: tuple[tuple[int, ...], ...] = ()  # appended to the row's block table
    samples: tuple[bool, ...] = ()  # whether the row reaches its last known token, and so draws the next one


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one step drew: a token for each row that samples, -1 for the others, parallel to the plan's rows."""

    step: int
    token_ids: tuple[int, ...]
