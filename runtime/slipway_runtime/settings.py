"""What `slipway-runtime serve` was asked to do: the command line and the environment, parsed once into frozen values.

`0` and the empty string mean "not set" everywhere, so the operator may emit every flag.
"""

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from slipway_api import names
from slipway_api.types import parse_quantity

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
    max_model_len: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    max_num_queued_reqs: int = 1024
    max_queued_tokens: int = 0  # prompt tokens that may wait; 0: any number
    tenant_weights: Mapping[str, float] = field(default_factory=dict)  # shares under load; a tenant not here has 1
    block_size: int = 16
    max_output_tokens: int = 0
    kv_cache_bytes: int = 0
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
    no_overlap: bool = False  # plan each step only when the one before is done
    in_process: bool = False  # the engine as a thread of the API's process
    drain_timeout: float = 120.0
    max_body_bytes: int = 8 * 2**20
    stall_seconds: float = 30.0  # a step loop that owes work and has not stepped for so long is not ready
    threads: int = 0  # 0: torch decides; comes from OMP_NUM_THREADS
    log_level: str = "INFO"
    run_directory: Path = Path(names.RUN_DIRECTORY)
    cache_directory: Path = Path(names.CACHE_DIRECTORY)
    admin_token_digests: tuple[str, ...] = ()  # none: the admin port is for this machine only
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


def parser() -> argparse.ArgumentParser:
    """The command line of `slipway-runtime`."""
    top = argparse.ArgumentParser(prog="slipway-runtime", description="Serve one model over the OpenAI API.")
    verbs = top.add_subparsers(dest="verb", required=True)

    serve = verbs.add_parser("serve", help="serve a model until SIGTERM")
    serve.add_argument(
        "model_uri", metavar="MODEL", help="file:///path, hf://organisation/name@revision, s3://, https://"
    )
    serve.add_argument("--served-name", default="", help="the name clients use in `model`")
    serve.add_argument("--revision", default="", help="the revision named in every response")
    serve.add_argument("--host", default="0.0.0.0", help="address of the serving port")
    serve.add_argument("--port", type=int, default=names.SERVING_PORT)
    serve.add_argument("--admin-port", type=int, default=names.ADMIN_PORT)
    serve.add_argument("--dtype", choices=DTYPES, default="auto")
    serve.add_argument("--quantization", choices=("", *QUANTIZATIONS), default="", help="of the weights, at load")
    serve.add_argument("--kv-cache-dtype", choices=("", *KV_DTYPES), default="", help="number format of the KV cache")
    serve.add_argument("--deterministic", action="store_true", help="the same tokens alone and in any batch")
    serve.add_argument("--max-model-len", type=int, default=0, help="0: the model's own context")
    serve.add_argument("--max-num-seqs", type=int, default=0, help="sequences in one batch")
    serve.add_argument("--max-num-batched-tokens", type=int, default=0, help="tokens in one step")
    serve.add_argument("--max-num-queued-reqs", type=int, default=0, help="requests that may wait; more get a 429")
    serve.add_argument("--max-queued-tokens", type=int, default=0, help="prompt tokens that may wait; more get a 429")
    serve.add_argument("--tenant-weights", default="", metavar="JSON", help='shares under load: {"team-a": 2}')
    serve.add_argument("--block-size", type=int, default=0, help="tokens in one KV block")
    serve.add_argument("--max-output-tokens", type=int, default=0, help="hard cap of one answer")
    serve.add_argument("--kv-cache-bytes", default="", metavar="QUANTITY", help="size of the KV pool, such as 64Mi")
    serve.add_argument("--gpu-memory-utilization", type=float, default=0.0)
    serve.add_argument("--model-digest", default="", help="sha256:… of the weights; a mismatch refuses to start")
    serve.add_argument("--tokenizer-uri", default="", help="where the tokenizer is, if not beside the weights")
    serve.add_argument("--tokenizer-sha256", default="", help="a mismatch refuses to start")
    template = serve.add_mutually_exclusive_group()
    template.add_argument("--chat-template-file", default="", metavar="PATH")
    template.add_argument("--chat-template", default="", metavar="INLINE")
    serve.add_argument("--sampling-defaults", default="", metavar="JSON")
    serve.add_argument("--warm-prompts", default="", metavar="JSON", help="texts and lists of messages to prefill")
    serve.add_argument("--drain-timeout", type=float, default=0.0, metavar="SECONDS")
    serve.add_argument("--speculation", choices=("", *SPECULATIONS), default="", help="how tokens are guessed ahead")
    serve.add_argument("--speculation-max-tokens", type=int, default=0, help="tokens guessed at most in one step")
    _add_adapter_flags(serve)
    serve.add_argument(
        "--kv-events-endpoint", default="", metavar="ADDRESS", help="publish KV events here: tcp://*:5557"
    )
    serve.add_argument("--no-overlap", action="store_true", help="plan each step only when the one before is done")
    serve.add_argument("--in-process", action="store_true", help="run the engine in a thread of this process")

    drain = verbs.add_parser("drain", help="ask the replica in this pod to finish what it has; returns when it has")
    drain.add_argument("--timeout", type=float, default=0.0, metavar="SECONDS")

    pull = verbs.add_parser("pull", help="bring a model into the cache, and print where it is")
    pull.add_argument("model_uri", metavar="MODEL")
    return top


