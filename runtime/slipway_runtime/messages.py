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
    HANDED_OVER = "handed_over"  # the replica goes away; a gateway continues the answer on another one
    OUT_OF_MEMORY = "out_of_memory"  # the device's memory did not last for its step; another replica may do better


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
    seed: int = 0  # samples are keyed by (seed, position): the same under any batching
    min_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its score)
    logprobs: int | None = None  # per sampled token: its own, and those of so many likeliest; None: none
    prompt_logprobs: int | None = None  # the same for the prompt; such a request reads no cached prefix
    stop_token_ids: tuple[int, ...] = ()  # beside the model's own end-of-sequence tokens
    ignore_eos: bool = False
    pools_all: bool = False  # an embedding that is made of all tokens of the prompt; reads no cached prefix


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer must look like; checked at the door, enforced at every sample."""

    kind: str  # json_object | json_schema | regex | choice | lark | structural_tag
    text: str  # the schema, expression or grammar itself; of `choice` a JSON list of strings


class Request(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One prompt to answer, `n` times."""

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
    output_token_ids: tuple[int, ...] = ()  # sampled elsewhere before a handover: output that is known already
    public: bool = False  # the service's own prompt: whatever their salt, all may use its prefix. Set at boot only


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """How likely a token was, before temperature and filters."""

    token_id: int
    logprob: float
    rank: int  # 1: the likeliest
    top: tuple[tuple[int, float], ...] = ()  # the likeliest ones with theirs, best first


