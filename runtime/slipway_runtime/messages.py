"""Messages between the API server and the engine, and between the engine and its workers. No torch, no clock.

Times are seconds of one monotonic clock, read by the sender of the message.
"""

from enum import StrEnum
from typing import Final

import msgspec


class FinishReason(StrEnum):
    """The reason why a request ended; the server translates it to the `finish_reason` of the API."""

    STOP = "stop"  # end-of-sequence token, stop token, or stop string
    LENGTH = "length"  # max_tokens, or the context is full
    CANCELLED = "cancelled"  # the client disconnected
    TIMEOUT = "timeout"  # the request's deadline passed
    ERROR = "error"  # the engine failed; the message says how
    HANDED_OVER = "handed_over"  # the replica shuts down; a gateway continues the answer on another one
    OUT_OF_MEMORY = "out_of_memory"  # OOM on the device in its step; another replica may succeed


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters of a request. All defaults are resolved: no field refers to another default."""

    max_tokens: int
    temperature: float = 1.0  # below 1e-5: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0  # samples are keyed by (seed, position): the same under any batching
    min_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its score)
    logprobs: int | None = None  # for each sampled token: its logprob and those of so many likeliest; None: no logprobs
    prompt_logprobs: int | None = None  # the same for the prompt; such a request reads no cached prefix
    stop_token_ids: tuple[int, ...] = ()  # beside the model's own end-of-sequence tokens
    ignore_eos: bool = False
    pools_all: bool = False  # the embedding pools all tokens of the prompt; reads no cached prefix


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """Structured output of an answer: checked by the server, enforced at every sampled token."""

    kind: str  # json_object | json_schema | regex | choice | lark | structural_tag | harmony
    text: str  # the schema, expression or grammar itself; of `choice` a JSON list of strings, of `harmony` of functions


class Request(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A request: one prompt, and `n` answers to it."""

    id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    arrived: float
    deadline: float | None = None  # same clock as `arrived`
    tenant: str = ""
    priority: int = 0  # higher goes first
    cache_salt: str = ""  # prefixes are shared only under the same salt
    adapter: str = ""  # the content digest of a loaded adapter; empty: the base model
    grammar: Grammar | None = None
    n: int = 1  # answers wanted: they share the blocks of the prompt, and sample with seed, seed + 1, …
    output_token_ids: tuple[int, ...] = ()  # sampled by another replica before a handover: known output
    public: bool = False  # a warm prompt of the service: requests of any salt may use its prefix. Set at boot only
    # Indexes of KV blocks of the prompt, and hashes of the gateway's text blocks that end in them.
    text_blocks: tuple[tuple[int, int], ...] = ()


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """The logprob and rank of a token, before temperature and filters."""

    token_id: int
    logprob: float
    rank: int  # 1: the likeliest
    top: tuple[tuple[int, float], ...] = ()  # the likeliest tokens with their logprobs, best first


