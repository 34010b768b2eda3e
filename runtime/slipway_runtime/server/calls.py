"""Sends a validated chat or completions call to the engine, one engine request for each prompt.

    admitted → queued → prefill → decode → streamed → ended; each moment has its time in the record

Each engine request makes `n` answers, which `response_builder.py` writes to the client. A resumed answer is a request
of its own.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from slipway_runtime.engine.client import EngineError
from slipway_runtime.engine.detokenizer import Detokenizer, StopStrings
from slipway_runtime.messages import EngineFacts, FinishReason, Grammar, Output, Request, SamplingParams
from slipway_runtime.server import sampling
from slipway_runtime.server.errors import ApiError, of_engine
from slipway_runtime.server.generation import Choice, Delta, Generation, Outputs
from slipway_runtime.server.openai_types import GenerationRequest
from slipway_runtime.server.prompt import Prompt
from slipway_runtime.server.replica import Replica
from slipway_runtime.server.request_context import Caller, Served
from slipway_runtime.server.response_builder import ResponseBuilder, ResponseFormat
from slipway_runtime.server.sse import Dialect, OpenAIChunks


@dataclass(frozen=True, kw_only=True)
class Call:
    """A validated call: its body, prompts and served model, before the engine gets it."""

    http: HttpRequest
    body: GenerationRequest
    caller: Caller
    served: Served
    prompts: Sequence[Prompt]
    format: ResponseFormat
    arrived: float
    prompt_field: str
    otherwise_max_tokens: int | None
    grammar: Grammar | None = None
    keeps_special_tokens: bool = False
    dialect: Dialect = field(default_factory=OpenAIChunks)


async def answer(call: Call) -> Response:
    """Generate the answers, and return them as one body or as a stream."""
    replica: Replica = call.http.app.state.replica
    if call.served.model.engine.facts.pooling:
        raise ApiError(
            404, "this service computes embeddings (/v1/embeddings) and scores (/v1/score); it does not generate text"
        )
    params = sampling.within_logprob_limit(
        call.body,
        [_params(call, prompt) for prompt in call.prompts],
        [len(prompt.token_ids) for prompt in call.prompts],
        repeats=call.dialect.repeats,
    )
    builder = ResponseBuilder(call.http, call.body, call.caller, call.served, call.format, replica, call.dialect)
    try:
        for number, (prompt, each) in enumerate(zip(call.prompts, params, strict=True)):
            _submit(call, builder, number, prompt, each, replica)
    except EngineError as error:
        await builder.abandon()
        refusal = of_engine(error)
        call.served.model.metrics.refused(refusal.status)
        raise refusal from None
    except BaseException:
        await builder.abandon()  # whatever it was: the prompts before this one must not run on without a reader
        raise
    return await (builder.as_stream() if call.body.stream else builder.as_body())


def _params(call: Call, prompt: Prompt) -> SamplingParams:
    model = call.served.model
    return sampling.resolve(
        call.body,
        model.defaults,
        model.engine.facts,
        prompt_tokens=len(prompt.token_ids),
        max_output_tokens=model.max_output_tokens,
        otherwise_max_tokens=call.otherwise_max_tokens,
        fresh_seed=secrets.randbits(63),
        prompt_field=call.prompt_field,
    )


def _submit(
    call: Call, builder: ResponseBuilder, number: int, prompt: Prompt, params: SamplingParams, replica: Replica
) -> None:
    """Send one prompt to the engine; raises EngineError where the engine refuses it."""
    n = call.body.wanted_answers
    indices = range(number * n, number * n + n)
    if call.body.slipway_resume is None:
        _generate(call, builder, prompt, params, replica, indices)
        return
    for i, index in enumerate(indices):  # resumed answers differ in length, so each is an engine request of its own
        resumed = call.body.slipway_resume.answers[index]
        if resumed.finished and not (call.dialect.repeats and resumed.output_token_ids):
            builder.count_finished(prompt, len(resumed.output_token_ids))
            continue
        given = tuple(resumed.output_token_ids)
        prompt_logprobs = params.prompt_logprobs if not given else None  # sent with the first token
        own = msgspec.structs.replace(params, seed=params.seed + i, prompt_logprobs=prompt_logprobs)
        _generate(call, builder, prompt, own, replica, (index,), given)


def _generate(
    call: Call,
    builder: ResponseBuilder,
    prompt: Prompt,
    params: SamplingParams,
    replica: Replica,
    indices: Sequence[int],
    given: tuple[int, ...] = (),
) -> None:
    """Request the answers with these indices from the engine; `given`: the tokens of a resumed (single) answer."""
    body, caller, model = call.body, call.caller, call.served.model
    facts = model.engine.facts
    choices = [_choice(call, index, prompt, params, facts) for index in indices]
    replayed = (
        replay(choices[0], given, params, frozenset(facts.eos_token_ids), bound=call.grammar is not None)
        if given
        else Replayed()
    )
    request = Request(
        id=f"{call.format.id}-{secrets.token_hex(6)}-{indices[0]}",  # a client may choose the first part
        prompt_token_ids=prompt.token_ids,
        params=params,
        arrived=call.arrived,
        deadline=call.arrived + caller.seconds if caller.seconds is not None else None,
        tenant=caller.tenant,
        priority=caller.priority_of(body),
        cache_salt=caller.cache_salt(body),
        adapter=call.served.digest,
        grammar=call.grammar,
        n=len(indices),
        output_token_ids=given,
        text_blocks=_text_blocks(call, prompt),
    )
    outputs: Outputs = model.engine.generate(request) if replayed.end is None else _Nothing()
    generation = Generation(
        outputs,
        choices,
        prompt_tokens=len(prompt.token_ids),
        max_tokens=params.max_tokens,
        arrived=call.arrived,
        clock=replica.clock,
        on_output=model.metrics.between_outputs,
        known=replayed.end,
    )
    builder.add(request, generation, prompt, replayed.before)


def _text_blocks(call: Call, prompt: Prompt) -> tuple[tuple[int, int], ...]:
    """Which KV blocks of the prompt hold the gateway's text blocks. Of several prompts nobody knows whose they are."""
    blocks = call.caller.text_blocks
    if blocks is None or len(call.prompts) > 1:
        return ()
    return blocks.in_kv_blocks(len(prompt.token_ids), call.served.model.engine.facts.block_size)


