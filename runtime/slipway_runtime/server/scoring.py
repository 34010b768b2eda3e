"""POST /v1/score and /v1/rerank: how relevant texts are to a query, in the shapes of vLLM, Jina and Cohere.

| path                               | shape                                                                          |
|------------------------------------|--------------------------------------------------------------------------------|
| /score, /v1/score                  | vLLM's: `text_1` and `text_2`, one against one, one against many, or in pairs   |
| /rerank, /v1/rerank                | Jina's and vLLM's: `query`, `documents`, `top_n`; documents are returned       |
| /v2/rerank                         | Cohere's: the same; documents are returned only if `return_documents` says so  |

A reranker (`models/score_head`) computes one prompt for each pair, and its score is between 0 and 1. A model of
embeddings computes each text once, and the score is the cosine of the two vectors, between -1 and 1.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Final, Self

import numpy as np
from fastapi import APIRouter, Request
from pydantic import BeforeValidator, Field, model_validator
from starlette.responses import JSONResponse, Response

from slipway_api.names import RERANK_PATHS, SCORE_PATHS
from slipway_runtime.models.pooling import SCORE
from slipway_runtime.server import fields
from slipway_runtime.server.bodies import read_body
from slipway_runtime.server.errors import ApiError, InvalidField, prompt_too_long
from slipway_runtime.server.openai_types import Count
from slipway_runtime.server.pooled_call import MAX_TEXTS, PooledCall, PooledRequest
from slipway_runtime.server.prompt import Prompt
from slipway_runtime.server.replica import Replica
from slipway_runtime.server.request_context import Served, served_by
from slipway_runtime.server.sse import ClientGone

router = APIRouter()

MAX_CALL_TOKENS: Final = 1 << 20  # of all prompts of a call: a query is in the prompt of every document
_COHERE: Final = "/v2/rerank"


def _text_of(document: Any) -> Any:
    """A document is a text, or an object with one."""
    return document["text"] if isinstance(document, dict) and document.keys() == {"text"} else document


Document = Annotated[str, BeforeValidator(_text_of)]


class ScoreRequest(PooledRequest):
    """POST /v1/score."""

    lists: ClassVar[fields.Lists] = fields.SCORING

    text_1: str | list[str]
    text_2: str | list[str]

    @model_validator(mode="after")
    def _pairs_fit(self) -> Self:
        for field, texts in (("text_1", self.queries), ("text_2", self.documents)):
            _check_texts(field, texts)
        if len(self.queries) not in (1, len(self.documents)):
            raise InvalidField(
                "text_1",
                f"holds {len(self.queries)} texts, and text_2 holds {len(self.documents)}: send one, or as many",
            )
        return self

    @property
    def queries(self) -> list[str]:
        """text_1 as a list."""
        return [self.text_1] if isinstance(self.text_1, str) else self.text_1

    @property
    def documents(self) -> list[str]:
        """text_2 as a list."""
        return [self.text_2] if isinstance(self.text_2, str) else self.text_2


class RerankRequest(PooledRequest):
    """POST /v1/rerank and /v2/rerank."""

    lists: ClassVar[fields.Lists] = fields.SCORING

    query: str
    documents: list[Document]
    top_n: Count | None = Field(default=None, ge=0)  # most relevant documents to return; 0, as in vLLM: all
    return_documents: bool | None = None

    @model_validator(mode="after")
    def _texts_fit(self) -> Self:
        _check_texts("query", [self.query])
        _check_texts("documents", self.documents)
        return self


def _check_texts(field: str, texts: Sequence[str]) -> None:
    if not texts or not all(texts):
        raise InvalidField(field, "is empty or holds an empty text: each needs at least one token")
    if len(texts) > MAX_TEXTS:
        raise InvalidField(field, f"holds {len(texts)} texts; at most {MAX_TEXTS} fit into one request")


async def create_scores(http: Request) -> Response:
    """Score each text of `text_2` against its text of `text_1`, in their order."""
    arrived, replica = _arrival(http)
    body = await read_body(http, ScoreRequest)
    served = served_by(replica, body.model, http)
    call = PooledCall(http, body, served, arrived, route="scores")
    try:
        scores, tokens = await _scores(call, served, body.queries, body.documents, ("text_1", "text_2"))
    except ClientGone:
        return Response(status_code=499)
    data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
    return JSONResponse(
        {
            "id": call.id,
            "object": "list",
            "created": int(time.time()),
            "model": served.name,
            "data": data,
            "system_fingerprint": served.fingerprint(replica),
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }
    )


async def rerank(http: Request) -> Response:
    """Sort documents by their relevance to the query, the most relevant first."""
    arrived, replica = _arrival(http)
    body = await read_body(http, RerankRequest)
    served = served_by(replica, body.model, http)
    call = PooledCall(http, body, served, arrived, route="rerank")
    try:
        scores, tokens = await _scores(call, served, [body.query], body.documents, ("query", "documents"))
    except ClientGone:
        return Response(status_code=499)
    is_cohere = http.url.path == _COHERE
    with_text = body.return_documents if body.return_documents is not None else not is_cohere
    results: list[dict[str, Any]] = []
    for index in sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n or None]:
        result: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
        results.append(result | ({"document": {"text": body.documents[index]}} if with_text else {}))
    answer: dict[str, Any] = {
        "id": call.id,
        "model": served.name,
        "results": results,
        "system_fingerprint": served.fingerprint(replica),
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    if is_cohere:
        answer["meta"] = {"api_version": {"version": "2"}, "tokens": {"input_tokens": tokens, "output_tokens": 0}}
    return JSONResponse(answer)


for _path in SCORE_PATHS:
    router.add_api_route(_path, create_scores, methods=["POST"])
for _path in RERANK_PATHS:
    router.add_api_route(_path, rerank, methods=["POST"])


def _arrival(http: Request) -> tuple[float, Replica]:
    replica: Replica = http.app.state.replica
    return replica.clock(), replica


async def _scores(
    call: PooledCall, served: Served, queries: Sequence[str], documents: Sequence[str], names: tuple[str, str]
) -> tuple[list[float], int]:
    """The scores of all documents, and the tokens that were computed. names: the two fields of the request."""
    if served.model.engine.facts.pooling == SCORE:
        prompts = await _pairs(served, queries, documents, names)
        scores = [float(vector[0]) for vector in await call.run(prompts)]
    else:
        each = zip(names, (queries, documents), strict=True)
        prompts = [await _text(served, text, field) for field, texts in each for text in texts]
        _check_tokens(sum(len(prompt.token_ids) for prompt in prompts), names[1])
        vectors = await call.run(prompts)
        first, second = vectors[: len(queries)], vectors[len(queries) :]
        if len(first) == 1:
            first = first * len(second)
        scores = [float(np.dot(a, b)) for a, b in zip(first, second, strict=True)]  # both have length 1
    return scores, sum(len(prompt.token_ids) for prompt in prompts)


async def _pairs(
    served: Served, queries: Sequence[str], documents: Sequence[str], names: tuple[str, str]
) -> list[Prompt]:
    """A prompt for each pair; refused as soon as they have too many tokens together."""
    model, judges = served.model, bool(served.model.engine.facts.score_tokens)
    if len(queries) == 1:
        query = await _text(served, queries[0], names[0])
        _check_tokens(len(query.token_ids) * len(documents), names[1])
        queries = [queries[0]] * len(documents)
    prompts, tokens = [], 0
    for query_text, document in zip(queries, documents, strict=True):
        prompt = await model.prompts.pair(query_text, document, judges=judges, field=names[1])
        prompts.append(_fitting(prompt, served, names[1]))
        tokens += len(prompt.token_ids)
        _check_tokens(tokens, names[1])
        await asyncio.sleep(0)  # thousands of pairs must not hold up the streams of other requests
    return prompts


async def _text(served: Served, text: str, field: str) -> Prompt:
    return _fitting(await served.model.prompts.text(text, field=field), served, field)


def _fitting(prompt: Prompt, served: Served, field: str) -> Prompt:
    longest = served.model.engine.facts.max_model_len
    if not prompt.token_ids:
        raise ApiError(400, f"a text of {field} has no tokens: at least one is needed", param=field)
    if len(prompt.token_ids) > longest:
        raise prompt_too_long(longest, len(prompt.token_ids), param=field)
    return prompt


def _check_tokens(tokens: int, field: str) -> None:
    if tokens > MAX_CALL_TOKENS:
        raise ApiError(
            400,
            f"the pairs of query and document have more than {MAX_CALL_TOKENS} tokens together: send fewer "
            "documents in one request",
            param=field,
        )
