"""A call that the engine answers with pooled vectors or scores: embeddings, scores, reranking.

Each prompt is one engine request, whose hidden states are pooled when it is computed. A call has at most twice as many
requests in the engine as fit in a step, so that it neither fills the queue nor leaves a step empty.
"""

import asyncio
import secrets
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import structlog
from fastapi import Request
from pydantic import Field

from slipway_api.recent_requests import MOST_FOUND
from slipway_runtime.engine.client import EngineError
from slipway_runtime.messages import FinishReason, Output, SamplingParams
from slipway_runtime.messages import Request as EngineRequest
from slipway_runtime.server.accounts import keep_account
from slipway_runtime.server.bodies import RequestBody
from slipway_runtime.server.errors import ApiError, of_engine
from slipway_runtime.server.generation import Record
from slipway_runtime.server.openai_types import Count
from slipway_runtime.server.prompt import Prompt
from slipway_runtime.server.replica import Replica
from slipway_runtime.server.request_context import Caller, Served
from slipway_runtime.server.sse import while_connected

log = structlog.get_logger()

MAX_TEXTS: Final = 2048  # of one call, as OpenAI
Vector = npt.NDArray[np.float32]
_PREFIXES: Final = {"embeddings": "embd", "scores": "score", "rerank": "rerank"}


class PooledRequest(RequestBody):
    """What the bodies of these endpoints have in common."""

    model: str = Field(default="", max_length=1024)
    user: str | None = None
    priority: Count | None = Field(default=None, ge=-1000, le=1000)  # as in vLLM: lower goes first
    cache_salt: str | None = Field(default=None, max_length=256)


class PooledCall:
    """Runs the prompts of one call through the engine."""

    def __init__(self, http: Request, body: PooledRequest, served: Served, arrived: float, *, route: str) -> None:
        """route: the name of the endpoint in logs and accounts. Raises ApiError 404 if the service generates text."""
        facts = served.model.engine.facts
        if not facts.pooling:
            raise ApiError(404, f"this service generates text; {route} need a service of their own (task: embed)")
        self._http = http
        self._body = body
        self._route = route
        self._caller = Caller.of(http)
        self._served = served
        self._replica: Replica = http.app.state.replica
        self._arrived = arrived
        self.id = f"{_PREFIXES[route]}-{secrets.token_hex(12)}"
        self._params = SamplingParams(max_tokens=1, temperature=0.0, pools_all=facts.pooling == "mean")
        self._places = asyncio.Semaphore(2 * facts.max_num_seqs)
        self._finish = FinishReason.CANCELLED

    async def run(self, prompts: Sequence[Prompt]) -> list[Vector]:
        """The vectors of all prompts, or their scores as vectors of one number.

        Raises the ApiError of the first prompt that failed, and ClientGone if the caller has left.
        """
        try:
            return await while_connected(self._http, self._run(prompts))
        finally:
            self._write_log(prompts)

    async def _run(self, prompts: Sequence[Prompt]) -> list[Vector]:
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
            id=f"{self.id}-{index}",
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
                    route=self._route,
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

    def _write_log(self, prompts: Sequence[Prompt]) -> None:
        """Write one log line for the call, without its texts."""
        log.info(
            "request",
            request_id=self._http.state.request_id,
            id=self.id,
            route=self._route,
            model=self._served.name,
            tenant=self._caller.tenant,
            n=len(prompts),
            prompt_tokens=sum(len(prompt.token_ids) for prompt in prompts),
            finish_reason=str(self._finish),
            total_seconds=round(self._replica.clock() - self._arrived, 4),
        )
