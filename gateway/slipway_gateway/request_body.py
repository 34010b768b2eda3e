"""Reads the body of a request within limits of time and memory, and parses the fields that routing needs.

The runtime validates the other fields. Prompts stay in the body: nothing here logs or keeps them.
"""

import asyncio
import re
import uuid
from collections.abc import Hashable
from typing import Any, Final

import msgspec
from aiohttp import web

from slipway_api.names import HEADER_COHORT, HEADER_PIN_REVISION, HEADER_REQUEST_ID, HEADER_SESSION_ID
from slipway_gateway.errors import bad_request, body_too_slow, gateway_memory_full, too_large
from slipway_gateway.front_door import ask_for_body
from slipway_gateway.picker.prefix import block_hashes
from slipway_gateway.picker.scorers import RoutingRequest
from slipway_gateway.request_state import BYTES_PER_TOKEN
from slipway_gateway.shares import SharedCapacity

EXPECTED_OUTPUT_TOKENS: Final = 256  # when the request has no limit
MAX_EXPECTED_OUTPUT_TOKENS: Final = 4096  # a client's generous limit is not a forecast
# A generated token holds a place in the batch for a whole step; a prompt token shares one with a thousand others.
OUTPUT_WEIGHT: Final = 4
MAX_SESSION_CHARACTERS: Final = 256

_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class _Fields(msgspec.Struct):
    """The few fields that routing needs. Untyped, because the runtime validates them and words the errors."""

    model: Any = None
    stream: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    n: Any = None
    # The prompt, undecoded, in the order in which chat templates write it; and what names the session.
    tools: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    prompt_cache_key: Any = None
    user: Any = None
    temperature: Any = None
    seed: Any = None


_decode = msgspec.json.Decoder(_Fields).decode
_decode_raw = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class InferenceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of one request that routing uses."""

    routing: RoutingRequest
    stream: bool
    max_tokens: int | None
    is_greedy: bool = False  # temperature 0: equal models answer equally
    has_seed: bool = False  # of the client: the same request gets the same answer


class Body:
    """The bytes of one request, counted against an owner until they are released."""

    def __init__(self, capacity: SharedCapacity, owner: Hashable) -> None:
        self.content = b""
        self._capacity = capacity
        self._owner = owner
        self._counted = 0

    def count(self, size: int) -> bool:
        """Count `size` more bytes; False: the owner's share is used up."""
        if not self._capacity.take(self._owner, size):
            return False
        self._counted += size
        return True

    def assign_to(self, service: str) -> bool:
        """Count the body against the service that shall answer it; False: that service's share is used up."""
        counted = self._counted
        self.uncount()
        self._owner = service
        return self.count(counted)

    def uncount(self) -> None:
        """Nothing is counted any more, though the bytes may still be here."""
        if self._counted:
            self._capacity.give_back(self._owner, self._counted)
            self._counted = 0

    def release(self) -> None:
        """The bytes are not needed any more: the answer has begun."""
        self.uncount()
        self.content = b""

    def with_model(self, model: str, served_name: str) -> bytes:
        """The body, calling the model what the replica calls it; every other byte stays as the client wrote it."""
        if model == served_name:
            return self.content
        fields = _decode_raw(self.content)
        fields["model"] = msgspec.Raw(msgspec.json.encode(served_name))
        return msgspec.json.encode(fields)


