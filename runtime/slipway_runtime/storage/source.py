"""The interface of a source of files, its errors and retries, and the choice of the files that make a model.

Only safetensors weights, JSON files and chat templates are fetched: no format that runs code when it is loaded.

Each message of an error is one sentence for the user: with the host, never with a secret.

    FetchError
    ├── ModelNotFoundError   the address has no model: a retry cannot help
    ├── AccessDeniedError    credentials are missing or refused
    ├── UnreachableError     the source does not answer, after several tries
    ├── OutOfSpaceError      the disk, or the cache's limit
    └── BrokenFileError      a checksum does not match
"""

import json
import re
import socket
import ssl
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Final, Protocol, TypeVar

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


def describe_silence(host: str, error: BaseException) -> str:
    """`huggingface.co: its name cannot be resolved (DNS)`: the host and the cause below the library's error."""
    chain: list[BaseException] = []
    seen: BaseException | None = error
    while seen is not None and seen not in chain:
        chain.append(seen)
        seen = seen.__cause__ or seen.__context__
    for one in chain:
        if isinstance(one, socket.gaierror):
            return f"{host}: its name cannot be resolved (DNS)"
        if isinstance(one, ssl.SSLError):
            return f"{host}: TLS fails ({type(one).__name__}: {str(one)[:200]})"
        if isinstance(one, ConnectionRefusedError):
            return f"{host}: the connection is refused"
        if isinstance(one, TimeoutError) or "Timeout" in type(one).__name__:
            return f"{host}: no answer in time"
    return f"{host}: {type(error).__name__}"


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


INDEX: Final = "model.safetensors.index.json"
SUMS: Final = "SHA256SUMS"  # in the format of sha256sum(1); where a folder has one, its files are checked against it
MOST_INDEX_BYTES: Final = 16 << 20
_WEIGHTS: Final = "*.safetensors"
_BESIDE: Final = ("*.json", "*.jinja")
_PICKLES: Final = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle")
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+=-]{0,200}")


@dataclass(frozen=True, slots=True)
class Checksum:
    """The expected digest of a file's content. `git`: SHA-1 over `blob <size>\\0` and the content."""

    algorithm: str  # sha256 | git
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """One file at its source."""

    name: str
    size: int
    location: str  # URL or object key
    version: str = ""  # ETag or time; empty: the source does not say
    checksum: Checksum | None = None
    in_parts: bool = True  # the source can read from the middle

    @property
    def identity(self) -> str:
        """Files of the same identity have the same content, as far as can be known without reading them."""
        if self.checksum:
            return f"{self.checksum.algorithm}:{self.checksum.digest}"
        return f"{self.location} {self.version}"


class Source(Protocol):
    """A source of files. Its errors are FetchErrors, or Interrupted where another try may help."""

    name: str  # for error messages

    def listing(self) -> dict[str, RemoteFile]:
        """All files, by name."""

    def about(self, names: Collection[str]) -> dict[str, RemoteFile]:
        """Those of the named files that exist, by name."""

    def read(self, file: RemoteFile, start: int, end: int) -> Iterator[bytes]:
        """The bytes `start` to `end`, exclusive, of a file."""

    def close(self) -> None:
        """Close the connections."""


def choose(source: Source, *, weights: bool) -> list[RemoteFile]:
    """The files that make the model: the shards that the index names, or all safetensors; and the files beside them.

    Repositories often hold the same weights twice, as shards with an index and in another layout: the index decides.
    """
    found = source.listing()
    chosen = {name: file for name, file in found.items() if any(fnmatch(name, kind) for kind in _BESIDE)}
    if weights:
        if INDEX in found:
            shards = index_shards(read_whole(source, found[INDEX]))
            known = source.about(shards)
            if missing := sorted(shards - known.keys()):
                raise ModelNotFoundError(f"{source.name}: the index names {missing[0]}, which is not there")
            chosen |= known
        else:
            chosen.pop(INDEX, None)
            chosen |= {name: file for name, file in found.items() if fnmatch(name, _WEIGHTS)}
        if not any(fnmatch(name, _WEIGHTS) for name in chosen):
            if any(fnmatch(name, kind) for name in found for kind in _PICKLES):
                raise FetchError(
                    f"{source.name} has no *.safetensors: pickled weights are not loaded, because they can run code"
                )
            raise ModelNotFoundError(f"{source.name} has no *.safetensors")
    for name in chosen:
        check_name(name, source.name)
    return [chosen[name] for name in sorted(chosen)]


def index_shards(raw: bytes) -> set[str]:
    """The files that an index of shards names."""
    try:
        shards = set(json.loads(raw)["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise FetchError(f"{INDEX} is not an index of shards") from error
    for shard in shards:
        if not isinstance(shard, str) or not fnmatch(shard, _WEIGHTS):
            raise FetchError(f"{INDEX} names a file that is no *.safetensors")
        check_name(shard, INDEX)
    return shards


def check_name(name: str, where: str) -> None:
    """Refuse a file name that leads out of its folder or is hidden."""
    if not _NAME.fullmatch(name):
        raise FetchError(f"{where} has a file with a name that leads elsewhere: {name[:60]!r}")


def read_whole(source: Source, file: RemoteFile) -> bytes:
    """Read a small file into memory."""
    if file.size > MOST_INDEX_BYTES:
        raise FetchError(f"{source.name}: {file.name} has {file.size} bytes, which is not a list of files")
    raw = b"".join(source.read(file, 0, file.size))
    if len(raw) != file.size:
        raise BrokenFileError(f"{source.name}: {file.name} has {file.size} bytes, and {len(raw)} came")
    return raw


def parse_sums(raw: bytes) -> dict[str, Checksum]:
    """Parse `SHA256SUMS` into checksums by file name; each line is a digest, two characters and a name."""
    sums: dict[str, Checksum] = {}
    for line in raw.decode(errors="replace").splitlines():
        digest, _, name = line.partition(" ")
        if re.fullmatch(r"[0-9a-fA-F]{64}", digest):
            sums[name.lstrip(" *").removeprefix("./")] = Checksum("sha256", digest.lower())
    return sums
