"""Resolves the sampling parameters of a request from its fields, the defaults and the model's limits. Pure.

Unset parameters come from the service's defaults, then the model's `generation_config.json`, then OpenAI's defaults.
The result has no unset parameter, so the same request is sampled alike on every replica.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from slipway_runtime.messages import EngineFacts, SamplingParams
from slipway_runtime.server.errors import ApiError, prompt_too_long
from slipway_runtime.server.openai_types import GenerationRequest
from slipway_runtime.settings import SamplingDefaults

OPENAI_COMPLETION_TOKENS: Final = 16  # OpenAI's default max_tokens of /v1/completions
MOST_PROMPT_LOGPROBS: Final = 131_072  # of one prompt: some 10 MB of JSON
MOST_LOGPROBS: Final = 1_000_000  # of one call, as often as they are written: some 60 MB of JSON
_WRITTEN_AT_THE_END: Final = 4  # how often /v1/responses writes each logprob: in its last events
_LONGEST_ID: Final = 12  # digits


def model_defaults(directory: Path) -> SamplingDefaults:
    """The sampling defaults in the model's `generation_config.json`, if it has one."""
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
    """The parameters of one request; raises ApiError for invalid values.

    `otherwise_max_tokens` is the token limit when neither the client nor a default sets one; None: what fits.
    """
    room = facts.max_model_len - prompt_tokens
    if room < 1:
        raise prompt_too_long(facts.max_model_len, prompt_tokens, param=prompt_field)
    max_tokens = _max_tokens(request, defaults, facts.max_model_len, room, otherwise_max_tokens)
    if max_output_tokens:
        max_tokens = min(max_tokens, max_output_tokens)
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        raise ApiError(400, f"min_tokens is {min_tokens}, above max_tokens {max_tokens}", param="min_tokens")
    stop_ids = tuple(request.stop_token_ids or ())
    _check_ids("stop_token_ids", stop_ids, facts.vocab_size)
    for resumed in request.slipway_resume.answers if request.slipway_resume is not None else ():
        _check_ids("slipway_resume", resumed.output_token_ids, facts.vocab_size)
    temperature = _first(request.temperature, defaults.temperature, 1.0)
    _check_number_of_answers(request.wanted_answers, facts.max_num_seqs)
    logprobs = request.wanted_logprobs
    # An echoed prompt gets as many logprobs as the answer.
    prompt_logprobs = _first_or_none(request.prompt_logprobs, logprobs if request.echo else None)
    _check_prompt_logprobs(
        prompt_logprobs, prompt_tokens, "echo" if request.prompt_logprobs is None else "prompt_logprobs"
    )
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=_first(request.top_p, defaults.top_p, 1.0),
        top_k=_top_k(_first(request.top_k, defaults.top_k, 0), facts.vocab_size),
        min_p=_first(request.min_p, defaults.min_p, 0.0),
        repetition_penalty=_first(request.repetition_penalty, defaults.repetition_penalty, 1.0),
        presence_penalty=_first(request.presence_penalty, 0.0),
        frequency_penalty=_first(request.frequency_penalty, 0.0),
        seed=_first(request.seed, fresh_seed),
        min_tokens=min_tokens,
        logit_bias=_logit_bias(request.logit_bias or {}, facts.vocab_size),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        stop_token_ids=stop_ids,
        ignore_eos=bool(request.ignore_eos),
    )


def _max_tokens(
    request: GenerationRequest, defaults: SamplingDefaults, context: int, room: int, otherwise: int | None
) -> int:
    wanted = request.wanted_tokens
    if wanted is not None and wanted > context and not request.cuts_max_tokens:
        raise ApiError(
            400,
            f"max_tokens is {_shortened(wanted)}. This model's maximum context length is {context} tokens,"
            " prompt and answer together.",
            param="max_tokens",
        )
    if request.only_scores:
        return 1  # the engine samples one token to compute the last prompt token; it is not returned
    return int(min(_first(wanted, defaults.max_tokens, otherwise, room), room))


