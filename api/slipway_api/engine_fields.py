"""The fields of an InferenceService that the command line of an engine has to carry, by name, each as text.

An `Engine` names them in its templates as `$(runtime.maxModelLen)`. A field that no template names is refused, or
ignored and reported: `EngineSpec.fields` says which. Fields that Slipway itself carries out are not here: replicas,
autoscaling, rollout, drain, routing, resources, the template, credentials and the network of the model.
"""

import json
from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import cache
from typing import Any, Final

from slipway_api.inference_service import InferenceServiceSpec
from slipway_api.model_source import CachePolicy
from slipway_api.model_spec import Model, SamplingDefaults
from slipway_api.names import MODEL_CACHE_DIRECTORY
from slipway_api.runtime_spec import SpeculationMethod
from slipway_api.types import parse_quantity

GIB: Final = 1 << 30
SLIPWAY: Final = "slipway"
"""The engine of a service that names none: our own runtime, whose command line the operator itself knows."""

VARIABLES: Final = {
    "name": "metadata.name of the service",
    "namespace": "its namespace",
    "servedName": "what clients send as model",
    "revision": "the hash of the revision",
    "model.source": "what the engine loads: organisation/name of a hub, a path, or the address as it is",
    "ports.serving": "the port that clients and gateway call",
    "ports.admin": "the port of slipway-agent",
    "directories.cache": "a writable folder of the pod; the root file system is read-only",
    "drainedFile": "the file that slipway-agent writes when no request runs any more",
    "drain.timeoutSeconds": "how long requests may take to finish",
    "gpus": "the number of GPUs of a replica",
    "tls.certificate": "file with the certificate of the namespace and its chain; only while internalTLS is on",
    "tls.key": "file with its private key; only while internalTLS is on",
    "tls.authorities": "file with the trusted authorities; only while internalTLS is on",
}
"""What a template may name beside fields; always there, except those of TLS."""


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return value.value if isinstance(value, StrEnum) else str(value)


def _at(*path: str) -> Callable[[InferenceServiceSpec], str]:
    """The field at this path; empty where a part of the path is absent."""

    def read(spec: InferenceServiceSpec) -> str:
        value: Any = spec
        for part in path:
            value = None if value is None else getattr(value, part)
        return _text(value)

    return read


def _hub_revision(spec: InferenceServiceSpec) -> str:
    return spec.model.uri.partition("@")[2] if spec.model.uri.startswith("hf://") else ""


def _cache_folder(spec: InferenceServiceSpec) -> str:
    return "" if spec.model.cache.policy is CachePolicy.NONE else MODEL_CACHE_DIRECTORY


def _bytes(quantity: str) -> int:
    return int(parse_quantity(quantity)) if quantity else 0


def _pool_bytes(spec: InferenceServiceSpec) -> str:
    return str(_bytes(spec.runtime.kv_cache.bytes) or "")


