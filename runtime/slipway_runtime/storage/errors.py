"""Why a model cannot be had. Each message is one sentence for the user: with the host, never with a secret.

FetchError
├── ModelNotFoundError   nothing is there: waiting brings nothing
├── AccessDeniedError    credentials are missing or refused
├── UnreachableError     the source does not answer, after several tries
├── OutOfSpaceError      the disk, or the cache's limit
└── BrokenFileError      a checksum does not match
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

_T = TypeVar("_T")


class FetchError(Exception):
    """The model cannot be had; the message is a sentence for the user."""


class ModelNotFoundError(FetchError):
    """Nothing is at this address, and waiting will not bring it: somebody has to write another, or give access."""


class AccessDeniedError(FetchError):
    """The source asks for credentials, or refuses those it got."""


class UnreachableError(FetchError):
    """The source does not answer; it may be back in a minute."""


class OutOfSpaceError(FetchError):
    """The files do not fit on the disk, or into the cache's limit."""


class BrokenFileError(FetchError):
    """A file is not what its source says it is."""


class Interrupted(Exception):  # noqa: N818  it says what it is
    """A try that may succeed next time; inside of this folder only."""

    def __init__(self, reason: str, retry_after: float = 0.0) -> None:
        super().__init__(reason)
        self.retry_after = retry_after


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How often a source is asked again, and how long to wait in between: 0.5, 1, 2 … seconds, or as it says."""

    attempts: int = 6
    first_delay: float = 0.5
    longest_delay: float = 30.0

    def delay(self, attempt: int, retry_after: float) -> float:
        """Seconds before the next try, after `attempt` failed ones."""
        return min(self.longest_delay, max(self.first_delay * 2.0 ** (attempt - 1), retry_after))

    def ask(self, question: Callable[[], _T], where: str, sleep: Callable[[float], object]) -> _T:
        """The answer, or UnreachableError once patience has ended."""
        for attempt in range(1, self.attempts + 1):
            try:
                return question()
            except Interrupted as interrupted:
                if attempt == self.attempts:
                    raise UnreachableError(f"{where} does not answer: {interrupted}, {attempt} times") from interrupted
                sleep(self.delay(attempt, interrupted.retry_after))
        raise AssertionError("patience has at least one attempt")
