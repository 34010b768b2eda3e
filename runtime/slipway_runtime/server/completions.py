"""POST /v1/completions: continues one or more prompts."""

import asyncio
import time
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from slipway_runtime.messages import TokenLogprobs
from slipway_runtime.server.bodies import read_body
from slipway_runtime.server.calls import Call, answer
from slipway_runtime.server.errors import ApiError
from slipway_runtime.server.generation import Delta
from slipway_runtime.server.logprobs import LogprobWriter
from slipway_runtime.server.middleware import new_id
from slipway_runtime.server.openai_types import CompletionRequest
from slipway_runtime.server.prompt import Prompt
from slipway_runtime.server.replica import LoadedModel, Replica
from slipway_runtime.server.request_context import Caller, served_by
from slipway_runtime.server.response_builder import ChoiceWriter
from slipway_runtime.server.sampling import OPENAI_COMPLETION_TOKENS
from slipway_runtime.server.structured import grammar_of, note_unenforced, unenforced_of

router = APIRouter()


class CompletionFormat:
    """The response format of completions."""

    route = "completions"

    def __init__(self, body: CompletionRequest, logprobs: LogprobWriter) -> None:
        resume = body.slipway_resume
        self.id = (resume and resume.id) or (f"cmpl-{body.request_id}" if body.request_id else new_id("cmpl"))
        self._created = (resume and resume.created) or int(time.time())
        self._body = body
        self._logprobs = logprobs
        self._scores: dict[int, PromptScores] = {}  # by the number of the prompt

    def writer(self, index: int, prompt: Prompt) -> ChoiceWriter:
        """A writer for one answer."""
        scores = self._scores.setdefault(index // self._body.wanted_answers, PromptScores())
        return CompletionWriter(index, self._body, prompt, scores, self._logprobs)

    def envelope(self, choices: list[dict[str, Any]], *, streamed: bool) -> dict[str, Any]:
        """A chunk or the whole completion: both have the same form."""
        return {"id": self.id, "object": "text_completion", "created": self._created, "choices": choices}


class PromptScores:
    """Logprobs of a prompt, which come with the first of its answers and are written with each."""

    def __init__(self) -> None:
        self._tokens: tuple[TokenLogprobs | None, ...] = ()

    def of(self, deltas: list[Delta]) -> tuple[TokenLogprobs | None, ...]:
        """The logprobs in these deltas, else those that came with another answer."""
        self._tokens = next((d.prompt_logprobs for d in deltas if d.prompt_logprobs is not None), self._tokens)
        return self._tokens


class CompletionWriter:
    """Writes one answer, after its prompt where that is echoed."""

    reasoning_tokens: int | None = None  # a completion is text as the model writes it

    def __init__(
        self, index: int, body: CompletionRequest, prompt: Prompt, scores: PromptScores, logprobs: LogprobWriter
    ) -> None:
        self._index = index
        self._body = body
        self._prompt = prompt
        self._scores = scores
        self._logprobs = logprobs
        self._offsets = logprobs.offsets()
        self._echo_is_due = self._echoed_scores_are_due = bool(body.echo)
        self._prompt_ids_are_due = bool(body.return_token_ids)

    def opening(self) -> list[dict[str, Any]]:
        """No events: an echoed prompt is sent with the first text, whose delta has the logprobs of the prompt."""
        return []

    def piece(self, delta: Delta) -> list[dict[str, Any]]:
        """The event of a delta."""
        text = self._echo() + delta.text
        says = text or delta.finish_reason is not None
        logprobs = self._with_logprobs([delta])
        if not says and not (logprobs and logprobs["tokens"]):
            return []
        return [self._choice(text, delta, logprobs)]

    def whole(self, deltas: list[Delta]) -> dict[str, Any]:
        """The choice with the whole text."""
        text = self._echo() + "".join(delta.text for delta in deltas)
        choice = self._choice(text, deltas[-1], self._with_logprobs(deltas))
        if self._body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self._logprobs.prompt(self._scores.of(deltas))
        return choice

    def _echo(self) -> str:
        due, self._echo_is_due = self._echo_is_due, False
        return self._prompt.text if due else ""

    def _with_logprobs(self, deltas: list[Delta]) -> dict[str, Any] | None:
        if self._body.logprobs is None:
            return None
        sampled: list[TokenLogprobs | None] = []
        ids: list[int] = []
        if self._echoed_scores_are_due:
            self._echoed_scores_are_due = False
            if deltas[0].token_ids and not deltas[0].logprobs:  # another replica has sent them, before a handover
                self._offsets.take(self._prompt.token_ids)
            else:
                sampled += self._scores.of(deltas)
                ids += self._prompt.token_ids[: len(sampled)]
        for delta in deltas:
            if delta.logprobs:
                sampled += delta.logprobs
                ids += delta.token_ids
            else:
                self._offsets.take(delta.token_ids)  # sent by another replica, before a handover
        return self._logprobs.completion(sampled, ids, self._offsets)

    def _choice(self, text: str, delta: Delta, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        finish = str(delta.finish_reason) if delta.finish_reason is not None else None
        choice = {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": finish}
        if finish is not None:
            choice["stop_reason"] = delta.stop_reason
        if self._prompt_ids_are_due:  # beside the text, as in vLLM: each choice has its own prompt
            choice["prompt_token_ids"], self._prompt_ids_are_due = self._prompt.token_ids, False
        return choice


@router.post("/v1/completions")
async def create_completion(http: Request) -> Response:
    """Generate the continuations of prompts, as one body or as a stream."""
    replica: Replica = http.app.state.replica
    arrived = replica.clock()
    body = await read_body(http, CompletionRequest)
    caller = Caller.of(http)
    caller.check(body)
    served = served_by(replica, body.model, http)
    model = served.model
    bound = grammar_of(body)
    if bound is not None:
        await model.grammars.check(*bound)
        note_unenforced(http, unenforced_of(body))
    prompts = await asyncio.gather(*(_prompt(body, prompt, model) for prompt in body.prompts))
    if not all(prompt.token_ids for prompt in prompts):
        raise ApiError(400, "prompt is empty: at least one token is needed", param="prompt")
    logprobs = LogprobWriter(
        model.prompts.tokens,
        as_ids=bool(body.return_tokens_as_token_ids),
        hides_special=body.skip_special_tokens is not False,
    )
    return await answer(
        Call(
            http=http,
            body=body,
            caller=caller,
            served=served,
            prompts=prompts,
            format=CompletionFormat(body, logprobs),
            arrived=arrived,
            prompt_field="prompt",
            otherwise_max_tokens=OPENAI_COMPLETION_TOKENS,
            grammar=bound[0] if bound is not None else None,
        )
    )


async def _prompt(body: CompletionRequest, prompt: str | list[int], model: LoadedModel) -> Prompt:
    keep = body.truncate_prompt_tokens
    if isinstance(prompt, str):
        return await model.prompts.text(prompt, add_special_tokens=body.add_special_tokens is not False, keep=keep)
    vocabulary = model.engine.facts.vocab_size
    return await model.prompts.ids(prompt, vocabulary, keep=keep, with_text=bool(body.echo))
