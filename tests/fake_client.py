"""The real client, with the fake API server's memory in place of a network."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Protocol

import msgspec

from slipway_kube.auth import Connection, StaticCredentials
from slipway_kube.client import Client
from slipway_kube.errors import Unreachable, from_response
from tests.fake_requests import Answer, Dropped, Request, refusal
from tests.fake_store import Refused


class Serves(Protocol):
    """What of the fake API server this needs."""

    async def answer(self, request: Request) -> Answer: ...

    def watch(self, request: Request) -> AsyncGenerator[bytes, None]: ...


class InProcessClient(Client):
    """No sockets: every await is a matter of the loop's time, so it fits virtual time."""

    def __init__(self, server: Serves) -> None:
        super().__init__(Connection("http://in-process", StaticCredentials()))
        self._server = server

    async def _exchange(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = "application/json",
        timeout: float | None = None,
    ) -> tuple[int, bytes, str | None]:
        seconds = self._timeout if timeout is None else timeout
        decoded = None if body is None else msgspec.json.decode(msgspec.json.encode(body))
        try:
            async with asyncio.timeout(seconds), self._calls:
                await asyncio.sleep(0)
                answer = await self._server.answer(Request(method, path, dict(params or {}), decoded, content_type))
                await asyncio.sleep(0)
        except TimeoutError as exc:
            raise Unreachable(f"{method} {path}: no answer within {seconds:g} s") from exc
        except Dropped as exc:
            raise Unreachable(f"{method} {path}: dropped") from exc
        return answer.status, answer.body, str(answer.retry_after) if answer.retry_after is not None else None

    async def watch(
        self,
        path: str,
        *,
        resource_version: str,
        label_selector: str = "",
        field_selector: str = "",
        timeout_seconds: int = 300,
    ) -> AsyncGenerator[bytes, None]:
        params = {"watch": "true", "resourceVersion": resource_version, "timeoutSeconds": str(timeout_seconds)}
        params |= {"labelSelector": label_selector, "fieldSelector": field_selector}
        lines = self._server.watch(Request("GET", path, params))
        try:
            async for line in lines:
                yield line.rstrip(b"\n")
        except Refused as refused:
            raise from_response(refused.status, refusal(refused).body) from refused
        except Dropped as exc:
            raise Unreachable(f"WATCH {path}: dropped") from exc
        finally:
            await lines.aclose()