def _top_k(wanted: int, vocab_size: int) -> int:
    """The number of likeliest tokens; 0, "off", for vLLM's -1 and for a number that drops no token."""
    return wanted if 0 < wanted < vocab_size else 0


def _check_number_of_answers(n: int, rows: int) -> None:
    if n > rows:
        raise ApiError(400, f"n is {n}, and this server computes at most {rows} answers concurrently", param="n")


def _check_prompt_logprobs(wanted: int | None, prompt_tokens: int, field: str) -> None:
    """Limit the number of prompt logprobs in one answer. Raises ApiError."""
    if wanted is not None and (pairs := prompt_tokens * (wanted + 1)) > MOST_PROMPT_LOGPROBS:
        raise ApiError(
            400,
            f"{prompt_tokens} prompt tokens with {wanted} alternatives each are {pairs} logprobs;"
            f" at most {MOST_PROMPT_LOGPROBS} are computed for one prompt",
            param=field,
        )


def within_logprob_limit(
    request: GenerationRequest, params: Sequence[SamplingParams], prompt_tokens: Sequence[int], *, repeats: bool
) -> list[SamplingParams]:
    """The parameters of all prompts of a call, whose logprobs together are at most `MOST_LOGPROBS`; raises ApiError.

    Logprobs that are kept until the end count: those of prompts, and those of answers that are not streamed, or whose
    API repeats them at the end. A token limit that the client did not set is lowered to what fits.
    """
    scored = request.wanted_answers * sum(  # written with each answer
        count * (each.prompt_logprobs + 1)
        for count, each in zip(prompt_tokens, params, strict=True)
        if each.prompt_logprobs is not None
    )
    if scored > MOST_LOGPROBS:
        raise _too_many_logprobs(scored, "echo" if request.prompt_logprobs is None else "prompt_logprobs")
    top = request.wanted_logprobs
    if top is None or (request.stream and not repeats):
        return list(params)
    of_token = (top + 1) * (_WRITTEN_AT_THE_END if repeats else 1)
    sampled = of_token * request.wanted_answers * sum(each.max_tokens for each in params)
    if scored + sampled <= MOST_LOGPROBS:
        return list(params)
    fit = (MOST_LOGPROBS - scored) // (of_token * request.all_answers)
    if request.wanted_tokens is not None or not fit:
        raise _too_many_logprobs(scored + sampled, request.logprobs_field)
    return [msgspec.structs.replace(each, max_tokens=min(each.max_tokens, fit)) for each in params]


def _too_many_logprobs(count: int, field: str) -> ApiError:
    return ApiError(
        400,
        f"{field}: all tokens of this call with their alternatives are {count} logprobs;"
        f" at most {MOST_LOGPROBS} are kept for one call",
        param=field,
    )


def _logit_bias(given: dict[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    """Parse and check the token ids; the bounds of the values are checked by their type."""
    for place, key in enumerate(given, start=1):
        if not (key.isascii() and key.isdigit() and len(key) < _LONGEST_ID):
            sentence = f"the keys of logit_bias are token ids, and number {place} of {len(given)} is not one"
            raise ApiError(400, sentence, param="logit_bias")
    bias = tuple((int(key), value) for key, value in given.items())
    _check_ids("logit_bias", tuple(token_id for token_id, _ in bias), vocab_size)
    return bias


def _check_ids(field: str, ids: Sequence[int], vocab_size: int) -> None:
    if ids and max(ids) >= vocab_size:
        sentence = f"{field} holds {_shortened(max(ids))}, the vocabulary has {vocab_size} entries"
        raise ApiError(400, sentence, param=field)


def _shortened(number: int) -> str:
    """A number for an error message, shortened: JSON numbers may have thousands of digits."""
    return str(number) if abs(number) < 10**18 else "an enormous number"


def _first_or_none(*values: Any) -> Any:
    """The first value that is not None, or None."""
    return next((value for value in values if value is not None), None)


def _first(*values: Any) -> Any:
    """The first value that is not None; 0 is a value."""
    return next(value for value in values if value is not None)