def _pool_gibibytes(spec: InferenceServiceSpec) -> str:
    """Whole GiB, at least 1: some engines count in no smaller unit."""
    size = _bytes(spec.runtime.kv_cache.bytes)
    return str(max(1, size // GIB)) if size else ""


def _host_bytes(spec: InferenceServiceSpec) -> str:
    return str(_bytes(spec.runtime.kv_cache.host_bytes) or "")


def _draft_tokens(spec: InferenceServiceSpec) -> str:
    speculation = spec.runtime.speculation
    return "" if speculation.method is SpeculationMethod.NONE else str(speculation.max_tokens)


def _draft_model(spec: InferenceServiceSpec) -> str:
    draft = spec.runtime.speculation.draft_model
    return "" if draft is None else draft.uri


def _adapted_experts(spec: InferenceServiceSpec) -> str:
    lora = spec.runtime.lora
    return "true" if lora is not None and lora.experts else ""


def _sampling(spec: InferenceServiceSpec) -> str:
    """The defaults that are set, as JSON with the names of the OpenAI API; the limit of tokens is another field."""
    defaults = spec.model.sampling_defaults.model_dump(exclude_none=True, exclude={"max_tokens"})
    values = {name: value if isinstance(value, int) else float(value) for name, value in defaults.items()}
    return json.dumps(values, separators=(",", ":")) if values else ""


def _default_tokens(spec: InferenceServiceSpec) -> str:
    return str(spec.model.sampling_defaults.max_tokens or SamplingDefaults().max_tokens)


def _warm_prompts(spec: InferenceServiceSpec) -> str:
    return json.dumps([one.to_json() for one in spec.model.warm_prompts]) if spec.model.warm_prompts else ""


FIELDS: Final[Mapping[str, Callable[[InferenceServiceSpec], str]]] = {
    "model.revision": _hub_revision,
    "model.digest": _at("model", "digest"),
    "model.tokenizer.uri": _at("model", "tokenizer", "uri"),
    "model.tokenizer.sha256": _at("model", "tokenizer", "sha256"),
    "model.chatTemplate": _at("model", "chat_template"),
    "model.samplingDefaults": _sampling,
    "model.samplingDefaults.maxTokens": _default_tokens,
    "model.warmPrompts": _warm_prompts,
    "model.cache": _cache_folder,
    "runtime.task": _at("runtime", "task"),
    "runtime.pooling": _at("runtime", "pooling"),
    "runtime.dtype": _at("runtime", "dtype"),
    "runtime.quantization": _at("runtime", "quantization"),
    "runtime.deterministic": _at("runtime", "deterministic"),
    "runtime.maxModelLen": lambda spec: str(spec.runtime.max_model_len or ""),
    "runtime.maxNumSeqs": _at("runtime", "max_num_seqs"),
    "runtime.maxNumBatchedTokens": _at("runtime", "max_num_batched_tokens"),
    "runtime.blockSize": _at("runtime", "block_size"),
    "runtime.maxOutputTokens": lambda spec: str(spec.runtime.max_output_tokens or ""),
    "runtime.tensorParallelSize": _at("runtime", "tensor_parallel_size"),
    "runtime.kvCache.gpuMemoryUtilization": _at("runtime", "kv_cache", "gpu_memory_utilization"),
    "runtime.kvCache.dtype": _at("runtime", "kv_cache", "dtype"),
    "runtime.kvCache.bytes": _pool_bytes,
    "runtime.kvCache.hostBytes": _host_bytes,
    "runtime.speculation.method": _at("runtime", "speculation", "method"),
    "runtime.speculation.maxTokens": _draft_tokens,
    "runtime.speculation.draftModel.uri": _draft_model,
    "runtime.lora.maxAdapters": _at("runtime", "lora", "max_adapters"),
    "runtime.lora.maxCPUAdapters": _at("runtime", "lora", "max_cpu_adapters"),
    "runtime.lora.maxRank": _at("runtime", "lora", "max_rank"),
    "runtime.lora.experts": _adapted_experts,
}
"""Name in templates -> the field's value as text; empty: it has none."""

ALIASES: Final[Mapping[str, tuple[str, Callable[[InferenceServiceSpec], str]]]] = {
    "runtime.kvCache.gibibytes": ("runtime.kvCache.bytes", _pool_gibibytes),
}
"""Other forms of a field: name in templates -> the field, and its text."""


@cache
def _default_text(name: str) -> str:
    return FIELDS[name](InferenceServiceSpec(model=Model(uri="file:///")))


def is_set(spec: InferenceServiceSpec, name: str) -> bool:
    """Whether the field has another value than its default; a default that is written out counts as not set."""
    return FIELDS[name](spec) != _default_text(name)


def field_texts(spec: InferenceServiceSpec) -> dict[str, str]:
    """Every name of a field or of another form of it -> its text."""
    texts = {name: read(spec) for name, read in FIELDS.items()}
    return texts | {name: read(spec) for name, (_, read) in ALIASES.items()}


def field_of(name: str) -> str | None:
    """The field that a name in a template stands for; None where it is no field."""
    return name if name in FIELDS else ALIASES[name][0] if name in ALIASES else None


def template_section() -> str:
    """The part of the reference page that lists the names that a template may hold."""
    lines = [
        "## Names in templates",
        "",
        "A template is text; `$(name)` in it is replaced, and `$$` is a dollar. An entry is left out where a name in "
        "it has no value.",
        "",
        "| name | value |",
        "|---|---|",
        *(f"| `{name}` | {meaning} |" for name, meaning in VARIABLES.items()),
        *(f"| `{name}` | the field of the service's spec |" for name in FIELDS),
        *(f"| `{name}` | `{field}` in whole GiB, at least 1 |" for name, (field, _) in ALIASES.items()),
        "| `value` | in an entry with `field`: the value of the field, translated by `values` |",
        "",
    ]
    return "\n".join(lines)
