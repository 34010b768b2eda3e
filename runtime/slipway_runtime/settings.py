"""Settings of `slipway-runtime serve`: frozen dataclasses, checked at the start.

`command_line` makes them. The settings of the model come from one `ModelSpec`, from flags or from POST /model: the
same spec gives the same settings.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final

from slipway_api import names, trace_settings
from slipway_api.listening import ALL_ADDRESSES
from slipway_api.runtime_api import LoadModelRequest, ModelSpec
from slipway_api.runtime_spec import Pooling, Task
from slipway_api.types import parse_quantity

# Fields of a ModelSpec that are copied to the settings unchanged, where they are given.
_SAME: Final = (
    "served_name",
    "revision",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "max_output_tokens",
    "model_digest",
    "tokenizer_uri",
    "tokenizer_sha256",
    "chat_template",
    "task",
    "pooling",
    "deterministic",
    "tensor_parallel_size",
    "speculation_max_tokens",
    "draft_model_uri",
    "max_adapters",
    "max_rank",
    "lora_experts",
)

MAX_QUEUED_REQUESTS: Final = 1024
MAX_QUEUED_TOKENS: Final = 2**21  # some 100 bytes each, in both processes

_NOT_NEGATIVE: Final = (
    "max_num_queued_reqs",
    "max_num_seqs",
    "max_num_batched_tokens",
    "speculation_max_tokens",
    "max_queued_tokens",
    "tensor_parallel_size",
    "max_adapters",
    "max_cpu_adapters",
    "max_rank",
)
_KV_EVENTS_ENDPOINT: Final = re.compile(r"tcp://[^\s/]+:\d{1,5}")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")

# A prompt that is prefilled before the replica is ready: a text, or chat messages, each with `role` and `content`.
WarmPrompt = str | tuple[Mapping[str, str], ...]


STANDBY_LEVELS: Final = ("loaded", "sleeping")
REASONING_PARSERS: Final = ("auto", "none", "think", "harmony")
# The forms of tool calls under vLLM's names; `server/template_tools.py` maps them to parsers.
TOOL_CALL_PARSERS: Final = (
    "auto", "hermes", "qwen3_coder", "qwen3_xml", "mistral", "llama3_json", "llama4_json", "phi4_mini_json",
    "pythonic", "llama4_pythonic", "openai",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class BootAdapter:
    """A LoRA adapter to load before the replica is ready: the name that clients send as `model`, and the address."""

    name: str
    uri: str


@dataclass(frozen=True, kw_only=True)
class SamplingDefaults:
    """Defaults for sampling parameters that a request does not set; `None`: use the model's own default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None

    def over(self, weaker: "SamplingDefaults") -> "SamplingDefaults":
        """Merge: these defaults where they are set, else those of `weaker`."""
        chosen: dict[str, Any] = {
            f.name: mine if (mine := getattr(self, f.name)) is not None else getattr(weaker, f.name)
            for f in fields(SamplingDefaults)
        }
        return SamplingDefaults(**chosen)

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> "SamplingDefaults":
        """Parse JSON with keys as in manifests (`topP`) or in requests (`top_p`); an unknown key is a ValueError."""
        spelled = {name: name for name in (f.name for f in fields(cls))}
        spelled |= {_camel(name): name for name in spelled}
        unknown = sorted(set(raw) - set(spelled))
        if unknown:
            raise ValueError(f"sampling defaults know no {', '.join(unknown)}; they know {', '.join(sorted(spelled))}")
        # Ratios travel as strings in manifests: Kubernetes has no floats.
        whole = {"top_k", "max_tokens"}
        given: dict[str, Any] = {spelled[key]: value for key, value in raw.items() if value is not None}
        typed: dict[str, Any] = {name: int(v) if name in whole else float(v) for name, v in given.items()}
        return cls(**typed)


