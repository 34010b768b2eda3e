"""POST /v1/embeddings: normalized embedding vectors of texts, on a replica that serves embeddings only.

Each text is one engine request, whose hidden states are pooled when its prompt is computed. A call has at most twice
as many requests in the engine as fit in a step, so that it neither fills the queue nor leaves a step empty.
"""

import asyncio
import base64
import secrets
from typing import ClassVar, Final, Literal, Self

import numpy as np
import numpy.typing as npt
import structlog
from fastapi import APIRouter, Request
from pydantic import Field, model_validator
from starlette.responses import JSONResponse, Response

from slipway_api.recent_requests import MOST_FOUND
from slipway_runtime.engine.client import EngineError
from slipway_runtime.messages import EngineFacts, FinishReason, Output, SamplingParams
from slipway_runtime.messages import Request as EngineRequest
from slipway_runtime.server import fields
from slipway_runtime.server.accounts import keep_account
from slipway_runtime.server.bodies import RequestBody, read_body
from slipway_runtime.server.errors import ApiError, InvalidField, of_engine, prompt_too_long
from slipway_runtime.server.generation import Record
from slipway_runtime.server.openai_types import Count, Prompts
from slipway_runtime.server.prompt import Prompt
from slipway_runtime.server.replica import Replica
from slipway_runtime.server.request_context import Caller, Served, served_by
from slipway_runtime.server.sse import ClientGone, while_connected

log = structlog.get_logger()
router = APIRouter()

MAX_TEXTS: Final = 2048  # as OpenAI
Vector = npt.NDArray[np.float32]


class EmbeddingRequest(RequestBody):
    """POST /v1/embeddings."""

    lists: ClassVar[fields.Lists] = fields.EMBEDDING

    model: str = Field(default="", max_length=1024)
    input: Prompts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Count | None = Field(default=None, ge=1)
    user: str | None = None
    truncate_prompt_tokens: Count | None = Field(default=None, ge=-1)  # number of last tokens to keep; -1: all that fit
    add_special_tokens: bool | None = None
    priority: Count | None = Field(default=None, ge=-1000, le=1000)  # as in vLLM: lower goes first
    cache_salt: str | None = Field(default=None, max_length=256)

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
    caller = Caller.of(http)
    served = served_by(replica, body.model, http)
    facts = served.model.engine.facts
    if not facts.pooling:
        raise ApiError(404, "this service generates text; embeddings need a service of their own (runtime.task: embed)")
    size = _dimensions(body.dimensions, facts)
    prompts = await asyncio.gather(*(_prompt(body, text, served) for text in body.texts))
    call = _EmbeddingCall(http, body, caller, served, replica, arrived)
    try:
        vectors = await while_connected(http, call.run(prompts))
    except ClientGone:
        return Response(status_code=499)
    finally:
        call.write_log(prompts)
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


class _EmbeddingCall:
    """Runs the texts of one call through the engine."""

    def __init__(
        self, http: Request, body: EmbeddingRequest, caller: Caller, served: Served, replica: Replica, arrived: float
    ) -> None:
        self._http = http
        self._body = body
        self._caller = caller
        self._served = served
        self._replica = replica
        self._arrived = arrived
        self._id = f"embd-{secrets.token_hex(12)}"
        facts = served.model.engine.facts
        self._params = SamplingParams(max_tokens=1, temperature=0.0, pools_all=facts.pooling == "mean")
        self._places = asyncio.Semaphore(2 * facts.max_num_seqs)
        self._finish = FinishReason.CANCELLED

    async def run(self, prompts: list[Prompt]) -> list[Vector]:
        """The vectors of all prompts; raises the ApiError of the first prompt that failed."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._guarded(index, prompt)) for index, prompt in enumerate(prompts)]
        results = [task.result() for task in tasks]
        for result in results:
            if isinstance(result, ApiError):
                raise result
        self._finish = FinishReason.STOP
        return [result for result in results if not isinstance(result, ApiError)]

    async def _guarded(self, index: int, prompt: Prompt) -> "Vector | ApiError":
        """Return an ApiError instead of raising it: a TaskGroup would wrap it."""
        async with self._places:
            try:
                return await self._embed(index, prompt)
            except EngineError as error:
                refusal = of_engine(error)
                self._served.model.metrics.refused(refusal.status)
                return refusal
            except ApiError as error:
                return error

    async def _embed(self, index: int, prompt: Prompt) -> Vector:
        body, caller, model = self._body, self._caller, self._served.model
        request = EngineRequest(
            id=f"{self._id}-{index}",
            prompt_token_ids=prompt.token_ids,
            params=self._params,
            arrived=self._arrived,
            deadline=self._arrived + caller.seconds if caller.seconds is not None else None,
            tenant=caller.tenant,
            priority=caller.priority if caller.priority is not None else -(body.priority or 0),
            cache_salt=caller.salted(body.cache_salt),
            adapter=self._served.digest,
        )
        outputs = model.engine.generate(request)
        self._replica.opened(request.id)
        self._http.state.admitted = True
        last: Output | None = None
        try:
            async for output in outputs:
                last = output
        finally:
            await outputs.aclose()
            self._replica.closed(request.id)
            record = self._record(prompt, last)
            model.metrics.ended(record)
            if index < MOST_FOUND:  # a request with many texts must not displace the accounts of others
                keep_account(
                    self._replica,
                    self._http,
                    record,
                    id=request.id,
                    route="embeddings",
                    model=self._served.name,
                    is_streamed=False,
                )
        if last is not None and last.embedding:
            return np.frombuffer(last.embedding, dtype="<f4")
        if last is not None and last.finish_reason is FinishReason.TIMEOUT:
            raise ApiError(504, "the deadline of the request has passed")
        raise self._replica.why_it_failed(request.id, last.error if last is not None else "")

    def _record(self, prompt: Prompt, last: Output | None) -> Record:
        ended = last.finish_reason if last is not None and last.finish_reason is not None else FinishReason.CANCELLED
        return Record(
            prompt_tokens=len(prompt.token_ids),
            cached_tokens=last.cached_tokens if last is not None else 0,
            completion_tokens=0,
            max_tokens=0,
            # The engine ends a pooled prompt with LENGTH; nothing was cut off.
            finish_reason=FinishReason.STOP if ended is FinishReason.LENGTH else ended,
            arrived=self._arrived,
            queued_at=last.queued_at if last is not None else None,
            scheduled_at=last.scheduled_at if last is not None else None,
            first_token_at=None,
            last_token_at=None,
            finished_at=self._replica.clock(),
            tenant=self._caller.tenant,
            adapter=self._served.name if self._served.digest else "",
        )

    def write_log(self, prompts: list[Prompt]) -> None:
        """Write one log line for the call, without its texts."""
        log.info(
            "request",
            request_id=self._http.state.request_id,
            id=self._id,
            route="embeddings",
            model=self._served.name,
            tenant=self._caller.tenant,
            n=len(prompts),
            prompt_tokens=sum(len(prompt.token_ids) for prompt in prompts),
            finish_reason=str(self._finish),
            total_seconds=round(self._replica.clock() - self._arrived, 4),
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
