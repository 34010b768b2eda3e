"""The request and response bodies of a runtime pod's admin port, which the operator calls.

JSON is camelCase by alias. Dump with `body.wire()`; parse with `Model.model_validate_json(raw)`. Unknown fields are
ignored and every field that may grow has a default, so that an older side understands a newer one.

| path      | method | token | body                        | answer                              |
|-----------|--------|-------|-----------------------------|-------------------------------------|
| /signals  | GET    | yes   |                             | Signals                             |
| /state    | GET    | yes   |                             | State                               |
| /drain    | POST   | yes   | DrainRequest (may be empty) | DrainStatus                         |
| /undrain  | POST   | yes   |                             | DrainStatus                         |
| /ready    | GET    | no    | `?waitSeconds=`, see below  | Ready, with 200 or 503              |
| /health   | GET    | no    |                             | Health: 200 unless it needs a restart |
| /adapters | GET    | yes   |                             | AdapterList                         |
| /adapters | POST   | yes   | LoadAdapterRequest          | AdapterInfo: 202 while it loads, 400 with `error.reason` |
| /adapters/{name} | DELETE | yes |                        | 202 while it drains, 200 when gone  |
| /model    | GET    | yes   |                             | ModelInfo                           |
| /model    | POST   | yes   | LoadModelRequest            | ModelInfo: 202 while it loads, 409 for another one |
| /model    | DELETE | yes   |                             | ModelInfo: 202, then starts over; 409 before a drain |
| /sleep    | POST   | yes   | SleepRequest (may be empty) | SleepStatus                         |
| /wake_up  | POST   | yes   |                             | SleepStatus                         |

With `waitSeconds` the answer of a process that was never ready comes when it is, or after so long (2 s at most): the
kubelet, which asks once a second, learns of it immediately.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from pydantic import BaseModel, ConfigDict, Field, field_serializer
from pydantic.alias_generators import to_camel

from slipway_api.runtime_spec import Dtype, KVDtype, Pooling, Quantization, SpeculationMethod, Task

MOST_TENANTS = 50  # that a body names


class Body(BaseModel):
    """A body of the admin port: camelCase on the wire, snake_case in Python, frozen."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="ignore", frozen=True)

    def wire(self) -> bytes:
        """The body as JSON bytes."""
        return self.model_dump_json(by_alias=True).encode()


class Signals(Body):
    """The load of one replica; below 300 bytes of JSON, because it is scraped every one or two seconds.

    The counters are a ledger since `boot_id`:
    `admitted == finished + aborted + handed_over + running + waiting` at every moment.
    """

    boot_id: str  # changes with every start of the engine: counters restart, adapters are unloaded
    kv_usage: float = Field(ge=0, le=1)  # blocks that live requests hold ÷ all blocks; cached blocks are free
    running: int = Field(ge=0)
    waiting: int = Field(ge=0)
    waiting_tokens: int = Field(default=0, ge=0)  # prompt tokens not computed yet, over waiting requests
    draining: bool = False
    admitted: int = Field(default=0, ge=0)
    finished: int = Field(default=0, ge=0)
    aborted: int = Field(default=0, ge=0)
    handed_over: int = Field(default=0, ge=0)
    generated_tokens: int = Field(default=0, ge=0)
    prompt_tokens: int = Field(default=0, ge=0)
    # Answers that ended because the model's output was NaN or infinite; left out while zero.
    invalid_logits: int = Field(default=0, ge=0, exclude_if=lambda count: not count)
    starting: str = (
        ""  # until it is ready for the first time: Booting, NoModel, Downloading, Loading, WarmingUp or Standby
    )
    # End, in seconds since 1970, of the certificate that the engine still serves although another one has been mounted
    # for a while; left out while zero. Only of slipway-agent: our own runtime reads changed files.
    outdated_certificate_ends: int = Field(default=0, ge=0, exclude_if=lambda end: not end)
    # Why it is not ready, once it was: StepLoopStalled or EngineDead, as in Ready.reason; left out while empty.
    not_ready: str = Field(default="", exclude_if=lambda reason: not reason)

    @field_serializer("kv_usage")
    def _four_digits(self, usage: float) -> float:
        """A block is rarely less than 0.01 % of a pool, and seventeen digits cost a tenth of the message."""
        return round(usage, 4)


