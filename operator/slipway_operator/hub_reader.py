"""Reads the sizes of `hf://` models from their hub, in the background: config.json and the number of parameters.

Only hubs that the installation names are asked, without credentials, a few at a time and within seconds; a hub that
does not answer costs nothing but its facts. A model whose memory is not that of plain attention and plain weights
(quantized checkpoints, several towers, caches of other kinds) has no facts here: the runtime plans it.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final
from urllib.parse import quote

import aiohttp
import structlog
from pydantic import ValidationError

from slipway_api.model_spec import Shape
from slipway_operator.controller.kinds import Key, StoredObject
from slipway_operator.core.actions import AskHub
from slipway_operator.core.observed import HubAnswer

log = structlog.get_logger()

SECONDS: Final = 5.0  # for all requests of one model
AT_ONCE: Final = 4
RETRY_AFTER: Final = timedelta(hours=1)
MOST_BYTES: Final = 16 << 20
ANSWERS_KEPT: Final = 4096
_WIDTHS: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
_OTHER_MEMORY: Final = ("quantization_config", "text_config", "vision_config", "audio_config")


# Models whose cache is the latent alone; others with this key have a second cache, or layers of another kind.
_LATENT_TYPES: Final = ("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite", "youtu")
_EXPERT_COUNTS: Final = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


class NoFacts(Exception):  # noqa: N818  reads as a fact where it is raised
    """The hub does not answer, or its answer does not tell the sizes."""


@dataclass(frozen=True, slots=True)
class _Read:
    """One question and its answer."""

    asked_at: datetime
    shape: Shape | None = None
    is_done: bool = False


class HubReader:
    """Asks hubs, and keeps what they answered."""

    def __init__(
        self, endpoints: Iterable[str], *, now: Callable[[], datetime], on_done: Callable[[Key], None]
    ) -> None:
        """`endpoints`: the hubs that may be asked; the first is that of services which name none."""
        self._endpoints = tuple(one.rstrip("/") for one in endpoints if one.startswith(("http://", "https://")))
        self._now = now
        self._on_done = on_done
        self._reads: dict[tuple[str, str], _Read] = {}
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def performers(self) -> Mapping[type, Callable[[Key, StoredObject, Any], Awaitable[None]]]:
        """What executes the action of plans."""
        return {AskHub: self._perform}

    def answer(self, uri: str, endpoint: str) -> HubAnswer | None:
        """What is known of this model; None: no hub may be asked about it."""
        if not uri.startswith("hf://") or self._hub(endpoint) is None:
            return None
        read = self._reads.get((uri, endpoint))
        if read is None or (read.is_done and read.shape is None and self._now() - read.asked_at > RETRY_AFTER):
            return HubAnswer()
        return HubAnswer(asked_at=read.asked_at, shape=read.shape, is_done=read.is_done)

    async def stop(self) -> None:
        """Cancel the questions under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _hub(self, endpoint: str) -> str | None:
        if not endpoint:
            return self._endpoints[0] if self._endpoints else None
        return endpoint.rstrip("/") if endpoint.rstrip("/") in self._endpoints else None

    async def _perform(self, key: Key, _stored: StoredObject, action: AskHub) -> None:
        about, hub = (action.uri, action.endpoint), self._hub(action.endpoint)
        under_way = self._reads.get(about)
        if hub is None or (under_way is not None and not under_way.is_done):
            return
        self._reads.pop(about, None)
        while len(self._reads) >= ANSWERS_KEPT:
            del self._reads[next(iter(self._reads))]
        self._reads[about] = _Read(self._now())
        task = asyncio.create_task(self._ask(key, about, hub), name=f"hub {action.uri}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ask(self, key: Key, about: tuple[str, str], hub: str) -> None:
        shape = None
        try:
            async with self._slots, asyncio.timeout(SECONDS):
                shape = await read_shape(hub, about[0])
        except (NoFacts, TimeoutError, aiohttp.ClientError, OSError) as exc:
            reason = str(exc) or type(exc).__name__
            log.info("the hub tells no sizes; the first replica will", model=about[0], hub=hub, reason=reason)
        self._reads[about] = replace(self._reads[about], shape=shape, is_done=True)
        self._on_done(key)


async def read_shape(hub: str, uri: str) -> Shape:
    """The sizes of the model. Raises NoFacts, TimeoutError or an error of the HTTP client."""
    repository, _, revision = uri.removeprefix("hf://").partition("@")
    revision = quote(revision or "main", safe="")
    # The process's own proxy and certificates (HTTPS_PROXY, SSL_CERT_FILE) count.
    async with aiohttp.ClientSession(trust_env=True) as session:
        config = await _get(session, f"{hub}/{repository}/resolve/{revision}/config.json")
        about = await _get(session, f"{hub}/api/models/{repository}/revision/{revision}")
        counted = (about.get("safetensors") or {}).get("total")
        if not isinstance(counted, int):
            index = await _get(session, f"{hub}/{repository}/resolve/{revision}/model.safetensors.index.json")
            counted = _count(config, index)
    return shape_of(config, counted)


def shape_of(config: Mapping[str, Any], parameters: int) -> Shape:
    """The sizes in a config.json. Raises NoFacts where they would not describe the memory of this model."""
    if other := next((name for name in _OTHER_MEMORY if config.get(name)), None):
        raise NoFacts(f"config.json has {other}")
    heads = config.get("num_attention_heads")
    if config.get("kv_lora_rank") and config.get("model_type") not in _LATENT_TYPES:
        raise NoFacts("config.json has kv_lora_rank")
    try:
        return Shape.model_validate(
            {
                "layers": config.get("num_hidden_layers"),
                "hiddenSize": config.get("hidden_size"),
                "heads": heads,
                "kvHeads": config.get("num_key_value_heads") or heads,
                "headDim": config.get("head_dim") or 0,
                "parameters": parameters,
                **_latents(config),
                **_experts(config),
            }
        )
    except ValidationError:
        raise NoFacts("config.json does not have the sizes of a decoder") from None


def _latents(config: Mapping[str, Any]) -> dict[str, Any]:
    """The size of a token in the cache of latent attention."""
    rank, rotary = config.get("kv_lora_rank"), config.get("qk_rope_head_dim")
    if not rank:
        return {}
    if not isinstance(rank, int) or not isinstance(rotary, int):
        raise NoFacts("config.json does not have the sizes of latent attention")
    return {"latentSize": rank + rotary}


def _experts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a mixture of experts: a step computes the few of each token, and all of them lie in memory."""
    count = next((config[name] for name in _EXPERT_COUNTS if config.get(name)), None)
    if not count:
        return {}
    return {
        "experts": count,
        "expertsPerToken": config.get("num_experts_per_tok") or config.get("moe_k"),
        "moeIntermediateSize": config.get("moe_intermediate_size") or config.get("intermediate_size"),
    }


def _count(config: Mapping[str, Any], index: Mapping[str, Any]) -> int:
    """Parameters by the size of the weights, which all have the type that config.json names."""
    width = _WIDTHS.get(str(config.get("torch_dtype") or config.get("dtype")))
    size = (index.get("metadata") or {}).get("total_size")
    if width is None or not isinstance(size, int | float):
        raise NoFacts("the hub does not tell the number of parameters")
    return int(size) // width


async def _get(session: aiohttp.ClientSession, url: str) -> Mapping[str, Any]:
    async with session.get(url, max_redirects=3) as response:
        if response.status != 200:
            raise NoFacts(f"status {response.status}")
        raw = await response.content.read(MOST_BYTES + 1)
        while len(raw) <= MOST_BYTES and (piece := await response.content.read(MOST_BYTES + 1 - len(raw))):
            raw += piece
    if len(raw) > MOST_BYTES:
        raise NoFacts(f"an answer of more than {MOST_BYTES} bytes")
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        raise NoFacts("the answer is not JSON") from None
    if not isinstance(found, dict):
        raise NoFacts("the answer is not a JSON object")
    return found
