"""What the gateway keeps of a stream so that another replica can continue it: the request, and the tokens so far.

Bounded for each stream and in all, shared between services. A stream whose journal finds no room loses the ability to
be handed over, never its answer.
"""

import math
import re
import secrets
from array import array
from collections.abc import Callable
from typing import Any, Final, Protocol

import msgspec

from slipway_gateway.picker.endpoints import Endpoint
from slipway_gateway.shares import SharedCapacity
from slipway_gateway.sse import Events, MarkedEvents

MAX_SEED: Final = 2**53  # what any JSON parser keeps exactly
STEP_BYTES: Final = 1024  # tokens are counted in steps
OVERHEAD_BYTES: Final = 1024  # the objects of one journal
BYTES_PER_TOKEN_ID: Final = 4
MAX_ANSWERS: Final = 1024  # of one request

_ID = re.compile(rb'"id":\s*"([A-Za-z0-9._-]{1,160})"')
_CREATED = re.compile(rb'"created(?:_at)?":\s*(\d{1,15})')
_decode_raw = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class Identified(Protocol):
    """An answer of a replica."""

    status: int
    identity: str  # model, revision, tokenizer and adapter; empty: unknown

    @property
    def is_stream(self) -> bool:
        """Whether these are server-sent events."""


class JournalMemory:
    """The memory of all journals."""

    def __init__(self, *, max_bytes: int, max_stream_bytes: int) -> None:
        self.capacity = SharedCapacity(max_bytes)
        self.max_stream_bytes = max_stream_bytes
        self._max_bytes = max_bytes

    @property
    def held(self) -> int:
        """The memory of all journals now."""
        return self._max_bytes - self.capacity.free


class Answer:
    """The tokens of one answer so far."""

    __slots__ = ("ended", "token_ids")

    def __init__(self) -> None:
        self.token_ids = array("I")
        self.ended = False


