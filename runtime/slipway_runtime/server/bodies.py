"""Base class and parser of request bodies: strict JSON, limited in depth and size. Errors never echo the body.

A field is honoured, refused, or ignored and named: `fields.py` has the lists.

Python's own parser accepts `NaN`, accepts a key twice and keeps the last value, and fails on a thousand nested
brackets; each of these is an error of the client and must not be answered like a valid request.
"""

import asyncio
import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, ClassVar, Final, NoReturn, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator
from starlette.requests import Request

from slipway_runtime.server.errors import ApiError, Unsupported, of_validation
from slipway_runtime.server.fields import Lists, ignored_fields

MAX_DEPTH: Final = 64
MAX_CONTAINERS: Final = 50_000  # objects and lists
MAX_STRINGS: Final = 500_000
_BIG: Final = 64 * 1024  # bytes; larger bodies are scanned in a thread
# A string, even one that never ends (so no byte is looked at twice), or a bracket.
_TOKEN: Final = re.compile(rb'"(?>[^"\\]*(?:\\.[^"\\]*)*)"?|[\[\]{}]', re.DOTALL)
_ENCODING: Final = re.compile(r"[a-z0-9_, -]{1,40}")
_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")


@cache
def _honoured(kind: type[BaseModel]) -> Mapping[str, str]:
    return {info.alias or name: name for name, info in kind.model_fields.items()}


class RequestBody(BaseModel):
    """Base class of the objects in requests: its fields are honoured, `lists` has those that are refused or ignored.

    `null` is "not set" for every field, and NaN and infinity are errors.
    """

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)
    lists: ClassVar[Lists] = Lists()

    @model_validator(mode="before")
    @classmethod
    def _only_what_is_set(cls, value: Any) -> Any:
        """Refuse the fields that cannot be ignored, and drop those that are null."""
        if not isinstance(value, dict):
            return value
        if refused := cls.lists.refuses(value):
            raise Unsupported(refused)
        if None not in value.values():
            return value
        return {key: one for key, one in value.items() if one is not None}

    @classmethod
    def honoured(cls) -> Mapping[str, str]:
        """The names of the fields in JSON, each with the name of the attribute that holds it."""
        return _honoured(cls)

    def dropped(self) -> Iterator[tuple[str, bool]]:
        """Values that are ignored although their field is honoured; see `fields.Listed`."""
        return iter(())


_M = TypeVar("_M", bound=RequestBody)


def only_types(*types: str | None, supported: str) -> BeforeValidator:
    """Refuses objects of any other `type` in a sentence; None: an object may have no type. `supported`: in plural."""

    def check(value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else types[0]
        if kind not in types:
            raise ValueError(f"only {supported} are supported by this server")
        return value

    return BeforeValidator(check)


async def read_body(http: Request, kind: type[_M]) -> _M:
    """Read and validate the body, and note its ignored fields; raises ApiError 400 if it is invalid."""
    if not _is_json(http.headers.get("content-type", "")):
        raise ApiError(400, "a JSON body with content type application/json is needed")
    encoding = http.headers.get("content-encoding", "").strip().lower()
    if encoding not in {"", "identity"}:
        named = encoding if _ENCODING.fullmatch(encoding) else "that"
        raise ApiError(415, f"the content encoding {named} is not supported: send the body uncompressed")
    raw = await http.body()
    if len(raw) > _BIG:
        value = await asyncio.to_thread(parse_json, raw)
    else:
        value = parse_json(raw)
    if not isinstance(value, dict):
        raise ApiError(400, "the body is a JSON object")
    body = checked(kind, value)
    http.state.ignored = ignored_fields(body, value)
    return body


def note_ignored(http: Request, name: str) -> None:
    """Note a field that turned out to have no effect on this model."""
    http.state.ignored = getattr(http.state, "ignored", {}) | {name: True}


def checked(kind: type[_M], value: Any) -> _M:
    """Validate the value as an object of this kind; raises ApiError 400 with the first error."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise of_validation(error.errors(include_url=False, include_input=False), value) from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None


def parse_json(raw: bytes) -> Any:
    """Parse one JSON value; raises ApiError 400 with a sentence."""
    _check_shape(raw)
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_with_unique_keys, parse_constant=_no_constant)
        if _SURROGATE.search(raw):
            json.dumps(value, ensure_ascii=False).encode()  # raises for a lone surrogate, which is no character
    except UnicodeError:
        raise ApiError(400, "the body is not valid Unicode") from None
    except (ValueError, RecursionError):
        raise ApiError(400, "the body is not valid JSON") from None
    return value


def _is_json(content_type: str) -> bool:
    media = content_type.split(";", 1)[0].strip().lower()
    return media == "application/json" or (media.startswith("application/") and media.endswith("+json"))


def _check_shape(raw: bytes) -> None:
    """Refuse JSON that is too deep or has too many containers, before it is parsed."""
    depth = containers = strings = 0
    for token in _TOKEN.finditer(raw):
        first = raw[token.start()]
        if first == 0x22:  # "
            strings += 1
            if strings > MAX_STRINGS:
                raise ApiError(400, f"the body holds more than {MAX_STRINGS} strings")
        elif first in b"[{":
            depth += 1
            containers += 1
            if depth > MAX_DEPTH:
                raise ApiError(400, f"the body is nested deeper than {MAX_DEPTH} levels")
            if containers > MAX_CONTAINERS:
                raise ApiError(400, f"the body holds more than {MAX_CONTAINERS} objects and lists")
        else:
            depth -= 1


def _with_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    whole = dict(pairs)
    if len(whole) != len(pairs):
        raise ApiError(400, "the body names a key twice")
    return whole


def _no_constant(_word: str) -> NoReturn:
    raise ApiError(400, "the body is not valid JSON: it does not allow NaN and Infinity")