@dataclass(frozen=True, kw_only=True)
class TraceSettings:
    """Where the spans of requests are exported to, and which; the names and values of the gateway's settings."""

    endpoint: str = ""  # base URL of a collector that takes OTLP over HTTP; empty: off
    ratio: float = trace_settings.DEFAULT_RATIO  # share of the traces that are neither sampled, failed nor slow
    slow_seconds: float = trace_settings.DEFAULT_SLOW_SECONDS

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "TraceSettings":
        """Read OpenTelemetry's variable and the gateway's two; raises ValueError where a number is invalid."""
        endpoint = environment.get(trace_settings.ENV_ENDPOINT, "").strip()
        ratio = _number(environment, trace_settings.ENV_RATIO, trace_settings.DEFAULT_RATIO)
        slow_seconds = _number(environment, trace_settings.ENV_SLOW_SECONDS, trace_settings.DEFAULT_SLOW_SECONDS)
        if not (0 <= ratio <= 1 and slow_seconds > 0):
            raise ValueError(
                f"{trace_settings.ENV_RATIO} is between 0 and 1, and {trace_settings.ENV_SLOW_SECONDS} above 0"
            )
        return cls(endpoint=endpoint, ratio=ratio, slow_seconds=slow_seconds)


def _number(environment: Mapping[str, str], name: str, default: float) -> float:
    try:
        return float(environment.get(name) or default)
    except ValueError:
        raise ValueError(f"{name} is not a number: {environment[name]!r}") from None