def _add_adapter_flags(serve: argparse.ArgumentParser) -> None:
    serve.add_argument(
        "--max-adapters", type=int, default=0, help="LoRA adapters that compute together; 0: LoRA is off"
    )
    serve.add_argument("--max-cpu-adapters", type=int, default=0, help="adapters kept in host memory")
    serve.add_argument("--max-rank", type=int, default=0, help="the largest rank that an adapter may have")
    serve.add_argument(
        "--adapter",
        action="append",
        default=[],
        dest="adapters",
        metavar="NAME=URI",
        help="an adapter to load before the replica is ready; once for each",
    )
    serve.add_argument(
        "--adapter-endpoints", action="store_true", help="answer /v1/load_lora_adapter and /v1/unload_lora_adapter"
    )


def serve_settings(arguments: argparse.Namespace, environment: Mapping[str, str]) -> RuntimeSettings:
    """The settings of `serve`; raises ValueError with a sentence where a value makes no sense."""
    unset = RuntimeSettings(model_uri="")
    given: dict[str, Any] = {
        key: value
        for key in (f.name for f in fields(RuntimeSettings))
        if (value := getattr(arguments, key, None)) not in (None, "", 0, 0.0, False)
    }
    given["kv_cache_bytes"] = int(parse_quantity(arguments.kv_cache_bytes)) if arguments.kv_cache_bytes else 0
    if arguments.chat_template_file:
        given["chat_template"] = Path(arguments.chat_template_file).read_text(encoding="utf-8")
    if arguments.sampling_defaults:
        given["sampling_defaults"] = SamplingDefaults.of(json.loads(arguments.sampling_defaults))
    if arguments.warm_prompts:
        given["warm_prompts"] = _warm_prompts(_json("--warm-prompts", arguments.warm_prompts))
    if arguments.tenant_weights:
        given["tenant_weights"] = _tenant_weights(_json("--tenant-weights", arguments.tenant_weights))
    given["adapters"] = _boot_adapters(arguments.adapters)
    if arguments.max_adapters:
        given["max_cpu_adapters"] = arguments.max_cpu_adapters or arguments.max_adapters
    # Port 0 asks the kernel for a free one, which is how tests start many replicas on one machine.
    given |= {"port": arguments.port, "admin_port": arguments.admin_port}
    digests = environment.get(names.ENV_ADMIN_TOKEN_SHA256, "")
    settings = RuntimeSettings(
        **given,
        threads=int(environment.get("OMP_NUM_THREADS") or 0),
        log_level=environment.get("SLIPWAY_LOG_LEVEL") or unset.log_level,
        run_directory=run_directory(environment),
        cache_directory=cache_directory(environment),
        admin_token_digests=tuple(d.strip() for d in digests.split(",") if d.strip()),
        pod=environment.get("POD_NAME", ""),
        namespace=environment.get("POD_NAMESPACE", ""),
    )
    _check(settings)
    return settings


