"""A load of greedy streams whose texts are compared with those of an undisturbed run.

The client shares no code with Slipway, and none with `bench`: it reads the bytes of the stream itself. It retries as
the stock client does (connection errors, 408, 409, 429 and 5xx, before the first byte of a stream), so that its count
of failures is a user's, and also counts failed first attempts, which retries hide.
"""

import asyncio
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import aiohttp

ANIMALS = ("fox", "bear", "duck", "horse")
PROMPTS = tuple(f"Tell me a long story about a {animal} and a lamp." for animal in ANIMALS)
LENGTHS = (16, 48, 96)  # tokens; some streams are short, some run through a whole fault
RETRIED_STATUSES = frozenset((408, 409, 429)) | frozenset(range(500, 600))
MAX_RETRIES = 4
LONGEST_PAUSE_SECONDS = 8.0  # the stock client caps its own pauses so
REQUEST_SECONDS = 150.0
CALM_KEY = "sk-chaos-calm"  # ignored unless tenants are configured

Question = tuple[str, str, int]  # model, prompt, tokens
References = Mapping[Question, str]


class Lost(Exception):  # noqa: N818  one attempt; the message is the class of the failure
    """An attempt ended with a failure that the client could see."""

    def __init__(self, reason: str, *, retried: bool, pause: float | None = None) -> None:
        super().__init__(reason)
        self.retried, self.pause = retried, pause


class CutSilently(Exception):  # noqa: N818
    """The stream ended as if it were complete, and was not."""


@dataclass
class Counts:
    """Counts of one fault: sent = finished + failed + wrong + cut, once the load has ended."""

    sent: int = 0
    finished: int = 0
    failed: int = 0  # after all retries
    failed_first: int = 0  # first attempts
    wrong: int = 0  # complete, with another text than the undisturbed one
    cut: int = 0  # ended without a finish reason, an error event or a broken connection
    slowest_seconds: float = 0.0
    first_byte_seconds: float = 0.0  # the longest wait for the first byte of an attempt's answer
    first_bytes: list[float] = field(default_factory=list)  # seconds, of attempts with an answer
    pause_seconds: float = 0.0  # the longest pause within an answer
    reasons: Counter[str] = field(default_factory=Counter)  # of failed attempts, the first ones and the others


async def stream_text(
    session: aiohttp.ClientSession, base_url: str, question: Question, counts: Counts | None = None
) -> str:
    """One attempt: the text of a whole greedy stream; raises Lost or CutSilently. Its waits are noted in `counts`."""
    model, prompt, tokens = question
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    sent = time.monotonic()
    try:
        async with session.post(f"{base_url}/chat/completions", json=body) as response:
            if response.status != 200:
                raise Lost(
                    f"status {response.status}",
                    retried=response.status in RETRIED_STATUSES,
                    pause=retry_after(response.headers),
                )
            try:
                return read_text(await read_timed(response, sent, counts or Counts()))
            except (aiohttp.ClientError, TimeoutError) as broken:
                raise Lost(f"in the stream: {type(broken).__name__}", retried=False) from broken
    except TimeoutError as late:
        raise Lost("no answer in time", retried=True) from late
    except aiohttp.ClientError as broken:
        raise Lost(type(broken).__name__, retried=True) from broken


async def read_timed(response: aiohttp.ClientResponse, sent: float, counts: Counts) -> bytes:
    """The whole body; the longest waits, also one that ends with an error, are noted in `counts`."""
    body, last = b"", sent
    try:
        async for piece in response.content.iter_any():
            note_wait(counts, not body, time.monotonic() - last)
            last = time.monotonic()
            body += piece
    except (aiohttp.ClientError, TimeoutError):
        note_wait(counts, not body, time.monotonic() - last)
        raise
    return body


def note_wait(counts: Counts, is_first: bool, seconds: float) -> None:
    """Keep the longest wait of its kind."""
    if is_first:
        counts.first_byte_seconds = max(counts.first_byte_seconds, seconds)
        counts.first_bytes.append(seconds)
    else:
        counts.pause_seconds = max(counts.pause_seconds, seconds)


