"""POST /tokenize and /detokenize: the tokens of a prompt or of a chat, and the text of tokens."""

from typing import Any

from fastapi import APIRouter, Request

from slipway_runtime.server.bodies import read_body
from slipway_runtime.server.errors import ApiError
from slipway_runtime.server.openai_types import DetokenizeRequest, TokenizeRequest
from slipway_runtime.server.replica import Replica
from slipway_runtime.server.request_context import served_by

router = APIRouter()


@router.post("/tokenize")
async def tokenize(http: Request) -> dict[str, Any]:
    """The prompt's token ids for a completion of this text, or a chat of these messages."""
    replica: Replica = http.app.state.replica
    body = await read_body(http, TokenizeRequest)
    model = served_by(replica, body.model).model
    if body.messages:
        prompt = await model.prompts.chat(
            body.messages,
            tools=body.tools or (),
            add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
            continue_final_message=body.continue_final_message,
            template_arguments=body.chat_template_kwargs,
            add_special_tokens=bool(body.add_special_tokens),
        )
    else:
        prompt = await model.prompts.text(body.prompt or "", add_special_tokens=body.add_special_tokens is not False)
    tokenizer, ids = model.prompts.files.tokenizer, prompt.token_ids
    return {
        "count": len(ids),
        "max_model_len": model.engine.facts.max_model_len,
        "tokens": ids,
        "token_strs": [tokenizer.id_to_token(i) for i in ids] if body.return_token_strs else None,
    }


@router.post("/detokenize")
async def detokenize(http: Request) -> dict[str, Any]:
    """The text of token ids."""
    replica: Replica = http.app.state.replica
    body = await read_body(http, DetokenizeRequest)
    model = served_by(replica, body.model).model
    vocabulary = model.engine.facts.vocab_size
    if body.tokens and max(body.tokens) >= vocabulary:
        raise ApiError(400, f"tokens holds an id outside the vocabulary of {vocabulary}", param="tokens")
    return {"prompt": await model.prompts.decode(body.tokens)}