class ReadyReason(StrEnum):
    """Why a replica is or is not ready."""

    BOOTING = "Booting"
    NO_MODEL = "NoModel"
    DOWNLOADING = "Downloading"
    LOADING = "Loading"
    WARMING_UP = "WarmingUp"
    STANDBY = "Standby"
    MEMORY_NOT_FREED = "MemoryNotFreed"
    READY = "Ready"
    DRAINING = "Draining"
    SLEEPING = "Sleeping"
    STEP_LOOP_STALLED = "StepLoopStalled"
    ENGINE_DEAD = "EngineDead"


class Ready(Body):
    """Whether new requests are welcome, and if not, why; the kubelet reads only the status code."""

    ready: bool
    reason: ReadyReason
    message: str = ""


class Health(Body):
    """Whether the process can recover by itself; when not healthy, only a restart can help."""

    healthy: bool
    message: str = ""


class DrainRequest(Body):
    """Stop accepting and finish what runs. Asking again is harmless; a shorter deadline replaces a longer one.

    `/ready` answers 503 immediately. New requests are still accepted for `refuse_after_seconds`, because routers and
    kube-proxies learn of a pod that is not ready only after a while; after that they are refused with a 503.
    """

    timeout_seconds: int | None = Field(default=None, ge=0)  # None: the pod's own --drain-timeout
    refuse_after_seconds: int = Field(default=0, ge=0)
    reason: str = ""


class DrainStatus(Body):
    """How far a drain has come: it is done when `draining` and nothing runs or waits."""

    draining: bool
    running: int = Field(ge=0)
    waiting: int = Field(ge=0)

    @property
    def is_drained(self) -> bool:
        """Nothing accepted is unfinished, and nothing new is accepted."""
        return self.draining and self.running + self.waiting == 0


class BlockCounts(Body):
    """The KV pool: `live + cached + free == total`. Cached blocks hold a reusable prefix and are given up on demand."""

    total: int = Field(ge=0)
    live: int = Field(ge=0)
    cached: int = Field(ge=0)
    free: int = Field(ge=0)


class QueueCounts(Body):
    """Requests that the engine holds."""

    running: int = Field(ge=0)
    waiting: int = Field(ge=0)
    waiting_tokens: int = Field(default=0, ge=0)
    waiting_by_tenant: dict[str, int] = {}  # those with the longest queues, at most `MOST_TENANTS`


class LastStep(Body):
    """The last step that computed something: the shape of its batch, and how long it took."""

    rows: int = Field(ge=0)  # sequences
    tokens: int = Field(ge=0)  # computed for all of them; as many as rows: all sequences decode
    seconds: float = Field(ge=0)  # from the plan to the results
    seconds_ago: float = Field(ge=0)


class StartupTimes(Body):
    """Where the cold start went, in seconds; what has not happened yet is absent."""

    download_seconds: float | None = None
    load_seconds: float | None = None
    warmup_seconds: float | None = None


class AdapterInfo(Body):
    """One adapter of a replica, by the name that clients send as `model`."""

    name: str
    digest: str = ""  # sha256:… of its content; empty until its files are here
    uri: str = ""
    state: str  # loading, host, slot, draining, failed
    bytes: int = Field(default=0, ge=0)
    rank: int = Field(default=0, ge=0)
    requests: int = Field(default=0, ge=0)  # running and waiting
    pinned: bool = False
    idle_seconds: float | None = None  # since it was last used; absent: never
    message: str = ""  # of a failed one: why
    reason: str = ""  # of a failed one: the same in one word, an AdapterReason
    version: str = ""  # the version that its load named


class State(Body):
    """The state of one replica in full, for people and for the operator's status."""

    boot_id: str = ""
    model_name: str
    revision: str = ""
    tokenizer_sha256: str = Field(default="", alias="tokenizerSha256")
    uptime_seconds: float = Field(ge=0)
    block_size: int = Field(default=0, ge=0)
    bytes_per_token: int = Field(default=0, ge=0)
    max_model_len: int = Field(default=0, ge=0)
    max_num_seqs: int = Field(default=0, ge=0)
    blocks: BlockCounts
    queue: QueueCounts
    draining: bool
    startup: StartupTimes = StartupTimes()
    kv_tiers: dict[str, BlockCounts] = {}  # by where blocks are: `device`, which is `blocks`, and what is behind it
    last_step: LastStep | None = None  # absent: none yet
    adapters: tuple[AdapterInfo, ...] = ()  # as GET /adapters has them
    quantization: str = ""  # of the weights: none, int8, fp8, or how the checkpoint has them, such as awq
    warnings: tuple[str, ...] = ()  # what costs quality or speed in the way that the model is loaded; sentences


