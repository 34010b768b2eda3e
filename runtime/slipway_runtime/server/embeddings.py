"""POST /v1/embeddings: normalized embedding vectors of texts, on a replica that serves embeddings only."""

import asyncio
import base64
from typing import ClassVar, Literal, Self

import numpy as np
from fastapi import APIRouter, Request
from pydantic import Field, model_validator
from starlette.responses import JSONResponse, Response

from slipway_runtime.messages import EngineFacts
from slipway_runtime.models.pooling import SCORE
from slipway_runtime.server import fields
from slipway_runtime.server.bodies import read_body
from slipway_runtime.server.errors import ApiError, InvalidField, prompt_too_long
from slipway_runtime.server.openai_types import Count, Prompts
from slipway_runtime.server.pooled_call import MAX_TEXTS, PooledCall, PooledRequest, Vector
from slipway_runtime.server.prompt import Prompt
from slipway_runtime.server.replica import Replica
from slipway_runtime.server.request_context import Served, served_by
from slipway_runtime.server.sse import ClientGone

router = APIRouter()


class EmbeddingRequest(PooledRequest):
    """POST /v1/embeddings."""

    lists: ClassVar[fields.Lists] = fields.EMBEDDING

    input: Prompts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Count | None = Field(default=None, ge=1)
    truncate_prompt_tokens: Count | None = Field(default=None, ge=-1)  # number of last tokens to keep; -1: all that fit
    add_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _only_what_is_honoured(self) -> Self:
        if not self.input or not all(self.texts):
            raise InvalidField("input", "is empty or holds an empty text: each needs at least one token")
        if len(self.texts) > MAX_TEXTS:
            raise InvalidField("input", f"holds {len(self.texts)} texts; at most {MAX_TEXTS} fit into one request")
        return self

    @property
    def texts(self) -> list[str] | list[list[int]]:
        """The inputs as a list, also where a single one was given."""
        if isinstance(self.input, str):
            return [self.input]
        return [self.input] if isinstance(self.input[0], int) else self.input


@router.post("/v1/embeddings")
async def create_embeddings(http: Request) -> Response:
    """Compute one vector for each text, in the order of the texts."""
    replica: Replica = http.app.state.replica
    arrived = replica.clock()
    body = await read_body(http, EmbeddingRequest)
    served = served_by(replica, body.model, http)
    facts = served.model.engine.facts
    call = PooledCall(http, body, served, arrived, route="embeddings")
    if facts.pooling == SCORE:
        raise ApiError(404, "this service scores pairs of texts at /v1/score and /v1/rerank; it has no embeddings")
    size = _dimensions(body.dimensions, facts)
    prompts = await asyncio.gather(*(_prompt(body, text, served) for text in body.texts))
    try:
        vectors = await call.run(prompts)
    except ClientGone:
        return Response(status_code=499)
    data = [
        {"object": "embedding", "index": index, "embedding": _written(_cut(vector, size), body.encoding_format)}
        for index, vector in enumerate(vectors)
    ]
    tokens = sum(len(prompt.token_ids) for prompt in prompts)
    return JSONResponse(
        {
            "object": "list",
            "data": data,
            "model": served.name,
            "system_fingerprint": served.fingerprint(replica),
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }
    )


async def _prompt(body: EmbeddingRequest, text: str | list[int], served: Served) -> Prompt:
    model, facts = served.model, served.model.engine.facts
    # -1: all that fit, up to the whole context, because no answer follows.
    keep = facts.max_model_len if body.truncate_prompt_tokens == -1 else body.truncate_prompt_tokens
    if isinstance(text, str):
        special = body.add_special_tokens is not False
        prompt = await model.prompts.text(text, add_special_tokens=special, keep=keep, field="input")
    else:
        prompt = await model.prompts.ids(text, facts.vocab_size, keep=keep, with_text=False, field="input")
    if not prompt.token_ids:
        raise ApiError(400, "an input is empty: at least one token is needed", param="input")
    if len(prompt.token_ids) > facts.max_model_len:
        raise prompt_too_long(facts.max_model_len, len(prompt.token_ids), param="input")
    return prompt


def _dimensions(wanted: int | None, facts: EngineFacts) -> int:
    """The size of the vectors; raises ApiError 400 for dimensions that the model was not trained for."""
    size = facts.embedding_size
    if wanted is None or wanted == size:
        return size
    if not facts.is_matryoshka:
        raise ApiError(400, f"this model's embeddings have {size} dimensions and no fewer", param="dimensions")
    allowed = facts.matryoshka_dimensions
    if wanted > size or (allowed and wanted not in allowed):
        said = ", ".join(map(str, allowed)) if allowed else f"up to {size}"
        raise ApiError(400, f"this model's embeddings may have these dimensions: {said}", param="dimensions")
    return wanted


def _cut(vector: Vector, size: int) -> Vector:
    """The first `size` values of a vector, normalized to length 1."""
    if size == len(vector):
        return vector
    kept = vector[:size]
    length = max(float(np.linalg.norm(kept)), 1e-12)
    return (kept / length).astype(np.float32)


def _written(vector: Vector, form: str) -> list[float] | str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode() if form == "base64" else vector.tolist()