class Output(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one engine step brought for one request; the last one carries `finish_reason`."""

    request_id: str
    index: int = 0  # which of the request's `n` answers
    token_ids: tuple[int, ...] = ()  # new since the last Output; an end-of-sequence token is included
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the token that ended it, when one did
    error: str = ""  # with ERROR and OUT_OF_MEMORY: a sentence without prompt text
    logprobs: tuple[TokenLogprobs, ...] = ()  # parallel to token_ids, when they were asked for
    # Set on the first Output when asked for; the first token of a prompt has none.
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    embedding: bytes = b""  # float32, of length 1: set on the only Output of an engine that computes embeddings
    cached_tokens: int = 0  # prompt tokens found in the prefix cache; set on the first Output
    queued_at: float | None = None  # when it entered the queue; set on the first Output
    scheduled_at: float | None = None  # when it left the queue; set on the first Output
    first_token_at: float | None = None  # when prefill ended; set on the first Output
    finished_at: float | None = None  # set on the last Output


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """What one step computed."""

    rows: int  # sequences
    tokens: int  # of all of them; draft tokens that were verified are counted
    seconds: float  # from its plan to its results
    at: float  # when it was planned, or when the loop began to wait for it; same clock as Request.arrived


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot after a step. Blocks: live + cached + free = total."""

    running: int
    waiting: int
    running_tokens: int = 0  # known tokens of running requests, shared prefixes counted for each
    waiting_tokens: int  # prompt tokens not yet computed of waiting requests
    paused: int = 0  # answers, running or waiting, whose reader does not read; known to the client alone
    blocks_total: int
    blocks_live: int  # referenced by a running request: the KV usage that autoscaling sees
    blocks_cached: int  # reusable prefixes, free on demand
    steps: int
    preemptions: int
    prefix_queries: int  # prompt tokens looked up
    prefix_hits: int  # prompt tokens found, in host memory too
    admitted: int  # the ledger: admitted = finished + aborted + handed_over + running + waiting
    finished: int
    aborted: int
    handed_over: int
    last_step_at: float  # same clock as Request.arrived; readiness drops when it stalls with work to do
    prompt_tokens: int = 0  # prompt tokens taken in, cached ones included; a counter
    generated_tokens: int = 0  # tokens that left as output; a counter
    computed_tokens: int = 0  # positions computed, prefill and decode, recomputation included; a counter
    started: int = 0  # requests that left the queue for the first time; a counter
    schedule_seconds: float = 0.0  # what the last step cost the scheduler, plan and update together
    last_batch: Batch | None = None  # of the last step that computed something; None: none has yet
    mask_seconds: float = 0.0  # spent on making masks of grammars, beside the model's computing; a counter
    waiting_by_tenant: tuple[tuple[str, int], ...] = ()
    running_adapters: tuple[str, ...] = ()  # digests of adapters with running, and with waiting requests
    waiting_adapters: tuple[str, ...] = ()
    invalid_kv_blocks: int = 0  # KV of adapters that are not resident: always 0 with dependency-aware eviction
    host_blocks: int = 0  # cold prefix blocks in host memory
    host_active: bool = False  # host memory is asked for, and not switched off by few hits
    host_hits: int = 0  # of the prefix hits, prompt tokens found in host memory; a counter
    demotions: int = 0  # blocks copied from the device to host memory; a counter
    promotions: int = 0  # blocks copied back; a counter
    speculation_active: bool = False  # asked for, and not switched off by low acceptance
    drafts: int = 0  # steps of a row that verified a draft; a counter
    draft_tokens: int = 0  # a counter
    accepted_tokens: int = 0  # of the drafted ones; a counter
    accepted_by_position: tuple[int, ...] = ()  # counters, the first drafted token first


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
    widest_step_seconds: float = 0.0  # a step of max_num_batched_tokens, when it was warm; 0: not measured
    quantization: str = "none"  # of the weights: none, int8, fp8
    kv_dtype: str = ""  # empty: that of the weights
    deterministic: bool = False
    prefix_caching: bool = True
    max_adapters: int = 0  # that compute at the same time; 0: adapters are off
    max_cpu_adapters: int = 0  # that wait in host memory
    max_rank: int = 0
    speculation: str = "none"
    host_blocks: int = 0  # that host memory has room for, beside the pool; 0: cold prefixes are dropped
    warnings: tuple[str, ...] = ()  # what costs quality in the way that the model is loaded; sentences
    pooling: str = ""  # of an engine that computes embeddings: last or mean; empty: it generates
    embedding_size: int = 0
    is_matryoshka: bool = False  # embeddings may be cut to fewer dimensions
    matryoshka_dimensions: tuple[int, ...] = ()  # to these only; empty: to any
    graphs_failed: str = ""  # why decode steps are not recorded on a device that could; a sentence


class AdapterState(StrEnum):
    """Where an adapter is."""

    DISK = "disk"  # known, not in memory: a request has it read again
    LOADING = "loading"  # from storage to host memory
    HOST = "host"  # in host memory: a request brings it into a slot
    SLOT = "slot"  # in a slot of the device
    DRAINING = "draining"  # takes no new requests; goes when the last one has ended
    FAILED = "failed"


class AdapterStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One adapter of the engine, known by the digest of its content."""

    digest: str
    state: AdapterState
    bytes: int = 0
    rank: int = 0
    requests: int = 0  # running and waiting
    pinned: bool = False
    last_used: float = 0.0  # same clock as Request.arrived
    error: str = ""


class Abort(msgspec.Struct, frozen=True, tag=True):
    """End a request wherever it is. STOP counts it as finished."""

    request_id: str
    reason: FinishReason
    index: int | None = None  # one of its `n` answers; None: all of them


class Pause(msgspec.Struct, frozen=True, tag=True):
    """Plan nothing more for a request, whose reader does not read; with `on` false, go on. Its blocks stay."""

    request_id: str
    on: bool


class LoadAdapter(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Read an adapter from a local folder into host memory, off the step loop. Idempotent."""

    call: int
    digest: str
    path: str
    pinned: bool = False


class UnloadAdapter(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Refuse new requests for an adapter, and forget it when the last one has ended."""

    call: int
    digest: str


class ResetPrefixCache(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Forget every prefix that nobody uses; those in use can no longer be found."""

    call: int


class Ping(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answer, and do nothing: so an engine without work shows that it is not stuck."""

    call: int


class Sleep(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """With nothing running: weights to host memory (level 1) or away (level 2), the KV cache freed."""

    call: int
    level: int = 1


class WakeUp(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The reverse of Sleep."""

    call: int


Message = Request | Abort | Pause | LoadAdapter | UnloadAdapter | ResetPrefixCache | Ping | Sleep | WakeUp


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a call."""

    call: int
    error: str = ""  # empty: done


class Medium(StrEnum):
    """Which memory a prefix block is in, in vLLM's words."""

    DEVICE = "GPU"  # what attention reads, whatever it is made of
    HOST = "CPU"


class BlockStored(msgspec.Struct, frozen=True, kw_only=True):
    """Prefix blocks that can be found from now on, in the order of their chain. Those in host memory: hashes alone."""

    block_hashes: tuple[bytes, ...]
    parent_block_hash: bytes | None
    token_ids: tuple[int, ...]
    block_size: int
    adapter: str = ""
    medium: Medium = Medium.DEVICE


class BlockRemoved(msgspec.Struct, frozen=True, kw_only=True):
    """Prefix blocks that are gone from one memory."""

    block_hashes: tuple[bytes, ...]
    medium: Medium = Medium.DEVICE


class AllBlocksCleared(msgspec.Struct, frozen=True):
    """Every prefix is gone, wherever it was."""


class StepReport(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What one step tells the API side: one message a step, whatever the batch."""

    outputs: tuple[Output, ...]
    stats: EngineStats
    replies: tuple[Reply, ...] = ()
    adapters: tuple[AdapterStatus, ...] | None = None  # all of them, when any has changed


class Loading(msgspec.Struct, frozen=True, tag=True):
    """How far the weights are."""

    bytes_done: int
    bytes_total: int


class WarmingUp(msgspec.Struct, frozen=True, tag=True):
    """The weights are there; the first steps are being computed."""


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The engine is there and warm: steps follow."""

    facts: EngineFacts
    stats: EngineStats


class EngineFailed(msgspec.Struct, frozen=True, tag=True):
    """The exit reason of an engine, before or after it was ready."""

    error: str
    trace: str = ""  # where it happened, for the log; empty when the sentence says it all


News = Loading | WarmingUp | Loaded | EngineFailed | StepReport  # from an engine in a process of its own


class NewRow(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence takes a row of the worker: all that the worker must know to compute it."""

    row: int
    token_ids: tuple[int, ...]  # prompt, and after a preemption what was generated so far
    num_prompt_tokens: int
    params: SamplingParams
    adapter_slot: int = -1  # -1: the base model alone
    grammar: bool = False  # its samples wait for a mask
    request_id: str = ""  # whose it is: the masks of a plan are made by the engine, which knows requests
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
    """Copy a slot of host memory into a block of the device; the slot goes on holding it."""

    slot: int
    block: int


class GiveBack(msgspec.Struct, frozen=True, tag=True):
    """Free all slots: whatever is in them, nobody will ask for it."""


HostMove = Demote | Promote | GiveBack


class TokenMasks(msgspec.Struct, frozen=True):
    """Which tokens may be sampled, for samples that a grammar binds. Bit t % 32 of word t // 32 allows token t."""

    samples: tuple[int, ...]  # places among all samples of the plan, in order; a row with K drafts samples K + 1 times
    words: bytes  # (len(samples), ceil(vocabulary / 32)) little-endian 32-bit words


class SchedulerOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What one step computes. Rows of one new token come first; all tuples run parallel to `rows`."""

    step: int
    new_rows: tuple[NewRow, ...] = ()
    adapter_loads: tuple[AdapterLoad, ...] = ()
    host_moves: tuple[HostMove, ...] = ()  # one after the other, before anything else
    copies: tuple[tuple[int, int], ...] = ()  # (from block, to block), before anything is computed
    rows: tuple[int, ...] = ()
    num_computed: tuple[int, ...] = ()  # tokens of the row whose KV is there already
    num_new: tuple[int, ...] = ()  # tokens to compute now, drafts included
    new_blocks: tuple[tuple[int, ...], ...] = ()  # appended to the row's block table
    samples: tuple[bool, ...] = ()  # whether the row reaches its last known token, and so samples the next one
    # Guesses of what the row would sample, computed in the same step and kept as far as they prove right.
    # Empty: no row has any. Else parallel to `rows`.
    drafts: tuple[tuple[int, ...], ...] = ()
    masks: TokenMasks | None = None


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one step sampled, parallel to the plan's rows: (), a token, or accepted drafts and the token after them."""

    step: int
    token_ids: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()  # parallel to token_ids; empty when nobody asked
    # Of the new positions that are prompt, for rows that asked: the token AFTER each position. Empty: nobody asked.
    prompt_logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()
    embeddings: tuple[bytes, ...] = ()  # parallel to the rows, of those that end; empty: this engine generates
