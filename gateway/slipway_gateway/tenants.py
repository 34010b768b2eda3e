"""Tenants and their API keys: read from mounted files, checked whole, and read again when they change.

The ConfigMap has one file, `tenants.yaml`; the Secret has one file for each key, with the SHA-256 of the key, one a
line (two while a key is being replaced). Keys themselves are stored nowhere and never logged.

    tenants:
    - name: research
      keys: [research-laptops, research-batch]
      models: [chat, team-a/*]
      requestsPerMinute: 600
      tokensPerMinute: 200000
      concurrency: 32
      priority: 0
      maxTokens: 4096
      defaultMaxTokens: 512
      maxBodyBytes: 1048576

A file that cannot be read or that breaks a rule changes nothing: what was read last stays valid.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final

import structlog
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.alias_generators import to_camel

log = structlog.get_logger()

TENANTS_FILE: Final = "tenants.yaml"
MAX_KEY_CHARACTERS: Final = 512
CHECK_SECONDS: Final = 1.0  # between two looks at the files

_DIGEST: Final = re.compile(r"(?:sha256:)?([0-9a-f]{64})")
_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$")]
_Positive = Annotated[int, Field(ge=1, le=10**12)]


class Tenant(BaseModel):
    """A group of callers that share limits. A limit that is absent is none."""

    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel, populate_by_name=True)

    name: _Name | None = None  # None: no tenants are configured, and anyone may call
    keys: tuple[_Name, ...] = ()
    """Names of files of the Secret."""
    models: tuple[str, ...] = ()
    """Patterns of what it may use: with a slash, of `<namespace>/<name>` of a service or an adapter, else of the name
    that a client sends. `*` is everything."""
    requests_per_minute: _Positive | None = None
    tokens_per_minute: _Positive | None = None
    """Of prompts and answers."""
    concurrency: _Positive | None = None
    """Requests open at once."""
    priority: int = Field(default=0, ge=-1000, le=1000)
    """Higher goes first in the runtime's queue."""
    max_tokens: _Positive | None = None
    """The most that a request may ask for; more is refused."""
    default_max_tokens: _Positive | None = None
    """Where a request asks for no number."""
    max_body_bytes: _Positive | None = None

    @model_validator(mode="after")
    def _check_default(self) -> "Tenant":
        if self.max_tokens and self.default_max_tokens and self.default_max_tokens > self.max_tokens:
            raise ValueError("defaultMaxTokens must not be above maxTokens")
        return self

    @property
    def label(self) -> str:
        """Its name in logs, metrics and headers; empty for anyone."""
        return self.name or ""

    def may_use(self, model: str, full_name: str) -> bool:
        """Whether it may use the object `full_name` (`<namespace>/<name>`) that answers to `model`.

        A pattern with a slash is matched with the object alone: the text of a client names no namespace that counts.
        """
        return any(
            pattern == "*"
            or (fnmatchcase(full_name, pattern) if "/" in pattern else "/" not in model and fnmatchcase(model, pattern))
            for pattern in self.models
        )


ANYONE: Final = Tenant(models=("*",))


class _Document(BaseModel):
    """The whole file."""

    model_config = ConfigDict(extra="forbid")

    tenants: tuple[Tenant, ...]


class TenantsError(ValueError):
    """The files break a rule; the message names the place."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The tenant that a request's key belongs to, and the name of the key."""

    tenant: Tenant
    key: str = ""


@dataclass(frozen=True, slots=True)
class Directory:
    """All tenants, found by the digest of a key."""

    callers: Mapping[str, Caller] = field(default_factory=dict)
    tenants: tuple[Tenant, ...] = ()
    unclaimed: frozenset[str] = frozenset()  # digests of keys that no tenant names
    missing: tuple[str, ...] = ()  # tenants with a key that the Secret does not have

    @property
    def names(self) -> frozenset[str]:
        """The labels of all tenants."""
        return frozenset(tenant.label for tenant in self.tenants)


def build(document: str, keys: Mapping[str, str]) -> Directory:
    """The directory that the text of the file and the texts of the keys describe; raises TenantsError."""
    tenants = _parse(document)
    digests = {name: _digests(name, text) for name, text in keys.items()}
    owner: dict[str, Tenant] = {}
    for tenant in tenants:
        for key in tenant.keys:
            if other := owner.get(key):
                raise TenantsError(f"the key {key!r} belongs to both {other.label!r} and {tenant.label!r}")
            owner[key] = tenant
    callers: dict[str, Caller] = {}
    unclaimed: set[str] = set()
    for key, lines in digests.items():
        for digest in lines:
            if digest in unclaimed or (digest in callers and callers[digest].key != key):
                raise TenantsError(f"the key {key!r} has the same digest as another one")
            if key in owner:
                callers[digest] = Caller(owner[key], key)
            else:
                unclaimed.add(digest)
    missing = tuple(sorted({tenant.label for key, tenant in owner.items() if key not in digests}))
    return Directory(MappingProxyType(callers), tenants, frozenset(unclaimed), missing)


