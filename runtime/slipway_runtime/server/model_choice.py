"""Chooses the model that a process serves: that of its command line, or of the first POST /model.

The request of POST /model is stored in a file of the pod. A container that the kubelet restarts reads the file and
loads the same model: the restart of a replica must not depend on the operator.

DELETE /model gives the model of a POST back: the file is removed, and the process starts over as at its first start.

A process in standby has loaded the model of its command line, and answers no requests. The first POST /model with
the same model claims it: name, revision, tokens, sampling defaults and warm prompts are those of the request.

| --standby | while the process waits                             | on the claim                               |
|-----------|-----------------------------------------------------|--------------------------------------------|
| loaded    | weights and KV cache are on the device              | name, tokens and warm prompts are set      |
| sleeping  | the weights are in host memory, no KV cache is kept | weights are copied back, then as above     |
"""

import asyncio
import contextlib
import os
import time
from pathlib import Path
from typing import Final

import structlog
from pydantic import ValidationError

from slipway_api.runtime_api import CLAIMED_FIELDS, LoadModelRequest, ModelInfo
from slipway_runtime.engine.client import EngineClient, EngineDead
from slipway_runtime.messages import Sleep, WakeUp
from slipway_runtime.server.errors import ApiError
from slipway_runtime.server.replica import Identity, Replica
from slipway_runtime.settings import RuntimeSettings

log = structlog.get_logger()

KEPT_REQUEST: Final = "model.json"  # in the run directory, which lives as long as the pod
_SAME_AS: Final = {  # field of the request -> the setting with another name
    "uri": "model_uri",
    "served_name": "model_name",
    "serving_token_sha256": "serving_token_digests",
    "gateway_token_sha256": "gateway_token_digests",
    "drain_timeout_seconds": "drain_timeout",
}


class ModelChoice:
    """Accepts the first requested model, and no other one until the pod ends."""

    def __init__(self, settings: RuntimeSettings, replica: Replica) -> None:
        """Needs a running event loop."""
        self._settings = settings
        self._replica = replica
        self._kept = settings.run_directory / KEPT_REQUEST
        self._chosen: asyncio.Future[RuntimeSettings] = asyncio.get_running_loop().create_future()
        self._claimed: asyncio.Future[RuntimeSettings] = asyncio.get_running_loop().create_future()
        self._given_back = asyncio.Event()
        self._is_for_good = bool(settings.model_uri) and not settings.standby  # of the command line
        if settings.model_uri:
            self._take(settings)
            if settings.standby and (claim := _read(self._kept)) is not None:
                with contextlib.suppress(ApiError):  # a claim of another model: wait for the next claim
                    self.choose(claim)
        elif (earlier := _read(self._kept)) is not None:
            with contextlib.suppress(ApiError):  # a new image cannot serve it: wait for another request
                self.choose(earlier)

    @property
    def process_settings(self) -> RuntimeSettings:
        """The current settings; without a model, those of the process."""
        return self._settings

    @property
    def is_made(self) -> bool:
        """Whether a model has been chosen."""
        return self._chosen.done()

    @property
    def is_claimed(self) -> bool:
        """Whether requests may be answered as soon as the model is loaded."""
        return self._claimed.done()

    async def chosen(self) -> RuntimeSettings:
        """Wait until a model is chosen; returns its settings."""
        return await asyncio.shield(self._chosen)

    async def claimed(self) -> RuntimeSettings:
        """Wait until requests may be served; returns the settings. Without standby, the same as `chosen`."""
        return await asyncio.shield(self._claimed)

    def choose(self, request: LoadModelRequest) -> None:
        """Choose this model. A request for the current model changes nothing; fields that are not set are not compared.

        Raises ApiError: 400 for invalid settings, 409 where another model was chosen before.
        """
        try:
            wanted = self._settings.with_model(request)
        except ValueError as error:
            raise ApiError(400, str(error)) from None
        if not self._settings.model_uri:
            _keep(self._kept, request)
            self._take(wanted)
            return
        changeable = CLAIMED_FIELDS if self._settings.standby else frozenset()
        differing = sorted(
            name
            for name in request.model_fields_set - changeable
            if getattr(wanted, _SAME_AS.get(name, name)) != getattr(self._settings, _SAME_AS.get(name, name))
        )
        if differing:
            raise ApiError(409, f"another model is here until the pod ends: it differs in {', '.join(differing)}")
        if self._settings.standby:
            _keep(self._kept, request)
            self._take(wanted)

    def give_back(self) -> bool:
        """Give up the model of an earlier POST /model; False where there is none. Idempotent.

        Raises ApiError 409 for a model of the command line, and while requests may come or are open.
        """
        if self._is_for_good:
            raise ApiError(409, "the model of the command line stays until the pod ends")
        if not self.is_claimed:
            return False
        if not self._replica.is_drained:
            raise ApiError(409, "drain first: requests are open, or new ones are taken")
        self._kept.unlink(missing_ok=True)
        self._given_back.set()
        return True

    async def given_back(self) -> None:
        """Wait until the model is given back."""
        await self._given_back.wait()

    def info(self) -> ModelInfo:
        """The model of the process, and whether it is loaded."""
        identity = self._replica.identity
        return ModelInfo(
            uri=identity.uri,
            served_name=identity.model,
            revision=identity.revision,
            loaded=self._replica.loaded is not None,
        )

    def _take(self, settings: RuntimeSettings) -> None:
        self._settings = settings
        # Before the model answers: a serving port that requires a token must never be open.
        self._replica.gateway_token_digests = settings.gateway_token_digests
        self._replica.serving_token_digests = settings.serving_token_digests
        self._replica.drain_timeout = settings.drain_timeout
        self._replica.name_model(
            Identity(
                model=settings.model_name,
                revision=settings.revision,
                namespace=settings.namespace,
                uri=settings.model_uri,
            )
        )
        if not self._chosen.done():
            self._chosen.set_result(settings)
        if not settings.standby:
            self._claimed.set_result(settings)


