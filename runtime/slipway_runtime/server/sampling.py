"""Which sampling parameters a request resolves to. Pure: the request, the defaults, the model's limits in; values out.

What is not said comes from the service's defaults, then the model's `generation_config.json`, then OpenAI's values.
After this point nothing is left open, so the same request means the same on every replica.
"""

import json
from pathlib import Path
from typing import Any

from slipway_runtime.messages import EngineFacts, SamplingParams
from slipway_runtime.server.errors import ApiError, prompt_too_long
from slipway_runtime.server.openai_types import GenerationRequest
from slipway_runtime.settings import SamplingDefaults

OPENAI_COMPLETION_TOKENS = 16  # what /v1/completions gives when nobody says anything


def model_defaults(directory: Path) -> SamplingDefaults:
    """What the model's author recommends in `generation_config.json`, where there is one."""
    path = directory / "generation_config.json"
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return SamplingDefaults(
        temperature=config.get("temperature"),
        top_p=config.get("top_p"),
        top_k=config.get("top_k"),
        min_p=config.get("min_p"),
        repetition_penalty=config.get("repetition_penalty"),
        max_tokens=config.get("max_new_tokens"),
    )


def resolve(
    request: GenerationRequest,
    defaults: SamplingDefaults,
    facts: EngineFacts,
    *,
    prompt_tokens: int,
    max_output_tokens: int,
    otherwise_max_tokens: int | None,
    fresh_seed: int,
    prompt_field: str,
) -> SamplingParams:
    """The parameters of one request; raises ApiError where it asks for what cannot be.

    `otherwise_max_tokens` is the length of an answer when neither the client nor a default says one; None: what fits.
    """
    room = facts.max_model_len - prompt_tokens
    if room < 1:
        raise prompt_too_long(facts.max_model_len, prompt_tokens, param=prompt_field)
    wanted = request.wanted_tokens
    if wanted is not None and wanted > facts.max_model_len:
        raise ApiError(
            400,
            f"max_tokens is {wanted}. This model's maximum context length is {facts.max_model_len} tokens,"
            " prompt and answer together.",
            param="max_tokens",
        )
    max_tokens = min(_first(wanted, defaults.max_tokens, otherwise_max_tokens, room), room)
    if max_output_tokens:
        max_tokens = min(max_tokens, max_output_tokens)
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        raise ApiError(400, f"min_tokens is {min_tokens}, above max_tokens {max_tokens}", param="min_tokens")
    stop_ids = tuple(request.stop_token_ids or ())
    if stop_ids and max(stop_ids) >= facts.vocab_size:
        raise ApiError(
            400,
            f"stop_token_ids holds {max(stop_ids)}, the vocabulary has {facts.vocab_size} entries",
            param="stop_token_ids",
        )
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=_first(request.temperature, defaults.temperature, 1.0),
        top_p=_first(request.top_p, defaults.top_p, 1.0),
        top_k=max(0, _first(request.top_k, defaults.top_k, 0)),  # vLLM's clients say -1 for "off"
        min_p=_first(request.min_p, defaults.min_p, 0.0),
        repetition_penalty=_first(request.repetition_penalty, defaults.repetition_penalty, 1.0),
        presence_penalty=_first(request.presence_penalty, 0.0),
        frequency_penalty=_first(request.frequency_penalty, 0.0),
        seed=_first(request.seed, fresh_seed),
        min_tokens=min_tokens,
        stop_token_ids=stop_ids,
        ignore_eos=bool(request.ignore_eos),
    )


def _first(*values: Any) -> Any:
    """The first value that is said; 0 is a value."""
    return next(value for value in values if value is not None)