class BodyReader:
    """Reads bodies; what they hold together is bounded, and divided between clients and then between services.

    When there is no room, the upload that has stood still for longest is ended first: a client that sends all but the
    last byte must not keep others out.
    """

    def __init__(
        self, capacity: SharedCapacity, *, max_bytes: int, max_seconds: float, stall_seconds: float = 1.0
    ) -> None:
        self._capacity = capacity
        self._total = capacity.free
        self._max_bytes = max_bytes
        self._max_seconds = max_seconds
        self._stall_seconds = stall_seconds
        self._uploads: dict[Body, tuple[float, asyncio.Timeout]] = {}  # by last progress, the oldest first

    def has_room(self) -> bool:
        """Whether more than half of the memory is free: else nothing is kept that no client waits for."""
        return 2 * self._capacity.free > self._total

    async def read(self, request: web.Request, max_bytes: int | None = None) -> Body:
        """The whole body, of at most `max_bytes` where this client has a limit of its own; the caller releases it."""
        max_bytes = min(max_bytes or self._max_bytes, self._max_bytes)
        if (request.content_length or 0) > max_bytes:
            raise too_large(max_bytes)
        body = Body(self._capacity, ("client", request.remote))
        try:
            await ask_for_body(request)
            async with asyncio.timeout(self._max_seconds) as limit:
                body.content = await self._read(request, body, limit, max_bytes)
        except TimeoutError:
            body.uncount()
            raise body_too_slow() from None
        except web.RequestPayloadError as error:
            body.uncount()
            raise bad_request("The body cannot be read as its Transfer-Encoding says.") from error
        except BaseException:
            body.uncount()
            raise
        finally:
            self._uploads.pop(body, None)
        return body

    async def _read(self, request: web.Request, body: Body, limit: asyncio.Timeout, max_bytes: int) -> bytes:
        pieces, size = [], 0
        async for piece in request.content.iter_any():
            size += len(piece)
            if size > max_bytes:
                raise too_large(max_bytes)
            while not body.count(len(piece)):
                if not self._end_stalled_upload():
                    raise gateway_memory_full()
            self._uploads.pop(body, None)
            self._uploads[body] = (asyncio.get_running_loop().time(), limit)
            pieces.append(piece)
        return b"".join(pieces)

    def _end_stalled_upload(self) -> bool:
        """Whether there was an upload that stood still; its bytes are free again at once."""
        now = asyncio.get_running_loop().time()
        for body, (progressed_at, limit) in self._uploads.items():
            if now - progressed_at < self._stall_seconds:
                return False  # the others have made progress even later
            if limit.expired():
                continue
            del self._uploads[body]
            body.uncount()
            limit.reschedule(now)
            return True
        return False


def parse(content: bytes, request: web.Request, *, tenant: str = "") -> InferenceRequest:
    """Parse a body of this tenant, or refuse it."""
    try:
        fields = _decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request("The body is not a JSON object.") from error
    if not isinstance(fields.model, str) or not fields.model:
        raise bad_request("The body needs a `model`: a string that names what shall answer.", param="model")
    limits = (fields.max_tokens, fields.max_completion_tokens, fields.max_output_tokens)
    asked_for = next((limit for limit in limits if limit is not None), None)
    max_tokens = asked_for if isinstance(asked_for, int) and asked_for > 0 else None
    expected = min(max_tokens or EXPECTED_OUTPUT_TOKENS, MAX_EXPECTED_OUTPUT_TOKENS)
    prompt = _prompt(fields)
    answers = fields.n if isinstance(fields.n, int) and 0 < fields.n <= 128 else 1
    return InferenceRequest(
        routing=RoutingRequest(
            model=fields.model,
            cost=len(content) // BYTES_PER_TOKEN + expected * answers * OUTPUT_WEIGHT,
            prompt_tokens=len(content) // BYTES_PER_TOKEN,
            pin=request.headers.get(HEADER_PIN_REVISION, ""),
            cohort=request.headers.get(HEADER_COHORT) or (fields.user if isinstance(fields.user, str) else ""),
            session=_session(fields, request, tenant),
            blocks=block_hashes(prompt, tenant, fields.model),
            prompt_bytes=sum(map(len, prompt)) + len(prompt) - 1,
        ),
        stream=fields.stream is True,
        max_tokens=max_tokens,
        is_greedy=fields.temperature == 0,
        has_seed=fields.seed is not None,
    )


def _prompt(fields: _Fields) -> list[memoryview]:
    """The parts of the body that become the prompt: a conversation's next turn begins with the same bytes."""
    parts = (fields.tools, fields.system, fields.instructions, fields.messages, fields.prompt, fields.input)
    return [memoryview(part) for part in parts]


def _session(fields: _Fields, request: web.Request, tenant: str) -> str:
    """What the requests of one session have in common: the header, else OpenAI's `prompt_cache_key`, else `user`."""
    for name in (request.headers.get(HEADER_SESSION_ID), fields.prompt_cache_key, fields.user):
        if isinstance(name, str) and name:
            return f"{tenant}\x1f{name[:MAX_SESSION_CHARACTERS]}"
    return ""


def request_id(request: web.Request) -> str:
    """The client's id for this request where it is sane, so that its logs and ours meet; else a new one."""
    given = request.headers.get(HEADER_REQUEST_ID, "")
    return given if _SANE_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"
