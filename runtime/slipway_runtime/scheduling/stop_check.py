"""Stop check of an answer (end of sequence, stop tokens, length), and its outputs. Pure."""

import msgspec

from slipway_runtime.messages import FinishReason, Output, TokenLogprobs
from slipway_runtime.scheduling.sequence import Sequence


def reason_to_stop(sequence: Sequence, eos: frozenset[int]) -> FinishReason | None:
    """Why a sequence ends with its last known token; None: it goes on."""
    params, last = sequence.params, sequence.token_ids[-1]
    if sequence.num_output_tokens >= max(params.min_tokens, 1) and (
        (last in eos and not params.ignore_eos) or last in params.stop_token_ids
    ):
        return FinishReason.STOP
    return FinishReason.LENGTH if sequence.num_tokens >= sequence.max_tokens else None


def accept(
    sequence: Sequence,
    token_ids: tuple[int, ...],
    logprobs: tuple[TokenLogprobs, ...],
    eos: frozenset[int],
    now: float,
) -> Output:
    """Append sampled tokens up to the one that ends the sequence; the output with them. Later tokens are dropped."""
    count = 0
    for token_id in token_ids:
        sequence.token_ids.append(token_id)
        count += 1
        sequence.finish_reason = reason_to_stop(sequence, eos)
        if sequence.finish_reason is not None:
            break
    reason = sequence.finish_reason
    stop_token_id = sequence.token_ids[-1] if reason is FinishReason.STOP else None
    finished_at = None if reason is None else now
    if sequence.first_token_at is not None:
        return Output(
            request_id=sequence.request.id,
            index=sequence.index,
            token_ids=token_ids[:count],
            logprobs=logprobs[:count],
            finish_reason=reason,
            stop_token_id=stop_token_id,
            finished_at=finished_at,
        )
    sequence.first_token_at = now
    return Output(
        request_id=sequence.request.id,
        index=sequence.index,
        token_ids=token_ids[:count],
        logprobs=logprobs[:count],
        finish_reason=reason,
        stop_token_id=stop_token_id,
        prompt_logprobs=_prompt_logprobs(sequence),
        cached_tokens=sequence.cached_tokens,
        queued_at=sequence.queued_at,
        scheduled_at=sequence.scheduled_at,
        first_token_at=now,
        finished_at=finished_at,
    )


def with_embedding(output: Output, embedding: bytes) -> Output:
    """The output of a pooled prompt: its embedding, and no token."""
    return msgspec.structs.replace(output, embedding=embedding, token_ids=(), stop_token_id=None)


def ended(sequence: Sequence, reason: FinishReason, error: str, now: float) -> Output:
    """The final output of an answer that ended without a sampled token, as by an abort."""
    told = sequence.first_token_at is not None
    return Output(
        request_id=sequence.request.id,
        index=sequence.index,
        finish_reason=reason,
        error=error,
        queued_at=None if told else sequence.queued_at,
        scheduled_at=None if told else sequence.scheduled_at,
        finished_at=now,
    )


def _prompt_logprobs(sequence: Sequence) -> tuple[TokenLogprobs | None, ...] | None:
    if sequence.params.prompt_logprobs is None:
        return None
    scored = tuple(sequence.prompt_logprobs[: sequence.num_prompt_tokens - 1])  # the last one scores the first sample
    sequence.prompt_logprobs.clear()
    return (None, *scored)
