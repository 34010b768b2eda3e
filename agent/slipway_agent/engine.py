"""An HTTP client for the engine beside the agent. Every answer has a deadline and a limit on its bytes.

Answers of an engine may hold text of prompts, so nothing of them is logged.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, nullcontext
from typing import Any, Final

import aiohttp

from slipway_agent.page import PageReader, UnreadablePage
from slipway_agent.readings import Page
from slipway_api.trust import NoTrustError, Trust

MOST_ANSWER_BYTES: Final = 2**20  # of a JSON answer: the list of a thousand adapters
MOST_READ_AT_ONCE: Final = 2  # answers that are held in memory; the next ones wait, within their deadline


class EngineError(Exception):
    """A call to the engine failed; the message says how, without text of its answer.

    EngineError
    ├── EngineClosed      nothing listens on its port
    ├── EngineSilent      no answer in time, or the connection broke
    └── EngineUnreadable  an answer that does not fit the dialect
        └── EngineRefused     an answer with an error status
    """


class EngineClosed(EngineError):  # noqa: N818  reads as a fact where it is raised
    """Nothing listens on the engine's port."""


class EngineSilent(EngineError):  # noqa: N818  reads as a fact where it is raised
    """No answer in time, or a broken one."""


class EngineUnreadable(EngineError):  # noqa: N818  reads as a fact where it is raised
    """The answer does not fit the dialect."""


class EngineRefused(EngineUnreadable):
    """An error status; `detail` is the engine's own sentence, for the caller and not for logs."""

    def __init__(self, what: str, status: int, detail: str) -> None:
        super().__init__(f"{what}: the engine answers {status}")
        self.status = status
        self.detail = detail


class Engine:
    """The engine's serving port."""

    def __init__(self, session: aiohttp.ClientSession, url: str, *, trust: Trust | None = None, name: str = "") -> None:
        """`trust` verifies an engine that serves TLS, by the name that its certificate is for."""
        self._session = session
        self._url = url.rstrip("/")
        self._trust = trust
        self._name = name or None
        self._readers = asyncio.Semaphore(MOST_READ_AT_ONCE)

    async def status(self, path: str, *, seconds: float) -> int:
        """The status of a GET; its body is not read."""
        async with self._asked("GET", path, seconds) as answer:
            return answer.status

    async def page(self, path: str, wanted: frozenset[str], *, seconds: float) -> Page:
        """The series of a metrics page by name; raises EngineError."""
        async with self._asked("GET", path, seconds, readers=self._readers) as answer:
            if answer.status != 200:
                raise EngineRefused(f"GET {path}", answer.status, "")
            reader = PageReader(wanted)
            try:
                async for chunk in answer.content.iter_chunked(2**16):
                    reader.feed(chunk)
                return reader.finish()
            except UnreadablePage as error:
                raise EngineUnreadable(str(error)) from None

    async def get(self, path: str, *, seconds: float) -> Any:
        """The JSON of a GET; raises EngineError."""
        async with self._asked("GET", path, seconds, readers=self._readers) as answer:
            raw = await _bounded(answer, f"GET {path}")
            if answer.status != 200:
                raise EngineRefused(f"GET {path}", answer.status, _sentence(raw))
        try:
            return json.loads(raw)
        except (ValueError, RecursionError):
            raise EngineUnreadable(f"GET {path}: the answer is not JSON") from None

    async def post(self, path: str, body: Mapping[str, Any] | None = None, *, query: str = "", seconds: float) -> None:
        """A POST whose answer does not matter; raises EngineRefused where it is an error."""
        async with self._asked("POST", path, seconds, body, query) as answer:
            raw = await _bounded(answer, f"POST {path}")
            if not 200 <= answer.status < 300:
                raise EngineRefused(f"POST {path}", answer.status, _sentence(raw))

    @asynccontextmanager
    async def _asked(
        self,
        method: str,
        path: str,
        seconds: float,
        body: Mapping[str, Any] | None = None,
        query: str = "",
        *,
        readers: asyncio.Semaphore | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        try:
            async with (
                asyncio.timeout(seconds),
                readers or nullcontext(),
                self._session.request(
                    method,
                    self._url + path + (f"?{query}" if query else ""),
                    json=body,
                    allow_redirects=False,
                    headers={"Accept-Encoding": "identity"},
                    ssl=self._trust.context if self._trust is not None else True,
                    server_hostname=self._name,
                ) as answer,
            ):
                yield answer
        except TimeoutError:
            raise EngineSilent(f"{method} {path}: no answer within {seconds:g} s") from None
        except (aiohttp.ClientSSLError, NoTrustError) as error:  # the first is a ClientConnectorError
            raise EngineSilent(f"{method} {path}: TLS with the engine failed: {_describe(error)}") from None
        except aiohttp.ClientConnectorError as error:
            raise EngineClosed(f"{method} {path}: {error.strerror or 'nothing listens'}") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise EngineSilent(f"{method} {path}: {type(error).__name__}") from None


def _describe(error: Exception) -> str:
    """The reason of a failed handshake, such as `certificate has expired`."""
    cause = getattr(error, "certificate_error", None) or getattr(error, "os_error", None) or error
    return getattr(cause, "verify_message", "") or getattr(cause, "reason", "") or str(cause)


async def _bounded(answer: aiohttp.ClientResponse, what: str) -> bytes:
    raw = bytearray()
    async for chunk in answer.content.iter_chunked(2**16):
        raw += chunk
        if len(raw) > MOST_ANSWER_BYTES:
            raise EngineUnreadable(f"{what}: the answer is larger than {MOST_ANSWER_BYTES} bytes")
    return bytes(raw)


def _sentence(raw: bytes) -> str:
    """The message of an error body in the forms of vLLM, SGLang and OpenAI, at most 500 characters; else empty."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        return ""
    for place in (body, body.get("error") if isinstance(body, dict) else None):
        if isinstance(place, dict):
            for key in ("message", "error_message", "detail", "error"):
                if isinstance(place.get(key), str):
                    return " ".join(str(place[key]).split())[:500]
    return ""
