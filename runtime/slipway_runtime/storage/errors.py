"""Errors of fetching a model. Each message is one sentence for the user: with the host, never with a secret.

FetchError
├── ModelNotFoundError   the address has no model: a retry cannot help
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
    """The model cannot be fetched; the message is a sentence for the user."""


class ModelNotFoundError(FetchError):
    """The address has no model, and a retry cannot help: the user must correct the address or give access."""


class AccessDeniedError(FetchError):
    """The source asks for credentials, or refuses the credentials that were sent."""


class UnreachableError(FetchError):
    """The source did not answer, after several tries; it may answer again in a minute."""


class OutOfSpaceError(FetchError):
    """The files do not fit on the disk, or into the cache's limit."""


class BrokenFileError(FetchError):
    """The checksum of a file does not match the one that its source gives."""


class Interrupted(Exception):  # noqa: N818  it says what it is
    """A failed read that may succeed when it is repeated; never leaves this package."""

    def __init__(self, reason: str, retry_after: float = 0.0) -> None:
        super().__init__(reason)
        self.retry_after = retry_after


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Retry policy for a source: number of tries, and delays of 0.5, 1, 2 … seconds or its longer Retry-After."""

    attempts: int = 6
    first_delay: float = 0.5
    longest_delay: float = 30.0

    def delay(self, attempt: int, retry_after: float) -> float:
        """Seconds before the next try, after `attempt` failed ones."""
        return min(self.longest_delay, max(self.first_delay * 2.0 ** (attempt - 1), retry_after))

    def call(self, operation: Callable[[], _T], where: str, sleep: Callable[[float], object]) -> _T:
        """The answer of `operation`; raises UnreachableError after the last try."""
        for attempt in range(1, self.attempts + 1):
            try:
                return operation()
            except Interrupted as interrupted:
                if attempt == self.attempts:
                    raise UnreachableError(f"{where} does not answer: {interrupted}, {attempt} times") from interrupted
                sleep(self.delay(attempt, interrupted.retry_after))
        raise AssertionError("a retry policy has at least one attempt")