@dataclass(frozen=True, kw_only=True)
class RuntimeSettings:
    """Settings of one replica. `0`: the value is taken from the model or the machine, unless the comment says else."""

    model_uri: str  # empty: the process waits for POST /model
    served_name: str = ""
    revision: str = ""
    host: str = ALL_ADDRESSES
    port: int = names.SERVING_PORT
    admin_port: int = names.ADMIN_PORT
    dtype: str = "auto"
    quantization: str = "none"  # of the weights, done while they load: none, int8 or fp8
    kv_cache_dtype: str = "auto"  # auto, fp8 or int8; auto: the dtype of the computation
    task: Task = Task.GENERATE
    pooling: Pooling = Pooling.AUTO  # of embeddings
    score_tokens: str = ""  # "no,yes": the tokens by whose logits a reranker that generates one scores
    deterministic: bool = False
    device: str = "auto"  # auto, cpu or cuda; auto: a GPU if there is one
    tensor_parallel_size: int = 1  # GPUs, or processes on a CPU, that share the model
    max_model_len: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    max_num_queued_reqs: int = MAX_QUEUED_REQUESTS  # 0: this default too
    max_queued_tokens: int = MAX_QUEUED_TOKENS  # prompt tokens that may wait, paused ones too; 0: this default too
    tenant_weights: Mapping[str, float] = field(default_factory=dict)  # shares under load; a tenant not here has 1
    block_size: int = 16
    max_output_tokens: int = 0
    kv_cache_bytes: int = 0
    kv_cache_host_bytes: int = 0  # of host memory, for cold prefixes; 0: they are dropped
    gpu_memory_utilization: float = 0.85
    model_digest: str = ""
    tokenizer_uri: str = ""
    tokenizer_sha256: str = ""
    chat_template: str = ""
    reasoning_parser: str = "auto"  # auto, none, think or harmony; auto: the chat template says it
    tool_call_parser: str = "auto"  # a name of TOOL_CALL_PARSERS; auto: the chat template shows the form
    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    warm_prompts: tuple[WarmPrompt, ...] = ()
    speculation: str = "none"  # none, promptLookup or draft
    speculation_max_tokens: int = 4
    draft_model_uri: str = ""  # with speculation draft, and only then
    max_adapters: int = 0  # LoRA adapters that compute at the same time; 0: adapters are off
    max_cpu_adapters: int = 0  # adapters kept in host memory; never below max_adapters
    max_rank: int = 16
    lora_experts: bool = False  # adapters may change experts: each slot has room for all of them
    adapters: tuple[BootAdapter, ...] = ()
    boot_list: Path = Path(names.ADAPTERS_DIRECTORY) / names.ADAPTERS_FILE  # more adapters, read at every start
    adapter_endpoints: bool = False  # whether clients may load and unload adapters over HTTP
    credentials_for: tuple[str, ...] = ()  # addresses under which clients' adapters are read with our credentials
    private_adapter_addresses: bool = False  # whether clients may name http(s) addresses of private networks
    kv_events_endpoint: str = ""  # a ZeroMQ address to publish on; `*` is 127.0.0.1; empty: off
    kv_events_topic: str = ""  # the first part of each message of KV events, by which subscribers choose
    no_prefix_caching: bool = False
    no_overlap: bool = False  # schedule each step only after the previous one is done
    in_process: bool = False  # the engine as a thread of the API's process
    standby: str = ""  # loaded or sleeping: load the model, and wait for POST /model before answering requests
    drain_timeout: float = 120.0
    max_body_bytes: int = 8 * 2**20
    stall_seconds: float = 30.0  # an engine with requests and no step for so long is not ready
    hang_seconds: float = 120.0  # then it is restarted; longer than any step, also the first of a shape
    threads: int = 0  # 0: torch decides; comes from OMP_NUM_THREADS
    metrics_on_serving_port: bool = False  # /metrics for everybody who reaches the port for clients
    legacy_metric_names: bool = False  # export metrics under the names of older vLLMs too
    log_level: str = "INFO"
    tracing: TraceSettings = field(default_factory=TraceSettings)
    run_directory: Path = Path(names.RUN_DIRECTORY)
    cache_directory: Path = Path(names.CACHE_DIRECTORY)
    admin_token_digests: tuple[str, ...] = ()  # empty: the admin port listens on localhost only
    serving_token_digests: tuple[str, ...] = ()  # empty: the serving port requires no token
    gateway_token_digests: tuple[str, ...] = ()  # of an open port: whoever shows one is believed its internal headers
    kernels_key: str = field(default="", repr=False)  # of compiled kernels in the cache; empty: they are not shared
    tls_directory: Path | None = None  # None: both ports speak plain text
    pod: str = ""
    namespace: str = ""

    def with_model(self, spec: ModelSpec) -> "RuntimeSettings":
        """These settings with those of the model; raises ValueError where they are invalid."""
        given: dict[str, Any] = {name: value for name in _SAME if (value := getattr(spec, name)) not in (0, "", False)}
        if spec.gpu_memory_utilization:
            given["gpu_memory_utilization"] = float(spec.gpu_memory_utilization)
        given["max_cpu_adapters"] = spec.max_cpu_adapters or max(0, spec.max_adapters)
        if isinstance(spec, LoadModelRequest):
            given["gateway_token_digests"] = spec.gateway_token_sha256 or self.gateway_token_digests
            given["serving_token_digests"] = spec.serving_token_sha256 or self.serving_token_digests
            given["standby"] = ""  # this request claims a process in standby
            given["drain_timeout"] = float(spec.drain_timeout_seconds) or self.drain_timeout
        settings = replace(
            self,
            model_uri=spec.uri,
            dtype=spec.dtype.value,
            quantization=spec.quantization.value,
            kv_cache_dtype=spec.kv_cache_dtype.value,
            kv_cache_bytes=int(parse_quantity(spec.kv_cache_bytes or "0")),
            kv_cache_host_bytes=int(parse_quantity(spec.kv_cache_host_bytes or "0")),
            speculation=spec.speculation.value,
            sampling_defaults=SamplingDefaults.of(spec.sampling_defaults),
            warm_prompts=parse_warm_prompts(
                [one if isinstance(one, str) else [dict(message) for message in one] for one in spec.warm_prompts]
            ),
            **given,
        )
        settings.check()
        return settings

    def check(self) -> None:
        """Raise ValueError where values are negative or contradict each other."""
        for name in _NOT_NEGATIVE:
            if (value := getattr(self, name)) < 0:
                raise ValueError(f"{flag(name)} {value} is negative")
        if 0 < self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens} is below --max-num-seqs"
                f" {self.max_num_seqs}: every running sequence needs a token in each step"
            )
        if self.task is not Task.EMBED and self.pooling is not Pooling.AUTO:
            raise ValueError(f"--pooling {self.pooling} needs --task {Task.EMBED}")
        if self.score_tokens and (self.task is not Task.EMBED or self.pooling is not Pooling.AUTO):
            raise ValueError(
                f"--score-tokens {self.score_tokens} needs --task {Task.EMBED} and --pooling {Pooling.AUTO}"
            )
        if self.task is Task.EMBED and self.speculation != "none":
            raise ValueError(f"--task {Task.EMBED} computes prompts only: --speculation makes no sense with it")
        if (self.speculation == "draft") != bool(self.draft_model_uri):
            raise ValueError("--draft-model-uri is needed for --speculation draft, and only there")
        if self.kv_cache_host_bytes and self.no_prefix_caching:
            raise ValueError("--kv-cache-host-bytes keeps cold prefixes, and --no-prefix-caching leaves none to keep")
        if self.kv_events_endpoint and not _KV_EVENTS_ENDPOINT.fullmatch(self.kv_events_endpoint):
            raise ValueError(
                f"--kv-events-endpoint {self.kv_events_endpoint!r} must name an address and a port, as tcp://127.0.0.1:5557"
            )
        if self.kv_events_topic and not self.kv_events_endpoint:
            raise ValueError("--kv-events-topic names messages that are not sent: set --kv-events-endpoint too")
        if self.metrics_on_serving_port and (self.serving_token_digests or self.gateway_token_digests):
            raise ValueError(
                "--metrics-on-serving-port is for a runtime without a gateway: in a pod it would show tenants and"
                " models to every caller; scrape the admin port"
            )
        if not all(_SHA256.fullmatch(digest) for digest in self.serving_token_digests):
            raise ValueError("--serving-token-sha256 must be 64 lower-case hex digits")
        if not self.max_adapters:
            for name, value in (
                ("--adapter", self.adapters),
                ("--adapter-endpoints", self.adapter_endpoints),
                ("--lora-experts", self.lora_experts),
            ):
                if value:
                    raise ValueError(f"{name} needs --max-adapters above 0: LoRA adapters are off without it")
            return
        if self.max_cpu_adapters < self.max_adapters:
            raise ValueError(
                f"--max-cpu-adapters {self.max_cpu_adapters} is below --max-adapters {self.max_adapters}:"
                " an adapter that computes is kept in host memory too"
            )
        if len(self.adapters) > self.max_cpu_adapters:
            raise ValueError(
                f"{len(self.adapters)} adapters are to be loaded at the start,"
                f" and --max-cpu-adapters keeps {self.max_cpu_adapters}"
            )

    @property
    def admin_host(self) -> str:
        """The address of the admin port: localhost where no admin token is configured."""
        return self.host if self.admin_token_digests else "127.0.0.1"

    @property
    def model_name(self) -> str:
        """The name that clients use; by default the last part of the model's address."""
        if self.served_name:
            return self.served_name
        return self.model_uri.split("@", 1)[0].rstrip("/").rsplit("/", 1)[-1]


def flag(name: str) -> str:
    """The command-line flag of a setting: `--max-rank` for `max_rank`."""
    return "--" + name.replace("_", "-")


def parse_warm_prompts(given: Any) -> tuple[WarmPrompt, ...]:
    """Parse a list of texts and message lists; raises ValueError naming the first entry that is neither."""
    if not isinstance(given, list):
        raise ValueError("--warm-prompts must be a JSON list of texts and of message lists")
    prompts: list[WarmPrompt] = []
    for place, entry in enumerate(given):
        if isinstance(entry, str) and entry:
            prompts.append(entry)
        elif isinstance(entry, list) and entry and all(_is_message(message) for message in entry):
            prompts.append(tuple(entry))
        else:
            raise ValueError(
                f"--warm-prompts: entry {place} must be a text, or a list of messages with a text role and content"
            )
    return tuple(prompts)


def _is_message(message: Any) -> bool:
    return (
        isinstance(message, dict)
        and set(message) == {"role", "content"}
        and all(isinstance(value, str) for value in message.values())
    )


def _camel(name: str) -> str:
    """The spelling in manifests: `topP` for `top_p`."""
    head, *rest = name.split("_")
    return head + "".join(word.capitalize() for word in rest)