def _parse(document: str) -> tuple[Tenant, ...]:
    try:
        loaded = yaml.safe_load(document)
        tenants = _Document.model_validate(loaded).tenants
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)  # the error's own text repeats the line, which may hold a key
        place = f" in line {mark.line + 1}" if mark is not None else ""
        raise TenantsError(f"{TENANTS_FILE} is not YAML{place}") from None
    except ValidationError as error:
        # The input is not repeated: a plain key pasted into the wrong place must not reach the log.
        faults = (
            f"{'.'.join(str(part) for part in one['loc'])}: {one['msg']}"
            for one in error.errors(include_url=False, include_input=False)
        )
        raise TenantsError(f"{TENANTS_FILE}: {'; '.join(faults)}") from None
    seen: set[str] = set()
    for tenant in tenants:
        if tenant.name is None:
            raise TenantsError(f"{TENANTS_FILE}: every tenant needs a name")
        if tenant.label in seen:
            raise TenantsError(f"{TENANTS_FILE}: there are two tenants {tenant.label!r}")
        seen.add(tenant.label)
    return tenants


def _digests(key: str, text: str) -> list[str]:
    """The digests of one key's file, never repeated in an error: a plain key may stand there by mistake."""
    lines = [line.strip() for line in text.splitlines()]
    found = []
    for number, line in enumerate(lines, 1):
        if not line or line.startswith("#"):
            continue
        match = _DIGEST.fullmatch(line)
        if match is None:
            raise TenantsError(f"line {number} of the key {key!r} is not a SHA-256 in hex (printf %s KEY | sha256sum)")
        found.append(match[1])
    return found


class TenantFiles:
    """The directory as the mounted files have it now; the last good one while they are wrong or away."""

    def __init__(self, file: Path, keys_directory: Path) -> None:
        self._file = file
        self._keys_directory = keys_directory
        self._checked_at = float("-inf")
        self._stamps: Any = None
        self.directory: Directory | None = None  # None: there has never been a good one
        self.fault = "the tenants have not been read yet"  # "": the files are good
        self.reloads = 0

    def refresh(self, now: float) -> Directory | None:
        """The directory, read anew if the files have changed. Looks at them once a second."""
        if now - self._checked_at >= CHECK_SECONDS:
            self._checked_at = now
            stamps = self._read_stamps()
            if stamps != self._stamps:
                self._stamps = stamps
                self._reload()
        return self.directory

    def _read_stamps(self) -> Any:
        """A value that changes whenever a file does: the kubelet replaces the directory behind a link."""
        return [(path.name, _stamp(path)) for path in (self._file, *self._key_files())]

    def _key_files(self) -> list[Path]:
        try:
            files = (path for path in self._keys_directory.iterdir() if not path.name.startswith("."))
            return sorted(path for path in files if path.is_file())
        except OSError:
            return []

    def _reload(self) -> None:
        try:
            if not self._keys_directory.is_dir():
                raise TenantsError(f"there is no directory {self._keys_directory}")
            keys = {path.name: path.read_text() for path in self._key_files()}
            directory = build(self._file.read_text(), keys)
        except (OSError, UnicodeDecodeError) as error:
            self._reject(f"cannot be read: {type(error).__name__}: {getattr(error, 'strerror', None) or 'no text'}")
        except TenantsError as error:
            self._reject(str(error))
        else:
            self.directory, self.fault = directory, ""
            self.reloads += 1
            log.info("tenants read", tenants=len(directory.tenants), keys=len(directory.callers))
            if directory.missing:
                # Only the tenants: what a tenant calls its key may be the key itself, pasted by mistake.
                log.warning("the Secret lacks keys of some tenants", tenants=list(directory.missing))

    def _reject(self, fault: str) -> None:
        self.fault = fault
        kept = "the last good ones stay valid" if self.directory else "every request is refused until this is fixed"
        log.error("the files of the tenants are not valid", fault=fault, consequence=kept)


def digest_of(key: str) -> str:
    """The SHA-256 of a key, as the Secret has it."""
    return sha256(key.encode(errors="replace")).hexdigest()


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return (status.st_ino, status.st_mtime_ns, status.st_size)
