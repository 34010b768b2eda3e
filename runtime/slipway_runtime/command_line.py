"""Parses the command line of `slipway-runtime` into settings, checked once before anything starts.

`0` and the empty string mean "not set" everywhere, so the operator may emit every flag. An error is a sentence that
names the flag and never quotes a prompt.
"""

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Final

from slipway_api import names
from slipway_api.listening import ALL_ADDRESSES
from slipway_api.runtime_api import ModelSpec
from slipway_api.runtime_spec import Dtype, KVDtype, Pooling, Quantization, SpeculationMethod, Task
from slipway_runtime.settings import (
    MAX_QUEUED_REQUESTS,
    MAX_QUEUED_TOKENS,
    REASONING_PARSERS,
    STANDBY_LEVELS,
    TOOL_CALL_PARSERS,
    BootAdapter,
    RuntimeSettings,
    SamplingDefaults,
    TraceSettings,
    flag,
    parse_warm_prompts,
)

REFUSE_AFTER_SECONDS: Final = 5.0  # as spec.drain.endpointPropagationSeconds


# Number formats by the names of vLLM and config.json.
_OWN_NAMES: Final = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
    "fp8_e4m3": "fp8",
}


def _own_name(text: str) -> str:
    """Our name of a number format."""
    return _OWN_NAMES.get(text, text)


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command line; exits with a message where it is wrong."""
    whole = parser()
    arguments, rest = whole.parse_known_args(argv)
    # argparse takes an optional positional only in front of the first flag.
    if arguments.verb == "serve" and not arguments.model_uri and len(rest) == 1 and not rest[0].startswith("-"):
        arguments.model_uri = rest.pop()
    if rest:
        whole.error(f"unrecognized arguments: {' '.join(rest)}")
    return arguments


def parser() -> argparse.ArgumentParser:
    """The argument parser of `slipway-runtime`."""
    top = argparse.ArgumentParser(prog="slipway-runtime", description="Serve one model over the OpenAI API.")
    verbs = top.add_subparsers(dest="verb", required=True)

    serve = verbs.add_parser("serve", help="serve a model until SIGTERM")
    serve.add_argument(
        "model_uri",
        metavar="MODEL",
        nargs="?",
        default="",
        help="file:///path, hf://organisation/name@revision, s3://, https://; none: wait for POST /model",
    )
    serve.add_argument("--served-name", default="", help="the name clients use in `model`")
    serve.add_argument("--revision", default="", help="the revision named in every response")
    serve.add_argument(
        "--host", default=ALL_ADDRESSES, help="address of the serving port; ::, the default: all, IPv4 and IPv6"
    )
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
    serve.add_argument(
        "--tls-directory",
        type=Path,
        default=None,
        metavar="DIRECTORY",
        help="with tls.crt and tls.key, read again when they change: both ports speak TLS and nothing else",
    )
    serve.add_argument("--dtype", type=_own_name, choices=[*Dtype], default="auto", help="also by vLLM's names")
    serve.add_argument("--quantization", choices=("", *Quantization), default="", help="of the weights, at load")
    serve.add_argument(
        "--kv-cache-dtype", type=_own_name, choices=("", *KVDtype), default="", help="number format of the KV cache"
    )
    serve.add_argument("--task", choices=("", *Task), default="", help="generate text, or compute embeddings only")
    serve.add_argument("--score-tokens", metavar="NO,YES", default="", help="a reranker's score: of its two tokens")
    serve.add_argument("--pooling", choices=("", *Pooling), default="", help="of embeddings; auto: the checkpoint's")
    serve.add_argument("--deterministic", action="store_true", help="the same tokens alone and in any batch")
    serve.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU if there is one")
    serve.add_argument("--tensor-parallel-size", type=int, default=0, help="GPUs that share the model")
    serve.add_argument("--max-model-len", type=int, default=0, help="0: the model's own context")
    serve.add_argument("--max-num-seqs", type=int, default=0, help="sequences in one batch")
    serve.add_argument("--max-num-batched-tokens", type=int, default=0, help="tokens in one step")
    serve.add_argument(
        "--max-num-queued-reqs",
        type=int,
        default=0,
        help=f"requests that may wait; more get a 429; 0: {MAX_QUEUED_REQUESTS}",
    )
    serve.add_argument(
        "--max-queued-tokens",
        type=int,
        default=0,
        help=f"prompt tokens that may wait, beside one prompt of any length; more get a 429; 0: {MAX_QUEUED_TOKENS}",
    )
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
    serve.add_argument(
        "--reasoning-parser",
        choices=("", *REASONING_PARSERS),
        default="",
        help="how an answer is split into reasoning and content; auto: the chat template says it",
    )
    serve.add_argument(
        "--tool-call-parser",
        choices=("", *TOOL_CALL_PARSERS),
        default="",
        help="the form in which the model writes tool calls; auto: the chat template shows it",
    )
    serve.add_argument("--sampling-defaults", default="", metavar="JSON")
    serve.add_argument(
        "--warm-prompts",
        action="append",
        default=[],
        metavar="JSON",
        help="a list of texts and of message lists to prefill; several lists are one",
    )
    serve.add_argument("--drain-timeout", type=float, default=0.0, metavar="SECONDS")
    serve.add_argument(
        "--hang-seconds",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="seconds after which /health fails if requests wait and no step is made; above the longest step",
    )
    serve.add_argument("--speculation", choices=("", *SpeculationMethod), default="", help="where drafts come from")
    serve.add_argument("--speculation-max-tokens", type=int, default=0, help="tokens drafted at most in one step")
    serve.add_argument(
        "--draft-model-uri",
        default="",
        metavar="URI",
        help="with --speculation draft: a small model with this tokenizer",
    )
    _add_adapter_flags(serve)
    serve.add_argument(
        "--kv-events-endpoint",
        default="",
        metavar="ADDRESS",
        help="publish KV events, which contain the tokens of prompts: tcp://*:5557 on loopback, tcp://0.0.0.0:5557 to "
        "every pod that connects",
    )
    serve.add_argument(
        "--kv-events-topic",
        default="",
        metavar="TEXT",
        help="topic of KV events, by which subscribers choose; llm-d's picker needs kv@<address of the pod>@<model>",
    )
    serve.add_argument(
        "--metrics-on-serving-port",
        action="store_true",
        help="serve /metrics on the port for clients too, for a runtime without a gateway",
    )
    serve.add_argument(
        "--legacy-metric-names", action="store_true", help="export metrics under the names of older vLLMs too"
    )
    serve.add_argument(
        "--standby",
        choices=("", *STANDBY_LEVELS),
        default="",
        help="load the model, and answer no request before POST /model; sleeping: with the weights in host memory",
    )
    serve.add_argument("--no-prefix-caching", action="store_true", help="compute every prompt from its first token")
    serve.add_argument("--no-overlap", action="store_true", help="plan each step only when the previous step is done")
    serve.add_argument("--in-process", action="store_true", help="run the engine in a thread of this process")

    drain = verbs.add_parser("drain", help="ask the replica in this pod to finish what it has; returns when it has")
    drain.add_argument("--timeout", type=float, default=0.0, metavar="SECONDS")
    drain.add_argument(
        "--refuse-after",
        type=float,
        default=REFUSE_AFTER_SECONDS,
        metavar="SECONDS",
        help="seconds in which new requests are still accepted, until routers know that this pod is not ready",
    )

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
        "--lora-experts", action="store_true", help="adapters may change experts; each slot has room for all of them"
    )
    serve.add_argument(
        "--adapter",
        action="append",
        default=[],
        dest="adapters",
        metavar="NAME=URI",
        help="an adapter to load before the replica is ready; once for each",
    )
    serve.add_argument(
        "--boot-list",
        type=Path,
        default=None,
        metavar="FILE",
        help="a file with more adapters to load before the replica is ready (the operator's ConfigMap)",
    )
    serve.add_argument(
        "--adapter-endpoints", action="store_true", help="answer /v1/load_lora_adapter and /v1/unload_lora_adapter"
    )
    serve.add_argument(
        "--credentials-for",
        action="append",
        default=[],
        metavar="ADDRESS",
        help="read adapters that clients name under this address, such as s3://bucket/adapters or hf://organization,"
        " with the credentials of the environment; may be repeated",
    )
    serve.add_argument(
        "--private-adapter-addresses",
        action="store_true",
        help="let clients load adapters from http(s) addresses of private networks",
    )


def serve_settings(arguments: argparse.Namespace, environment: Mapping[str, str]) -> RuntimeSettings:
    """The settings of `serve`; raises ValueError with a sentence where a value is invalid."""
    process = _process_settings(arguments, environment)
    spec = model_spec(arguments)
    if spec is not None:
        return process.with_model(spec)
    process.check()
    return process


def model_spec(arguments: argparse.Namespace) -> ModelSpec | None:
    """The model flags as a ModelSpec; None where no model is named, and POST /model will name one."""
    given: dict[str, Any] = {
        name: value
        for name in ModelSpec.model_fields
        if (value := getattr(arguments, name, None)) not in (None, "", 0, 0.0, False, [])
    }
    if arguments.chat_template_file:
        given["chat_template"] = Path(arguments.chat_template_file).read_text(encoding="utf-8")
    if "gpu_memory_utilization" in given:
        given["gpu_memory_utilization"] = str(arguments.gpu_memory_utilization)
    if arguments.sampling_defaults:
        defaults = SamplingDefaults.of(json.loads(arguments.sampling_defaults))
        given["sampling_defaults"] = {name: value for name, value in asdict(defaults).items() if value is not None}
    if arguments.warm_prompts:
        lists = [_json("--warm-prompts", text) for text in arguments.warm_prompts if text]
        given["warm_prompts"] = tuple(prompt for one in lists for prompt in parse_warm_prompts(one))
    if arguments.model_uri:
        return ModelSpec(uri=arguments.model_uri, **given)
    if said := sorted(set(given) - {"dtype"} | ({"dtype"} if arguments.dtype != "auto" else set())):
        raise ValueError(f"{flag(said[0])} describes a model, and none is named: POST /model brings both")
    return None


def _process_settings(arguments: argparse.Namespace, environment: Mapping[str, str]) -> RuntimeSettings:
    """The settings of the process that do not depend on the model."""
    unset = RuntimeSettings(model_uri="")
    given: dict[str, Any] = {
        name: value
        for name in {f.name for f in fields(RuntimeSettings)} - {"model_uri", *ModelSpec.model_fields}
        if (value := getattr(arguments, name, None)) not in (None, "", 0, 0.0, False)
    }
    if arguments.tenant_weights:
        given["tenant_weights"] = _tenant_weights(_json("--tenant-weights", arguments.tenant_weights))
    given["adapters"] = _boot_adapters(arguments.adapters)
    given["credentials_for"] = tuple(address for address in arguments.credentials_for if address)
    given["serving_token_digests"] = tuple(digest for digest in arguments.serving_token_digests if digest)
    # Port 0 asks the kernel for a free one, which is how tests start many replicas on one machine.
    given |= {"port": arguments.port, "admin_port": arguments.admin_port}
    digests = environment.get(names.ENV_ADMIN_TOKEN_SHA256, "")
    return RuntimeSettings(
        model_uri="",
        **given,
        threads=int(environment.get("OMP_NUM_THREADS") or 0),
        log_level=environment.get("SLIPWAY_LOG_LEVEL") or unset.log_level,
        tracing=TraceSettings.of(environment),
        run_directory=run_directory(environment),
        cache_directory=cache_directory(environment),
        admin_token_digests=tuple(d.strip() for d in digests.split(",") if d.strip()),
        gateway_token_digests=tuple(
            d.strip() for d in environment.get(names.ENV_GATEWAY_TOKEN_SHA256, "").split(",") if d.strip()
        ),
        kernels_key=environment.get(names.ENV_KERNELS_KEY, ""),
        pod=environment.get("POD_NAME", ""),
        namespace=environment.get("POD_NAMESPACE", ""),
    )


def _json(flag: str, text: str) -> Any:
    """The value of a flag that holds JSON; never quotes the text, which may be a prompt."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{flag} is not JSON: {error.msg} at character {error.pos}") from None