def read_text(body: bytes) -> str:
    """The text of a complete event stream; raises Lost for an error event, CutSilently for a missing end."""
    text, reason, done = "", None, False
    for event in body.split(b"\n\n"):
        if not event.startswith(b"data: "):
            continue
        if event == b"data: [DONE]":
            done = True
            continue
        decoded = json.loads(event[6:])
        if error := decoded.get("error"):
            raise Lost(f"error event: {error.get('type')}", retried=False)
        for choice in decoded.get("choices", []):
            text += choice["delta"].get("content") or ""
            reason = choice.get("finish_reason") or reason
    if not done or not reason:
        raise CutSilently
    return text


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that the server asks to wait; None where it does not say."""
    for header, unit in (("retry-after-ms", 1000), ("Retry-After", 1)):
        try:
            return float(headers[header]) / unit
        except (KeyError, ValueError):
            continue
    return None


async def learn_references(base_url: str, models: list[str]) -> dict[Question, str]:
    """Ask every question twice while nothing is broken; raises when the two texts differ."""
    references: dict[Question, str] = {}
    async with new_session() as session:
        for model in models:
            for prompt in PROMPTS:
                for tokens in LENGTHS:
                    question = (model, prompt, tokens)
                    first, second = await asyncio.gather(*(stream_text(session, base_url, question) for _ in range(2)))
                    if not first or first != second:
                        raise AssertionError(f"the undisturbed texts differ: {first!r} and {second!r}")
                    references[question] = first
    return references


def new_session(*, reuse: bool = True) -> aiohttp.ClientSession:
    """A session; without `reuse` every request has a connection of its own."""
    timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS, sock_connect=10)
    connector = aiohttp.TCPConnector(limit=0, force_close=not reuse)
    return aiohttp.ClientSession(connector=connector, timeout=timeout, headers={"Authorization": f"Bearer {CALM_KEY}"})


class Load:
    """Users that ask again and again, in a thread of their own, until they are stopped."""

    def __init__(self, base_url: str, references: References, users: int, seed: int) -> None:
        self.counts = Counts()
        self._base_url, self._references, self._users, self._seed = base_url, references, users, seed
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> Counts:
        """Send no more, wait for what runs, and return the counts."""
        self._stop.set()
        self._thread.join(timeout=(MAX_RETRIES + 1) * REQUEST_SECONDS)
        if self._error is not None:
            raise self._error
        assert not self._thread.is_alive(), "the load did not end"
        return self.counts

    def _run(self) -> None:
        async def main() -> None:
            await asyncio.gather(*(self._user(number) for number in range(self._users)))

        try:
            asyncio.run(main())
        except BaseException as error:  # noqa: BLE001  raised again by `stop`
            self._error = error

    async def _user(self, number: int) -> None:
        draw = random.Random(f"{self._seed}/{number}")
        questions = sorted(self._references)
        async with new_session(reuse=number % 2 == 0) as session:
            while not self._stop.is_set():
                await self._ask(session, draw.choice(questions), draw)
                await asyncio.sleep(draw.uniform(0.05, 0.2))

    async def _ask(self, session: aiohttp.ClientSession, question: Question, draw: random.Random) -> None:
        self.counts.sent += 1
        began = time.monotonic()
        for attempt in range(MAX_RETRIES + 1):
            try:
                text = await stream_text(session, self._base_url, question, self.counts)
            except CutSilently:
                self.counts.cut += 1
                break
            except Lost as lost:
                self.counts.failed_first += attempt == 0
                self.counts.reasons[str(lost)] += 1
                if not lost.retried or attempt == MAX_RETRIES:
                    self.counts.failed += 1
                    break
                pause = min(LONGEST_PAUSE_SECONDS, 0.5 * 2**attempt) * draw.uniform(0.75, 1.0)
                asked = lost.pause if lost.pause is not None and lost.pause <= 60 else None
                await asyncio.sleep(pause if asked is None else asked)
            else:
                if text == self._references[question]:
                    self.counts.finished += 1
                else:
                    self.counts.wrong += 1
                    self.counts.reasons["wrong text"] += 1
                break
        self.counts.slowest_seconds = max(self.counts.slowest_seconds, time.monotonic() - began)
