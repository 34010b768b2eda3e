"""What `slipway-runtime serve` was asked to do, as frozen values. `command_line` makes them, once, at the start."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from slipway_api import names

DTYPES: Final = ("auto", "bf16", "fp16", "fp32")
QUANTIZATIONS: Final = ("none", "int8", "fp8")
KV_DTYPES: Final = ("auto", "fp8", "int8")
SPECULATIONS: Final = ("none", "promptLookup")

# What is prefilled before the replica is ready: a text, or the messages of a chat, each with `role` and `content`.
WarmPrompt = str | tuple[Mapping[str, str], ...]


@dataclass(frozen=True, slots=True)
class BootAdapter:
    """A LoRA adapter that is loaded before the replica is ready: what clients send as `model`, and where it is."""

    name: str
    uri: str


@dataclass(frozen=True, kw_only=True)
class SamplingDefaults:
    """What a request gets that says nothing; `None` falls through to the model's own defaults."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None

    def over(self, weaker: "SamplingDefaults") -> "SamplingDefaults":
        """These defaults where they are set, the weaker ones elsewhere."""
        chosen: dict[str, Any] = {
            f.name: mine if (mine := getattr(self, f.name)) is not None else getattr(weaker, f.name)
            for f in fields(SamplingDefaults)
        }
        return SamplingDefaults(**chosen)

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> "SamplingDefaults":
        """From JSON in the manifest's spelling (`topP`) or the wire's (`top_p`); an unknown key is an error."""
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
class RuntimeSettings:
    """One replica, as asked for. `None` and `0` mean that the model or the machine decides."""

    model_uri: str
    served_name: str = ""
    revision: str = ""
    host: str = "0.0.0.0"
    port: int = names.SERVING_PORT
    admin_port: int = names.ADMIN_PORT
    dtype: str = "auto"
    quantization: str = "none"  # of the weights, done while they load: one of QUANTIZATIONS
    kv_cache_dtype: str = "auto"  # one of KV_DTYPES; auto: that of the arithmetic
    deterministic: bool = False
    tensor_parallel_size: int = 1  # GPUs, or processes on a CPU, that share the model
    max_model_len: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    max_num_queued_reqs: int = 1024
    max_queued_tokens: int = 0  # prompt tokens that may wait; 0: any number
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
    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    warm_prompts: tuple[WarmPrompt, ...] = ()
    speculation: str = "none"  # one of SPECULATIONS
    speculation_max_tokens: int = 4
    max_adapters: int = 0  # LoRA adapters that compute at the same time; 0: adapters are off
    max_cpu_adapters: int = 0  # that are kept in host memory; never below max_adapters
    max_rank: int = 16
    adapters: tuple[BootAdapter, ...] = ()
    adapter_endpoints: bool = False  # whether clients may load and unload adapters over HTTP
    kv_events_endpoint: str = ""  # a ZeroMQ address to publish on, such as tcp://*:5557; empty: off
    no_prefix_caching: bool = False
    no_overlap: bool = False  # plan each step only when the one before is done
    in_process: bool = False  # the engine as a thread of the API's process
    drain_timeout: float = 120.0
    max_body_bytes: int = 8 * 2**20
    stall_seconds: float = 30.0  # a step loop that owes work and has not stepped for so long is not ready
    threads: int = 0  # 0: torch decides; comes from OMP_NUM_THREADS
    legacy_metric_names: bool = False  # export metrics under the names of older vLLMs too
    log_level: str = "INFO"
    run_directory: Path = Path(names.RUN_DIRECTORY)
    cache_directory: Path = Path(names.CACHE_DIRECTORY)
    admin_token_digests: tuple[str, ...] = ()  # none: the admin port is for this machine only
    serving_token_digests: tuple[str, ...] = ()  # none: the serving port takes requests without a token
    pod: str = ""
    namespace: str = ""

    @property
    def admin_host(self) -> str:
        """Without a token to ask for, the admin port answers nobody but this machine."""
        return self.host if self.admin_token_digests else "127.0.0.1"

    @property
    def model_name(self) -> str:
        """The name that clients use; by default the last part of the model's address."""
        if self.served_name:
            return self.served_name
        return self.model_uri.split("@", 1)[0].rstrip("/").rsplit("/", 1)[-1]


def _camel(name: str) -> str:
    """`top_p` as manifests write it: `topP`."""
    head, *rest = name.split("_")
    return head + "".join(word.capitalize() for word in rest)