def _check(settings: RuntimeSettings) -> None:
    """Raises ValueError where values do not go together."""
    for name in ("max_num_seqs", "max_num_batched_tokens", "speculation_max_tokens", "max_queued_tokens", *_ADAPTERS):
        if (value := getattr(settings, name)) < 0:
            raise ValueError(f"{_flag(name)} {value} is negative")
    if 0 < settings.max_num_batched_tokens < settings.max_num_seqs:
        raise ValueError(
            f"--max-num-batched-tokens {settings.max_num_batched_tokens} is below --max-num-seqs"
            f" {settings.max_num_seqs}: every running sequence needs a token in each step"
        )
    if not settings.max_adapters:
        if settings.adapters or settings.adapter_endpoints:
            asked = "--adapter" if settings.adapters else "--adapter-endpoints"
            raise ValueError(f"{asked} needs --max-adapters above 0: LoRA adapters are off without it")
        return
    if settings.max_cpu_adapters < settings.max_adapters:
        raise ValueError(
            f"--max-cpu-adapters {settings.max_cpu_adapters} is below --max-adapters {settings.max_adapters}:"
            " an adapter that computes is kept in host memory too"
        )
    if len(settings.adapters) > settings.max_cpu_adapters:
        raise ValueError(
            f"{len(settings.adapters)} adapters are to be loaded at the start,"
            f" and --max-cpu-adapters keeps {settings.max_cpu_adapters}"
        )


_ADAPTERS: Final = ("max_adapters", "max_cpu_adapters", "max_rank")


def _flag(name: str) -> str:
    """`max_rank` as the command line spells it: `--max-rank`."""
    return "--" + name.replace("_", "-")


def _json(flag: str, text: str) -> Any:
    """The value of a flag that holds JSON; never quotes the text, which may be a prompt."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{flag} is not JSON: {error.msg} at character {error.pos}") from None


def _warm_prompts(given: Any) -> tuple[WarmPrompt, ...]:
    """A list of texts and of message lists; raises ValueError naming the first entry that is neither."""
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


def _tenant_weights(given: Any) -> dict[str, float]:
    """Tenant -> its share under load; raises ValueError for what is no positive number."""
    if not isinstance(given, dict):
        raise ValueError('--tenant-weights must be a JSON object such as {"team-a": 2}')
    for tenant, weight in given.items():
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not is_number or not (0 < weight < math.inf):
            raise ValueError(f"--tenant-weights: the weight of {tenant!r} must be a number above 0")
    return {tenant: float(weight) for tenant, weight in given.items()}


def _boot_adapters(given: Sequence[str]) -> tuple[BootAdapter, ...]:
    """`NAME=URI` each; raises ValueError for another form, and for a name that occurs twice."""
    adapters: dict[str, BootAdapter] = {}
    for text in given:
        name, equals, uri = text.partition("=")
        if not (name and equals and uri):
            raise ValueError(f"--adapter {text!r} must be NAME=URI, such as sql=file:///models/adapters/sql")
        if name in adapters:
            raise ValueError(f"--adapter {name} is given twice")
        adapters[name] = BootAdapter(name, uri)
    return tuple(adapters.values())


def run_directory(environment: Mapping[str, str]) -> Path:
    """Where the drain socket lies."""
    return Path(environment.get("SLIPWAY_RUN_DIR") or names.RUN_DIRECTORY)


def cache_directory(environment: Mapping[str, str]) -> Path:
    """Where fetched models lie; on a laptop, in the user's own cache."""
    if environment.get("SLIPWAY_CACHE_DIR"):
        return Path(environment["SLIPWAY_CACHE_DIR"])
    inside_a_pod = Path(names.CACHE_DIRECTORY)
    if inside_a_pod.is_dir():
        return inside_a_pod
    return Path(environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME", "/tmp")) / ".cache") / "slipway"  # noqa: S108  the last resort of a user without a home


def _camel(name: str) -> str:
    """`top_p` as manifests write it: `topP`."""
    head, *rest = name.split("_")
    return head + "".join(word.capitalize() for word in rest)


def arguments_of(argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command line; leaves the process with a message where it is wrong."""
    return parser().parse_args(argv)