def _tenant_weights(given: Any) -> dict[str, float]:
    """Tenant -> its share under load; raises ValueError for a share that is not a positive number."""
    if not isinstance(given, dict):
        raise ValueError('--tenant-weights must be a JSON object such as {"team-a": 2}')
    for tenant, weight in given.items():
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not is_number or not (0 < weight < math.inf):
            raise ValueError(f"--tenant-weights: the weight of {tenant!r} must be a number above 0")
    return {tenant: float(weight) for tenant, weight in given.items()}


def _boot_adapters(given: Sequence[str]) -> tuple[BootAdapter, ...]:
    """Parse `NAME=URI` adapters; raises ValueError for another form, and for a name that occurs twice."""
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
    """The directory of the drain socket."""
    return Path(environment.get("SLIPWAY_RUN_DIR") or names.RUN_DIRECTORY)


def cache_directory(environment: Mapping[str, str]) -> Path:
    """The directory of the model cache; on a laptop, inside the user's own cache."""
    if environment.get("SLIPWAY_CACHE_DIR"):
        return Path(environment["SLIPWAY_CACHE_DIR"])
    inside_a_pod = Path(names.CACHE_DIRECTORY)
    if inside_a_pod.is_dir():
        return inside_a_pod
    return Path(environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME", "/tmp")) / ".cache") / "slipway"  # noqa: S108  the last resort of a user without a home