class Journal:
    """One stream: the body that was sent, and what its replica has reported."""

    __slots__ = (
        "_content", "_counted", "_held", "_memory", "_on_given_up", "_room", "_service", "answers", "broken", "created",
        "hung", "id", "identity",
    )  # fmt: skip

    def __init__(
        self,
        content: bytes,
        answers: int,
        service: str,
        memory: JournalMemory,
        on_given_up: Callable[[str], None],
    ) -> None:
        """`content`: the body as the replica got it, with its seed. Call `open` before anything else."""
        self._content: bytes | None = content
        self._memory = memory
        self._service = service
        self._on_given_up = on_given_up
        self._counted = 0
        self._room = 0  # counted and not used yet
        self._held = 0  # counted for events that no mark covers yet
        self.answers = [Answer() for _ in range(answers)]
        self.id = ""
        self.created = 0
        self.identity = ""  # of what answers: model, revision, tokenizer and adapter; another one may not continue it
        self.broken = ""  # why the stream waits for another replica
        self.hung = False  # whether its replica was silent instead of gone

    def open(self) -> bool:
        """Take the memory of the request; False: the stream cannot be handed over."""
        assert self._content is not None
        return self._take(len(self._content) + OVERHEAD_BYTES)

    @property
    def can_resume(self) -> bool:
        """Whether everything that another replica needs is here."""
        return self._content is not None

    @property
    def has_begun(self) -> bool:
        """Whether the client has seen anything of the answers."""
        return any(answer.token_ids or answer.ended for answer in self.answers)

    @property
    def open_answers(self) -> int:
        """How many answers have not ended."""
        return sum(not answer.ended for answer in self.answers)

    @property
    def tokens(self) -> int:
        """How many tokens the client has."""
        return sum(len(answer.token_ids) for answer in self.answers)

    def add(self, index: int, token_ids: bytes, ended: bool) -> None:
        """New tokens of an answer, as the mark has them: `5,17,3`."""
        if index >= len(self.answers):
            return
        answer = self.answers[index]
        answer.ended |= ended
        if token_ids and self._content is not None:
            answer.token_ids.extend(map(int, token_ids.split(b",")))
            self._room -= BYTES_PER_TOKEN_ID * (token_ids.count(b",") + 1)
            if self._room < 0:
                steps = math.ceil(-self._room / STEP_BYTES) * STEP_BYTES
                self._room += steps
                self._take(steps)

    def hold(self, size: int) -> bool:
        """Count `size` bytes of events that wait for their mark; False: the stream cannot be handed over any more."""
        if self._content is None:
            return False
        steps = math.ceil(size / STEP_BYTES) * STEP_BYTES
        more, self._held = steps - self._held, steps
        if more < 0:
            self._memory.capacity.give_back(self._service, -more)
            self._counted += more
        return more <= 0 or self._take(more)

    def read_identity(self, events: bytes) -> None:
        """Learn the answer's id and creation time from its first event."""
        if (found := _ID.search(events)) is not None:
            self.id = found[1].decode()
        if (found := _CREATED.search(events)) is not None:
            self.created = int(found[1])

    def body(self) -> bytes:
        """The body with which another replica continues; the request as it was, while the client has seen nothing."""
        assert self._content is not None
        if not self.has_begun:
            return self._content
        answers: list[dict[str, Any]] = [
            {"output_token_ids": answer.token_ids.tolist(), "finished": answer.ended} for answer in self.answers
        ]
        resume: dict[str, Any] = {"answers": answers}
        if self.id:
            resume |= {"id": self.id, "created": self.created}
        return with_field(self._content, "slipway_resume", resume)

    def events(self) -> Events:
        """Reads the stream of one attempt."""
        return MarkedEvents(self.open_answers, self.add, self.hold)

    def identify(self, reply: Identified, endpoint: Endpoint) -> None:
        """Our runtime names its identity in a header."""

    def path(self, path_qs: str) -> str:
        """The path that continues the stream."""
        return path_qs

    def close(self) -> None:
        """Forget the request and its tokens; also when that has been done already."""
        self._held = 0
        if self._counted:
            self._memory.capacity.give_back(self._service, self._counted)
            self._counted = 0
        self._content = None
        for answer in self.answers:
            answer.token_ids = array("I")

    def _take(self, amount: int) -> bool:
        if self._counted + amount > self._memory.max_stream_bytes:
            return self._give_up("too_large")
        if not self._memory.capacity.take(self._service, amount):
            return self._give_up("memory")
        self._counted += amount
        return True

    def _give_up(self, reason: str) -> bool:
        self.close()
        self._on_given_up(reason)
        return False


def prepare(content: bytes) -> tuple[bytes, int]:
    """The body with a seed where it has none, so that all replicas draw the same tokens; and how many answers it gets.

    0 answers: the body does not say it properly, so the replica will refuse it.
    """
    fields = _decode_raw(content)
    answers = _number_of_answers(fields)
    seed = fields.get("seed")
    if seed is None:
        return with_field(content, "seed", secrets.randbelow(MAX_SEED)), answers
    if bytes(seed).strip() == b"null":
        fields["seed"] = msgspec.Raw(b"%d" % secrets.randbelow(MAX_SEED))
        return msgspec.json.encode(fields), answers
    return content, answers


def with_field(content: bytes, name: str, value: Any) -> bytes:
    """The JSON object with one more field in front; every byte of the others stays."""
    start = content.index(b"{") + 1
    rest = content[start:]
    separator = b"" if rest.lstrip().startswith(b"}") else b","
    return b'%s"%s":%s%s%s' % (content[:start], name.encode(), msgspec.json.encode(value), separator, rest)


def _number_of_answers(fields: dict[str, msgspec.Raw]) -> int:
    """For each prompt `n`."""
    try:
        n = msgspec.json.decode(fields["n"], type=int | None) if "n" in fields else None
    except msgspec.DecodeError:
        return 0
    prompts = 1
    if "prompt" in fields and bytes(fields["prompt"]).lstrip().startswith(b"["):
        prompt = msgspec.json.decode(fields["prompt"], type=list[Any])
        prompts = 1 if prompt and isinstance(prompt[0], int) else len(prompt)
    answers = (1 if n is None else n) * prompts
    return answers if 0 < answers <= MAX_ANSWERS else 0
