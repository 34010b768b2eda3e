"""Fills scheduler settings that a spec leaves at their default, by the kind of load that `spec.profile` names.

A field that the user sets to another value than its default wins. What is filled in is stored with the revision, so a
newer operator with other numbers changes nothing that runs.

| profile      | requests a step | tokens a step | why                                                              |
|--------------|-----------------|---------------|------------------------------------------------------------------|
| chat         | 64              | 2,048         | the defaults: first tokens and steady streams alike              |
| coding       | 32              | 4,096         | long prompts, answers that repeat them: prompt lookup            |
| voice        | 16              | 512           | a short step, so that no prompt delays the next token of another |
| batch        | 256             | 8,192         | throughput; nobody waits for a token                             |
| long-context | 16              | 8,192         | few requests, each with a large part of the KV cache             |
"""

from typing import Any, Final

from slipway_api.inference_service import InferenceServiceSpec, Profile
from slipway_api.runtime_spec import Runtime, Speculation, SpeculationMethod

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
    return spec.model_copy(update={"runtime": after})
