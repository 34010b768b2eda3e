"""POST /v1/completions: a text in, its continuation out."""

import time
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from slipway_runtime.server.calls import answer
from slipway_runtime.server.errors import ApiError
from slipway_runtime.server.middleware import new_id
from slipway_runtime.server.openai_types import CompletionRequest
from slipway_runtime.server.replica import Replica
from slipway_runtime.server.sampling import OPENAI_COMPLETION_TOKENS

router = APIRouter()


class _CompletionShape:
    """The way of completions to write an answer."""

    route = "completions"

    def __init__(self) -> None:
        self.id = new_id("cmpl")
        self._created = int(time.time())

    def opening(self) -> None:
        return None

    def chunk(self, text: str, finish_reason: str | None, stop_reason: str | int | None) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}
        if finish_reason is not None:
            choice["stop_reason"] = stop_reason
        return {"id": self.id, "object": "text_completion", "created": self._created, "choices": [choice]}

    def usage_chunk(self) -> dict[str, Any]:
        return self.chunk("", None, None) | {"choices": []}

    def whole(self, text: str, finish_reason: str, stop_reason: str | int | None) -> dict[str, Any]:
        return self.chunk(text, finish_reason, stop_reason)


@router.post("/v1/completions")
async def create_completion(body: CompletionRequest, http: Request) -> Response:
    """The continuation of a text, in one piece or as a stream."""
    replica: Replica = http.app.state.replica
    arrived = replica.clock()
    model = replica.model_for(body.model)
    prompt = body.one_prompt
    if isinstance(prompt, str):
        ids = await model.prompts.text(prompt, add_special_tokens=body.add_special_tokens)
    else:
        ids = tuple(prompt)
        if not all(0 <= token_id < model.engine.facts.vocab_size for token_id in ids):
            raise ApiError(
                400, f"prompt holds an id outside the vocabulary of {model.engine.facts.vocab_size}", param="prompt"
            )
    if not ids:
        raise ApiError(400, "prompt is empty: at least one token is needed", param="prompt")
    return await answer(
        http,
        body,
        ids,
        _CompletionShape(),
        arrived=arrived,
        model=model,
        prompt_field="prompt",
        otherwise_max_tokens=OPENAI_COMPLETION_TOKENS,
    )