def _keep(path: Path, request: LoadModelRequest) -> None:
    """Write the request to the file atomically. Without a run directory, as on a laptop, it is not stored."""
    beside = path.with_suffix(".new")
    try:
        beside.write_bytes(request.model_dump_json(by_alias=True, exclude_unset=True).encode())
        os.replace(beside, path)
    except OSError as error:
        log.info("the model is not kept for a restart", path=str(path), error=error.strerror)


def _read(path: Path) -> LoadModelRequest | None:
    """The stored request of an earlier run of this container; None: there is none."""
    try:
        return LoadModelRequest.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None


HOST_MEMORY: Final = 1  # the level of sleep that keeps the weights


class StandbyError(Exception):
    """The engine could not free its memory, or could not allocate it again."""


async def stand_by(
    settings: RuntimeSettings, choice: ModelChoice, replica: Replica, client: EngineClient
) -> RuntimeSettings | None:
    """Wait for the claim; returns its settings, or None where the engine died. Raises StandbyError."""
    sleeps = settings.standby == "sleeping" and not choice.is_claimed
    claim = asyncio.create_task(choice.claimed())
    death = asyncio.create_task(client.wait_dead())
    try:
        if sleeps:
            await _ask(client, Sleep(call=0, level=HOST_MEMORY))
        if not choice.is_claimed:
            replica.standing_by()
            log.info("standing by", level=settings.standby)
        await asyncio.wait({claim, death}, return_when=asyncio.FIRST_COMPLETED)
        if not claim.done():
            return None
        began = time.monotonic()
        if sleeps:
            await _ask(client, WakeUp(call=0))
        log.info("claimed", model=claim.result().model_name, wake_seconds=round(time.monotonic() - began, 3))
        return claim.result()
    except EngineDead:
        return None
    finally:
        claim.cancel()
        death.cancel()


async def _ask(client: EngineClient, message: Sleep | WakeUp) -> None:
    reply = await client.call(message)
    if reply.error:
        raise StandbyError(reply.error)
