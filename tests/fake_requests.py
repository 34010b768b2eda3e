"""Requests, answers and faults of the fake API server: what travels, and what may go wrong on the way."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import msgspec

from slipway_kube.resources import Resource
from tests.fake_store import Object, Refused, field_matcher, label_matcher


@dataclass(frozen=True)
class Request:
    """One request, as it came."""

    method: str
    path: str
    params: Mapping[str, str]
    body: Any = None
    content_type: str = ""


@dataclass
class Fault:
    """What is to go wrong, with which requests, and how often."""

    method: str = ""  # any
    path: str = ""  # a regular expression, found anywhere
    body: str = ""  # the same, in what was sent
    status: int = 0
    retry_after: int | None = None
    message: str = "injected"
    reason: str = ""  # that of the status
    lose_reply: bool = False
    hang: bool = False
    commit: bool = False  # with `hang`: do it first
    times: int = 1
    skip: int = 0

    def strikes(self, request: Request) -> bool:
        """Whether this request is hit; counts down."""
        if self.times <= 0 or (self.method and self.method != request.method):
            return False
        if not re.search(self.path, request.path) or not re.search(self.body, str(request.body)):
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        self.times -= 1
        return True


class Dropped(Exception):  # noqa: N818
    """The connection breaks here."""


@dataclass(frozen=True)
class Answer:
    """A whole reply."""

    status: int
    body: bytes
    retry_after: int | None = None


@dataclass(frozen=True)
class Route:
    kind: str  # group/plural
    api_version: str
    namespace: str
    name: str
    subresource: str


def kind_of(resource: Resource) -> str:
    return f"{resource.group}/{resource.plural}"


def route_of(path: str) -> Route:
    parts = [unquote(part) for part in path.strip("/").split("/")]
    if parts[0] == "api" and len(parts) > 2:
        group, version, rest = "", parts[1], parts[2:]
    elif parts[0] == "apis" and len(parts) > 3:
        group, version, rest = parts[1], parts[2], parts[3:]
    else:
        raise Refused(404, f"no such path: {path}", "NotFound")
    namespace = ""
    if rest[0] == "namespaces" and len(rest) > 2:
        namespace, rest = rest[1], rest[2:]
    plural, name, subresource = (*rest, "", "", "")[:3]
    return Route(f"{group}/{plural}", f"{group}/{version}" if group else version, namespace, name, subresource)


def matcher(params: Mapping[str, str]) -> Callable[[Object], bool]:
    by_label = label_matcher(params.get("labelSelector", ""))
    by_field = field_matcher(params.get("fieldSelector", ""))
    return lambda one: by_label(one) and by_field(one)


def refusal(refused: Refused) -> Answer:
    body = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": refused.status}
    body |= {"reason": refused.reason, "message": refused.message}
    return Answer(refused.status, msgspec.json.encode(body), refused.retry_after)


def watch_line(kind: str, one: Object) -> bytes:
    return msgspec.json.encode({"type": kind, "object": one}) + b"\n"
