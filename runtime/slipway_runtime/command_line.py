"""The command line of `slipway-runtime`, and how it becomes settings: parsed and checked once, before anything starts.

`0` and the empty string mean "not set" everywhere, so the operator may emit every flag. An error is a sentence that
names the flag and never quotes a prompt.
"""

import argparse
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from slipway_api import names
from slipway_api.types import parse_quantity
from slipway_runtime.settings import (
    DTYPES,
    KV_DTYPES,
    QUANTIZATIONS,
    SPECULATIONS,
    BootAdapter,
    RuntimeSettings,
    SamplingDefaults,
    WarmPrompt,
)

_KV_EVENTS_ENDPOINT: Final = re.compile(r"tcp://[^\s/]+:\d{1,5}")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_COUNTS: Final = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "speculation_max_tokens",
    "max_queued_tokens",
    "tensor_parallel_size",
)
_ADAPTERS: Final = ("max_adapters", "max_cpu_adapters", "max_rank")


def arguments_of(argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command line; leaves the process with a message where it is wrong."""
    return parser().parse_args(argv)


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
    serve.add_argument(
        "--serving-token-sha256",
        action="append",
        default=[],
        dest="serving_token_digests",
        metavar="HEX",
        help=f"take requests only with a token of this SHA-256 in {names.HEADER_SERVING_TOKEN}; once for each token",
    )
    serve.add_argument("--dtype", choices=DTYPES, default="auto")
    serve.add_argument("--quantization", choices=("", *QUANTIZATIONS), default="", help="of the weights, at load")
    serve.add_argument("--kv-cache-dtype", choices=("", *KV_DTYPES), default="", help="number format of the KV cache")
    serve.add_argument("--deterministic", action="store_true", help="the same tokens alone and in any batch")
    serve.add_argument("--tensor-parallel-size", type=int, default=0, help="GPUs that share the model")
    serve.add_argument("--max-model-len", type=int, default=0, help="0: the model's own context")
    serve.add_argument("--max-num-seqs", type=int, default=0, help="sequences in one batch")
    serve.add_argument("--max-num-batched-tokens", type=int, default=0, help="tokens in one step")
    serve.add_argument("--max-num-queued-reqs", type=int, default=0, help="requests that may wait; more get a 429")
    serve.add_argument("--max-queued-tokens", type=int, default=0, help="prompt tokens that may wait; more get a 429")
    serve.add_argument("--tenant-weights", default="", metavar="JSON", help='shares under load: {"team-a": 2}')
    serve.add_argument("--block-size", type=int, default=0, help="tokens in one KV block")
    serve.add_argument("--max-output-tokens", type=int, default=0, help="hard cap of one answer")
    serve.add_argument("--kv-cache-bytes", default="", metavar="QUANTITY", help="size of the KV pool, such as 64Mi")
    serve.add_argument(
        "--kv-cache-host-bytes", default="", metavar="QUANTITY", help="host memory for cold prefixes, such as 32Gi"
    )
    serve.add_argument("--gpu-memory-utilization", type=float, default=0.0)
    serve.add_argument("--model-digest", default="", help="sha256:… of the weights; a mismatch refuses to start")
    serve.add_argument("--tokenizer-uri", default="", help="where the tokenizer is, if not beside the weights")
    serve.add_argument("--tokenizer-sha256", default="", help="a mismatch refuses to start")
    template = serve.add_mutually_exclusive_group()
    template.add_argument("--chat-template-file", default="", metavar="PATH")
    template.add_argument("--chat-template", default="", metavar="INLINE")
    serve.add_argument("--sampling-defaults", default="", metavar="JSON")
    serve.add_argument(
        "--warm-prompts",
        action="append",
        default=[],
        metavar="JSON",
        help="a list of texts and of message lists to prefill; several lists are one",
    )
    serve.add_argument("--drain-timeout", type=float, default=0.0, metavar="SECONDS")
    serve.add_argument("--speculation", choices=("", *SPECULATIONS), default="", help="how tokens are guessed ahead")
    serve.add_argument("--speculation-max-tokens", type=int, default=0, help="tokens guessed at most in one step")
    _add_adapter_flags(serve)
    serve.add_argument(
        "--kv-events-endpoint", default="", metavar="ADDRESS", help="publish KV events here: tcp://*:5557"
    )
    serve.add_argument(
        "--legacy-metric-names", action="store_true", help="export metrics under the names of older vLLMs too"
    )
    serve.add_argument("--no-prefix-caching", action="store_true", help="compute every prompt from its first token")
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
    for name in ("kv_cache_bytes", "kv_cache_host_bytes"):
        given[name] = int(parse_quantity(text)) if (text := getattr(arguments, name)) else 0
    if arguments.chat_template_file:
        given["chat_template"] = Path(arguments.chat_template_file).read_text(encoding="utf-8")
    if arguments.sampling_defaults:
        given["sampling_defaults"] = SamplingDefaults.of(json.loads(arguments.sampling_defaults))
    lists = [_json("--warm-prompts", text) for text in arguments.warm_prompts if text]
    given["warm_prompts"] = tuple(prompt for one in lists for prompt in _warm_prompts(one))
    if arguments.tenant_weights:
        given["tenant_weights"] = _tenant_weights(_json("--tenant-weights", arguments.tenant_weights))
    given["adapters"] = _boot_adapters(arguments.adapters)
    given["serving_token_digests"] = tuple(digest for digest in arguments.serving_token_digests if digest)
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
    for name in (*_COUNTS, *_ADAPTERS):
        if (value := getattr(settings, name)) < 0:
            raise ValueError(f"{_flag(name)} {value} is negative")
    if 0 < settings.max_num_batched_tokens < settings.max_num_seqs:
        raise ValueError(
            f"--max-num-batched-tokens {settings.max_num_batched_tokens} is below --max-num-seqs"
            f" {settings.max_num_seqs}: every running sequence needs a token in each step"
        )
    if settings.kv_cache_host_bytes and settings.no_prefix_caching:
        raise ValueError("--kv-cache-host-bytes keeps cold prefixes, and --no-prefix-caching leaves none to keep")
    if settings.kv_events_endpoint and not _KV_EVENTS_ENDPOINT.fullmatch(settings.kv_events_endpoint):
        raise ValueError(
            f"--kv-events-endpoint {settings.kv_events_endpoint!r} must name an address and a port, as tcp://*:5557"
        )
    if not all(_SHA256.fullmatch(digest) for digest in settings.serving_token_digests):
        raise ValueError("--serving-token-sha256 must be 64 lower-case hex digits")
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
