"""Loads the configured adapters and prefills the warm prompts, between a warm engine and a ready replica.

Adapters come from the command line and from the boot list, a file that the operator keeps in a ConfigMap: it is read at
every start, so that a restarted container loads its adapters again without the operator.

A failure of either does not keep the replica from getting ready. Requests for an adapter that did not load get its
error from the registry, and a prompt that was not prefilled is only slower at first.
"""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import structlog
from pydantic import ValidationError

from slipway_api.runtime_api import BootList, LoadAdapterRequest
from slipway_runtime.engine.client import EngineError
from slipway_runtime.messages import Request, SamplingParams
from slipway_runtime.server.chat_types import ChatMessage
from slipway_runtime.server.errors import ApiError
from slipway_runtime.server.replica import LoadedModel
from slipway_runtime.settings import BootAdapter, WarmPrompt

log = structlog.get_logger()

LOADS_AT_ONCE: Final = 4  # adapters of the boot list; each may be a download


def read_boot_list(path: Path) -> tuple[LoadAdapterRequest, ...]:
    """The adapters of the boot list; empty where the file is missing or cannot be read."""
    try:
        return BootList.model_validate_json(path.read_bytes()).adapters
    except FileNotFoundError:
        return ()
    except (OSError, ValidationError) as error:
        log.error("the list of adapters cannot be read", path=str(path), reason=type(error).__name__)
        return ()


async def load_boot_list(model: LoadedModel, adapters: Sequence[LoadAdapterRequest]) -> None:
    """Load the adapters of the boot list, LOADS_AT_ONCE at a time."""
    slots = asyncio.Semaphore(LOADS_AT_ONCE)

    async def load(one: LoadAdapterRequest) -> None:
        async with slots:
            with contextlib.suppress(ApiError):  # the registry keeps and logs the error
                await model.adapters.load(one.name, one.uri, digest=one.digest, pinned=one.pinned, version=one.version)

    await asyncio.gather(*(load(one) for one in adapters))


async def load_adapters(model: LoadedModel, adapters: Sequence[BootAdapter]) -> None:
    """Load the adapters of the command line, one after the other."""
    for adapter in adapters:
        with contextlib.suppress(ApiError):  # the registry keeps and logs the error
            await model.adapters.load(adapter.name, adapter.uri)


async def prefill(model: LoadedModel, prompts: Sequence[WarmPrompt]) -> None:
    """Send each prompt through the engine once, like a client's request, so that its prefix is cached."""
    for index, prompt in enumerate(prompts):
        try:
            await _prefill(model, prompt, f"warm-prompt-{index}")
        except (ApiError, EngineError, ValueError) as error:
            log.error("warm prompt not prefilled", index=index, reason=str(error))


async def _prefill(model: LoadedModel, prompt: WarmPrompt, request_id: str) -> None:
    if isinstance(prompt, str):
        written = await model.prompts.text(prompt)
    else:
        # Without the generation prompt: the tokens after the last message differ from request to request.
        messages = [ChatMessage.model_validate(dict(message)) for message in prompt]
        written = await model.prompts.chat(messages, add_generation_prompt=False)
    request = Request(
        id=request_id,
        prompt_token_ids=written.token_ids,
        params=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
        arrived=time.monotonic(),
        public=True,
    )
    async with model.engine.generate(request) as outputs:
        async for output in outputs:
            if output.error:
                log.error("warm prompt not prefilled", index=request_id, reason=output.error)