def _choice(call: Call, index: int, prompt: Prompt, params: SamplingParams, facts: EngineFacts) -> Choice:
    body = call.body
    detokenizer = Detokenizer(
        call.served.model.prompts.files.tokenizer,
        prompt.token_ids,
        skip_special_tokens=body.skip_special_tokens is not False and not call.keeps_special_tokens,
    )
    return Choice(
        index,
        detokenizer,
        StopStrings(body.stops),
        min_tokens=params.min_tokens,
        include_stop=bool(body.include_stop_str_in_output),
        eos_token_ids=frozenset(facts.eos_token_ids),
        only_scores=body.only_scores,
    )


@dataclass(frozen=True)
class Replayed:
    """The delta that another replica has sent of an answer, and its last delta, where the answer is complete."""

    before: Delta | None = None
    end: Delta | None = None


def replay(
    choice: Choice, given: tuple[int, ...], params: SamplingParams, eos: frozenset[int], *, bound: bool = False
) -> Replayed:
    """Restore the state of an answer of another replica: the same tokens release the same text, so none is sent twice.

    Held-back text (half a character, the beginning of a stop string) is held back here again.
    bound: by a grammar, which an end-of-sequence token ends.
    """
    stops = (frozenset() if params.ignore_eos else eos) | set(params.stop_token_ids)
    ended_by_token = (given[-1] in stops and len(given) > params.min_tokens) or (bound and given[-1] in eos)
    before = choice.take(Output(request_id="", token_ids=given[:-1] if ended_by_token else given))
    if before.finish_reason is not None:
        return Replayed(before, replace(before, text="", token_ids=()))
    if not ended_by_token and len(given) < params.max_tokens:
        return Replayed(before)
    last = Output(
        request_id="",
        token_ids=given[-1:] if ended_by_token else (),
        stop_token_id=given[-1] if ended_by_token else None,
        finish_reason=FinishReason.STOP if ended_by_token else FinishReason.LENGTH,
    )
    return Replayed(before, replace(choice.take(last), token_ids=()))


class _Nothing:
    """An empty output stream, for a resumed answer that needs no engine request."""

    def __aiter__(self) -> "_Nothing":
        return self

    async def __anext__(self) -> Output:
        raise StopAsyncIteration

    def finish(self, index: int | None = None) -> None:
        """Nothing runs."""

    async def aclose(self) -> None:
        """Nothing runs."""
