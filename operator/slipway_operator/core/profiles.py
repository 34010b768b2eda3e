"""Fills scheduler settings that a spec leaves at their default, by the kind of load that `spec.profile` names.

A field that the user sets to another value than its default wins. What is filled in is stored with the revision, so a
newer operator with other numbers changes nothing that runs.

| profile      | requests a step | tokens a step | CPUs a GPU | why                                                    |
|--------------|-----------------|---------------|------------|--------------------------------------------------------|
| chat         | 64              | 2,048         | 4          | the defaults: first tokens and steady streams alike    |
| coding       | 32              | 4,096         | 6          | long prompts, answers that repeat them: prompt lookup  |
| voice        | 16              | 512           | 4          | a short step, so that no prompt delays another's token |
| batch        | 256             | 8,192         | 6          | throughput; nobody waits for a token                   |
| long-context | 16              | 8,192         | 6          | few requests, each with a large part of the KV cache   |

CPUs serve HTTP, tokenize, and launch the GPU's work: with too few of them the GPU idles. They are whole numbers, and
limit and request are equal, as the kubelet's static CPU manager asks for CPUs of the GPU's NUMA node. Memory is a
quarter of the GPU's for reading weights, at least 16 GiB, and what kvCache.hostBytes asks for. A replica without a GPU
gets neither, nor one that comes from a WarmPool, nor one whose spec names CPUs or memory itself.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Final

from slipway_api.gpu_catalogue import GIB, find_gpu
from slipway_api.inference_service import InferenceServiceSpec, Profile, Resources
from slipway_api.runtime_spec import Runtime, Speculation, SpeculationMethod
from slipway_api.types import parse_quantity

_RUNTIME: Final[dict[Profile, dict[str, Any]]] = {
    Profile.CHAT: {},
    Profile.CODING: {
        "max_num_seqs": 32,
        "max_num_batched_tokens": 4096,
        "speculation": Speculation(method=SpeculationMethod.PROMPT_LOOKUP),
    },
    Profile.VOICE: {"max_num_seqs": 16, "max_num_batched_tokens": 512},
    Profile.BATCH: {"max_num_seqs": 256, "max_num_batched_tokens": 8192},
    Profile.LONG_CONTEXT: {"max_num_seqs": 16, "max_num_batched_tokens": 8192},
}

_CPUS_A_GPU: Final = {
    Profile.CHAT: 4,
    Profile.CODING: 6,
    Profile.VOICE: 4,
    Profile.BATCH: 6,
    Profile.LONG_CONTEXT: 6,
}
_LEAST_GIB_A_GPU: Final = 16
_SHARE_OF_GPU_MEMORY: Final = 4  # one part in four


def apply_profile(spec: InferenceServiceSpec) -> InferenceServiceSpec:
    """The spec with the fields that its profile fills; the spec itself where it names none."""
    if spec.profile is None:
        return spec
    fields, runtime = Runtime.model_fields, spec.runtime
    filled = {
        name: value
        for name, value in _RUNTIME[spec.profile].items()
        if getattr(runtime, name) == fields[name].get_default(call_default_factory=True)
    }
    after = runtime.model_copy(update=filled)
    if after.max_num_batched_tokens < after.max_num_seqs:
        # One of the two is the user's: every running request needs a token in each step.
        name = "max_num_seqs" if "max_num_seqs" in filled else "max_num_batched_tokens"
        limit = min if name == "max_num_seqs" else max
        after = after.model_copy(update={name: limit(after.max_num_batched_tokens, after.max_num_seqs)})
    return spec.model_copy(update={"runtime": after, "resources": _with_cpus_and_memory(spec, spec.profile)})


def _with_cpus_and_memory(spec: InferenceServiceSpec, profile: Profile) -> Resources:
    """The resources with CPUs and memory for each GPU, where the spec says nothing of them."""
    resources = spec.resources
    # A pod of a WarmPool is claimed only with the resources that the service names: then they are the user's to name.
    count = resources.gpu.count if spec.warm_pool is None else 0
    named = {name for of in _named_resources(spec) for name in of}
    requests, limits = dict(resources.requests), dict(resources.limits)
    if count and "cpu" not in named:
        requests["cpu"] = limits["cpu"] = str(count * _CPUS_A_GPU[profile])
    if count and "memory" not in named:
        facts = find_gpu(resources.gpu.product) if resources.gpu.product else None
        of_gpu = facts.memory_bytes // _SHARE_OF_GPU_MEMORY if facts is not None else 0
        needed = count * max(_LEAST_GIB_A_GPU * GIB, of_gpu)
        needed += int(parse_quantity(spec.runtime.kv_cache.host_bytes)) if spec.runtime.kv_cache.host_bytes else 0
        requests["memory"] = f"{-(-needed // GIB)}Gi"
    return resources.model_copy(update={"requests": requests, "limits": limits})


def _named_resources(spec: InferenceServiceSpec) -> Iterator[Iterable[str]]:
    """The names of resources that the spec or its template sets."""
    yield spec.resources.requests
    yield spec.resources.limits
    for container in spec.template.spec.containers or ():
        yield container.resources.requests
        yield container.resources.limits