class Output(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Output of one engine step for one answer of a request; the last one carries `finish_reason`."""

    request_id: str
    index: int = 0  # which of the request's `n` answers
    token_ids: tuple[int, ...] = ()  # new since the last Output; an end-of-sequence token is included
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the token that ended the answer, if one did
    error: str = ""  # with ERROR and OUT_OF_MEMORY: a sentence without prompt text
    logprobs: tuple[TokenLogprobs, ...] = ()  # parallel to token_ids, when they were asked for
    # Set on the first Output when asked for; the first token of a prompt has none.
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    embedding: bytes = b""  # float32, of length 1, or a score: on the only Output of an engine that embeds or scores
    cached_tokens: int = 0  # prompt tokens found in the prefix cache; set on the first Output
    draft_tokens: int = 0  # that were verified in the step
    accepted_tokens: int = 0  # of these; after them comes one more token
    preemptions: int = 0  # of this answer, so far
    queued_at: float | None = None  # when the request entered the queue; set on the first Output
    scheduled_at: float | None = None  # when the request left the queue; set on the first Output
    first_token_at: float | None = None  # when prefill ended; set on the first Output
    finished_at: float | None = None  # set on the last Output


class BatchStats(msgspec.Struct, frozen=True, kw_only=True):
    """Size and duration of the batch of one step."""

    rows: int  # sequences in the batch
    tokens: int  # of all rows; verified draft tokens are counted
    seconds: float  # from its scheduler output to its results
    at: float  # when it was scheduled, or when the loop began to wait for it; same clock as Request.arrived


class DraftModelStats(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of a draft model: its part of the draft tokens, and what they cost."""

    draft_tokens: int = 0  # of those that rows verified, its own; a counter
    accepted_tokens: int = 0  # a counter
    passes: int = 0  # of the draft model; a counter
    computed_tokens: int = 0  # in these passes; a counter
    blocks_total: int = 0  # of its own KV cache
    blocks_live: int = 0


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of the engine after a step. KV blocks: live + cached + free = total."""

    running: int
    waiting: int
    running_tokens: int = 0  # known tokens of running requests, shared prefixes counted for each
    waiting_tokens: int  # prompt tokens not yet computed of waiting requests
    paused: int = 0  # answers, running or waiting, whose client does not read; only the EngineClient knows it
    blocks_total: int
    blocks_live: int  # referenced by a running request: the KV usage that autoscaling sees
    blocks_cached: int  # reusable prefixes, free on demand
    steps: int
    preemptions: int
    invalid_logits: int = 0  # answers that ended because their logits were NaN or infinite; a counter
    prefix_queries: int  # prompt tokens looked up
    prefix_hits: int  # prompt tokens found, in host memory too
    admitted: int  # always: admitted = finished + aborted + handed_over + running + waiting
    finished: int
    aborted: int
    handed_over: int
    last_step_at: float  # same clock as Request.arrived; not ready when it stalls with requests present
    prompt_tokens: int = 0  # prompt tokens taken in, cached ones included; a counter
    prefilled_tokens: int = 0  # of those, the tokens of prompts whose first token was sampled; a counter
    generated_tokens: int = 0  # tokens sent as output; a counter
    computed_tokens: int = 0  # positions computed, prefill and decode, recomputation included; a counter
    started: int = 0  # requests that left the queue for the first time; a counter
    schedule_seconds: float = 0.0  # time of the scheduler in the last step: scheduling and update together
    last_batch: BatchStats | None = None  # of the last step that computed something; None: before the first
    mask_seconds: float = 0.0  # spent on computing grammar bitmasks, in parallel to the model; a counter
    waiting_by_tenant: tuple[tuple[str, int], ...] = ()
    running_adapters: tuple[str, ...] = ()  # digests of adapters with running, and with waiting requests
    waiting_adapters: tuple[str, ...] = ()
    invalid_kv_blocks: int = 0  # KV of adapters that are not resident: always 0 with dependency-aware eviction
    host_blocks: int = 0  # cold prefix blocks in host memory
    host_active: bool = False  # host memory is configured, and not switched off for too few hits
    host_hits: int = 0  # of the prefix hits, prompt tokens found in host memory; a counter
    demotions: int = 0  # blocks copied from the device to host memory; a counter
    promotions: int = 0  # blocks copied from host memory to the device; a counter
    speculation_active: bool = False  # configured, and not switched off for low acceptance
    drafts: int = 0  # how often a row verified draft tokens in a step; a counter
    draft_tokens: int = 0  # a counter
    accepted_tokens: int = 0  # draft tokens that were accepted; a counter
    accepted_by_position: tuple[int, ...] = ()  # counters, one for each position in the draft
    draft_model: DraftModelStats | None = None  # None: there is no draft model


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a loaded engine that never change while it runs."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int  # prompt and output together; the smallest of the model's limit, the setting's and the KV pool's
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
    widest_step_seconds: float = 0.0  # measured time of a warm step of max_num_batched_tokens; 0: not measured
    quantization: str = "none"  # of the weights: none, int8, fp8
    kv_dtype: str = ""  # of the KV cache; empty: that of the weights
    deterministic: bool = False
    prefix_caching: bool = True
    max_adapters: int = 0  # adapters that compute at the same time; 0: adapters are off
    max_cpu_adapters: int = 0  # adapters kept in host memory
    max_rank: int = 0
    speculation: str = "none"
    draft_weight_bytes: int = 0  # of a draft model; 0: there is none
    draft_bytes_per_token: int = 0  # of its KV, all layers
    host_blocks: int = 0  # KV blocks that fit in host memory, beside the pool; 0: cold prefixes are dropped
    warnings: tuple[str, ...] = ()  # sentences: settings that lower the quality of the loaded model
    pooling: str = ""  # of an engine that computes embeddings: last or mean, or score; empty: it generates text
    embedding_size: int = 0
    score_tokens: tuple[str, ...] = ()  # of a reranker that answers no or yes; its pooling is "score"
    is_matryoshka: bool = False  # embeddings may be cut to fewer dimensions
    matryoshka_dimensions: tuple[int, ...] = ()  # to these only; empty: to any
    graphs_failed: str = ""  # a sentence: why the capture of CUDA graphs failed; empty: it did not
    kernels_compiled: int = 0  # at the start, of rank 0; 0 for all three if kernels are not shared
    kernels_shared: int = 0  # read from the folder of the node instead
    kernels_refused: int = 0  # found there and compiled anew, because they did not verify


ADAPTERS_MAY_TAKE: Final = "all adapters together may take"  # in the error of one that is too large by itself


class AdapterState(StrEnum):
    """The state of an adapter: which memory holds it, or whether it is leaving."""

    DISK = "disk"  # known, not in memory: a request for it reads it again
    LOADING = "loading"  # from storage to host memory
    HOST = "host"  # in host memory: a request copies it into a slot
    SLOT = "slot"  # in a slot of the device
    DRAINING = "draining"  # takes no new requests; removed when the last one has ended
    FAILED = "failed"


class AdapterStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Status of one adapter of the engine, identified by the digest of its content."""

    digest: str
    state: AdapterState
    bytes: int = 0
    rank: int = 0
    requests: int = 0  # running and waiting
    pinned: bool = False
    last_used: float = 0.0  # same clock as Request.arrived
    error: str = ""


class Abort(msgspec.Struct, frozen=True, tag=True):
    """End a request, waiting or running. The reason STOP counts it as finished."""

    request_id: str
    reason: FinishReason
    index: int | None = None  # one of its `n` answers; None: all of them


class Pause(msgspec.Struct, frozen=True, tag=True):
    """Stop scheduling a request whose client does not read; with `on` false, resume it. Its KV blocks stay."""

    request_id: str
    on: bool


class LoadAdapter(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Read an adapter from a local folder into host memory, outside of the step loop. Idempotent."""

    call: int
    digest: str
    path: str
    pinned: bool = False


class UnloadAdapter(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Refuse new requests for an adapter, and remove it when the last one has ended."""

    call: int
    digest: str


class ResetPrefixCache(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Drop all cached prefixes without users; prefixes in use can no longer be found."""

    call: int


class Ping(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Reply without any work: shows that an idle engine is not stuck."""

    call: int


class Sleep(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Without running requests: move weights to host memory (level 1) or drop them (level 2); free the KV cache."""

    call: int
    level: int = 1


class WakeUp(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The reverse of Sleep."""

    call: int


Message = Request | Abort | Pause | LoadAdapter | UnloadAdapter | ResetPrefixCache | Ping | Sleep | WakeUp


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """The reply to a call."""

    call: int
    error: str = ""  # empty: the call succeeded


class Medium(StrEnum):
    """The memory that holds a prefix block, in vLLM's terms."""

    DEVICE = "GPU"  # the memory that attention reads, on a CPU too
    HOST = "CPU"


class BlockStored(msgspec.Struct, frozen=True, kw_only=True):
    """KV event: prefix blocks stored in the cache, in the order of their hash chain; for host memory, hashes only."""

    block_hashes: tuple[bytes, ...]
    parent_block_hash: bytes | None
    token_ids: tuple[int, ...]
    block_size: int
    adapter: str = ""
    medium: Medium = Medium.DEVICE


class BlockRemoved(msgspec.Struct, frozen=True, kw_only=True):
    """KV event: prefix blocks removed from one memory."""

    block_hashes: tuple[bytes, ...]
    medium: Medium = Medium.DEVICE


class AllBlocksCleared(msgspec.Struct, frozen=True):
    """KV event: all prefix blocks were removed from all memories."""


class TextBlockChanges(msgspec.Struct, frozen=True, kw_only=True):
    """Text blocks whose KV has become cached, and those whose KV was evicted (`slipway_api.text_blocks`)."""

    stored: tuple[int, ...] = ()
    removed: tuple[int, ...] = ()


class StepReport(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Report of one step to the API server: one message for each step, whatever the batch size."""

    outputs: tuple[Output, ...]
    stats: EngineStats
    replies: tuple[Reply, ...] = ()
    adapters: tuple[AdapterStatus, ...] | None = None  # all adapters, when the status of any has changed
    text_blocks: TextBlockChanges | None = None


class Loading(msgspec.Struct, frozen=True, tag=True):
    """Progress of loading the weights."""

    bytes_done: int
    bytes_total: int


class WarmingUp(msgspec.Struct, frozen=True, tag=True):
    """The weights are loaded; the warm-up steps are being computed."""


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The engine is loaded and warm; step reports follow."""

    facts: EngineFacts
    stats: EngineStats


class EngineFailed(msgspec.Struct, frozen=True, tag=True):
    """The exit reason of an engine, before or after it was ready."""

    error: str
    trace: str = ""  # the traceback, for the log; empty when the sentence is enough


class Pulse(msgspec.Struct, frozen=True, tag=True):
    """The engine process runs, whatever its step loop does: sent by a thread of its own, twice a second."""


EngineEvent = Loading | WarmingUp | Loaded | EngineFailed | StepReport | Pulse  # from an engine in a process of its own


class NewSequence(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence that enters a row of the worker's input batch, with all data that the worker needs."""

    row: int
    token_ids: tuple[int, ...]  # prompt, and after a preemption the tokens generated so far
    num_prompt_tokens: int
    params: SamplingParams
    adapter_slot: int = -1  # -1: the base model alone
    grammar: bool = False  # sampling waits for its bitmask
    request_id: str = ""  # lets the engine compute the bitmasks of a step, by request
    index: int = 0  # which of the request's answers


class AdapterLoad(msgspec.Struct, frozen=True):
    """Copy an adapter from host memory into a slot, before anything is computed."""

    slot: int
    digest: str


class Demote(msgspec.Struct, frozen=True, tag=True):
    """Copy a block of the device into a slot of host memory. Slots count from 1."""

    block: int
    slot: int


class Promote(msgspec.Struct, frozen=True, tag=True):
    """Copy a slot of host memory into a block of the device; the slot keeps its content."""

    slot: int
    block: int


class FreeHostMemory(msgspec.Struct, frozen=True, tag=True):
    """Free all slots of host memory; no later request reads their content."""


HostMove = Demote | Promote | FreeHostMemory


class TokenMasks(msgspec.Struct, frozen=True):
    """Bitmasks of allowed tokens, for samples bound by a grammar. Bit t % 32 of word t // 32 allows token t."""

    samples: tuple[int, ...]  # indices of samples in the step, ascending; a row with K draft tokens samples K + 1 times
    words: bytes  # (len(samples), ceil(vocabulary / 32)) little-endian 32-bit words


class SchedulerOutput(msgspec.Struct, frozen=True, kw_only=True):
    """Scheduler output: what one step computes. Rows of one new token come first; all tuples run parallel to `rows`."""

    step: int
    new_rows: tuple[NewSequence, ...] = ()
    adapter_loads: tuple[AdapterLoad, ...] = ()
    host_moves: tuple[HostMove, ...] = ()  # in order, before anything else
    copies: tuple[tuple[int, int], ...] = ()  # (from block, to block), before anything is computed
    rows: tuple[int, ...] = ()
    num_computed: tuple[int, ...] = ()  # tokens of the row that already have KV (num_computed_tokens)
    num_new: tuple[int, ...] = ()  # tokens to compute in this step, draft tokens included
    new_blocks: tuple[tuple[int, ...], ...] = ()  # appended to the row's block table
    samples: tuple[bool, ...] = ()  # whether the row reaches its last known token and samples the next one
    # Draft tokens of each row, verified in the same step; the accepted ones are kept.
    # Empty: no row has draft tokens. Else parallel to `rows`.
    drafts: tuple[tuple[int, ...], ...] = ()
    masks: TokenMasks | None = None


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """Samples of one step, parallel to the scheduled rows: (), one token, or accepted draft tokens and one more."""

    step: int
    token_ids: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()  # parallel to token_ids; empty: no row asked
    # For rows that asked, at each new prompt position: the logprobs of the token AFTER it. Empty: no row asked.
    prompt_logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()
    embeddings: tuple[bytes, ...] = ()  # parallel to the rows, for rows that finish; empty: this engine generates
    invalid: tuple[int, ...] = ()  # places in `token_ids` of rows whose logits, or embedding, were not finite
