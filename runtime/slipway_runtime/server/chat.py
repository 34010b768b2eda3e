"""POST /v1/chat/completions: messages in, the assistant's next message out."""

import time
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from slipway_runtime.server.calls import answer
from slipway_runtime.server.middleware import new_id
from slipway_runtime.server.openai_types import ChatRequest
from slipway_runtime.server.replica import Replica

router = APIRouter()


class _ChatShape:
    """Chat's way to write an answer."""

    route = "chat"

    def __init__(self) -> None:
        self.id = new_id("chatcmpl")
        self._created = int(time.time())

    def opening(self) -> dict[str, Any]:
        return self._body("chat.completion.chunk", {"delta": {"role": "assistant", "content": ""}}, None)

    def chunk(self, text: str, finish_reason: str | None, stop_reason: str | int | None) -> dict[str, Any]:
        delta = {"content": text} if text else {}
        choice: dict[str, Any] = {"delta": delta}
        if finish_reason is not None:
            choice["stop_reason"] = stop_reason
        return self._body("chat.completion.chunk", choice, finish_reason)

    def usage_chunk(self) -> dict[str, Any]:
        return self._body("chat.completion.chunk", {}, None) | {"choices": []}

    def whole(self, text: str, finish_reason: str, stop_reason: str | int | None) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return self._body("chat.completion", {"message": message, "stop_reason": stop_reason}, finish_reason)

    def _body(self, kind: str, choice: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
        choice = {"index": 0, **choice, "logprobs": None, "finish_reason": finish_reason}
        return {"id": self.id, "object": kind, "created": self._created, "choices": [choice]}


@router.post("/v1/chat/completions")
async def create_chat_completion(body: ChatRequest, http: Request) -> Response:
    """The next message of a conversation, in one piece or as a stream."""
    replica: Replica = http.app.state.replica
    arrived = replica.clock()
    model = replica.model_for(body.model)
    ids = await model.prompts.chat(
        body.messages, add_generation_prompt=body.add_generation_prompt, template_arguments=body.chat_template_kwargs
    )
    return await answer(
        http,
        body,
        ids,
        _ChatShape(),
        arrived=arrived,
        model=model,
        prompt_field="messages",
        otherwise_max_tokens=None,
    )