class AdapterList(Body):
    """All adapters of a replica. A changed `boot_id` means that the engine began anew, without them."""

    boot_id: str = ""
    adapters: tuple[AdapterInfo, ...] = ()
    max_adapters: int = Field(default=0, ge=0)  # that compute at the same time; 0: the replica takes no adapters
    max_cpu_adapters: int = Field(default=0, ge=0, alias="maxCPUAdapters")  # that stay in memory; others are re-read


class LoadAdapterRequest(Body):
    """Load an adapter under a name. Asking again is harmless; other content takes the name over when it is loaded."""

    name: str
    uri: str
    digest: str = ""  # refuse any other content
    pinned: bool = False  # never evicted from host memory
    version: str = ""  # any text that names the source; AdapterInfo.version repeats it
    credentials: Mapping[str, str] = Field(default={}, repr=False)  # for the address, by `names.CREDENTIALS`; not kept


class BootList(Body):
    """The adapters that a replica loads before it is ready: content of the ConfigMap that its pod mounts."""

    adapters: tuple[LoadAdapterRequest, ...] = ()


class ModelInfo(Body):
    """Which model a process serves."""

    uri: str = ""
    served_name: str = ""
    revision: str = ""
    loaded: bool = False


class ModelSpec(Body):
    """A model and how to run it: body of POST /model, and content of a pod's command line (`model_flags.py`).

    Every field of spec.model and spec.runtime that the engine needs is here, and nothing that belongs to the process,
    such as ports and tokens. 0, the empty text and a field that is absent leave the choice to the runtime.
    """

    uri: str
    served_name: str = ""
    revision: str = ""
    dtype: Dtype = Dtype.AUTO
    max_model_len: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    block_size: int = 0
    max_output_tokens: int = 0
    kv_cache_bytes: str = ""  # a quantity, such as 64Mi
    gpu_memory_utilization: str = ""  # a decimal number
    model_digest: str = ""
    tokenizer_uri: str = ""
    tokenizer_sha256: str = Field(default="", alias="tokenizerSha256")
    chat_template: str = ""
    sampling_defaults: Mapping[str, float | int] = {}  # by the names of the OpenAI API, such as top_p
    quantization: Quantization = Quantization.NONE
    kv_cache_dtype: KVDtype = KVDtype.AUTO
    kv_cache_host_bytes: str = ""
    deterministic: bool = False
    tensor_parallel_size: int = 0
    speculation: SpeculationMethod = SpeculationMethod.NONE
    speculation_max_tokens: int = 0
    draft_model_uri: str = ""
    task: Task = Task.GENERATE
    pooling: Pooling = Pooling.AUTO
    max_adapters: int = 0
    max_cpu_adapters: int = Field(default=0, alias="maxCPUAdapters")
    max_rank: int = 0
    lora_experts: bool = False
    warm_prompts: tuple[str | tuple[Mapping[str, str], ...], ...] = ()  # texts, and messages with role and content


class LoadModelRequest(ModelSpec):
    """Serve a model: body of POST /model. Beside the model, what a process without one could not be started with.

    Asking again is harmless. Where a field is absent, the setting of the process stays.
    """

    serving_token_sha256: tuple[str, ...] = Field(default=(), alias="servingTokenSha256")
    """SHA-256 digests of the tokens that the serving port requires from now on; none: it stays as it is."""
    gateway_token_sha256: tuple[str, ...] = Field(default=(), alias="gatewayTokenSha256")
    """SHA-256 digests of the tokens by which an open serving port recognises its gateway; none: it stays as it is."""
    drain_timeout_seconds: int = Field(default=0, ge=0)
    """How long a drain may take that comes from inside the pod; 0: as the process was started with."""


# What POST /model may change of a process that has loaded its model and waits for a claim; the rest needs another load.
CLAIMED_FIELDS: Final = frozenset(
    {
        "served_name",
        "revision",
        "sampling_defaults",
        "warm_prompts",
        "serving_token_sha256",
        "gateway_token_sha256",
        "drain_timeout_seconds",
    }
)


class SleepRequest(Body):
    """Give the device's memory back. Level 1 keeps the weights in host memory, level 2 forgets them."""

    level: int = Field(default=1, ge=1, le=2)


class SleepStatus(Body):
    """Whether a replica sleeps."""

    sleeping: bool
    level: int = 0
