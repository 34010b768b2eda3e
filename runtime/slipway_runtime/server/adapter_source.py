"""Fetches the files of a LoRA adapter from its address, computes their digest, and releases them in the cache.

| address                                      | where the files are                                             |
|----------------------------------------------|-----------------------------------------------------------------|
| `file:///path`, `/path`                      | at that path, which must be inside one of the roots             |
| `hf://`, `s3://`, `http(s)://`, `pvc://`     | in the node's cache, not evicted before `release` |
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from slipway_api.adapter_conditions import AdapterReason
from slipway_runtime.models.adapter_files import AdapterNotFoundError, AdapterRefusedError, adapter_digest
from slipway_runtime.server.errors import ApiError
from slipway_runtime.storage.errors import AccessDeniedError, FetchError

SCHEMES: Final = ("hf", "s3", "http", "https", "pvc")  # beside file:// and plain paths


@dataclass(frozen=True)
class Brought:
    """An adapter's files on this machine."""

    path: Path
    digest: str
    is_fetched: bool


class AdapterSource:
    """Fetches adapters; its methods block, and are safe to call from any thread."""

    def __init__(
        self,
        fetch: Callable[[str, bool, Mapping[str, str]], Path],
        release: Callable[[Path], None],
        *,
        roots: Sequence[Path] = (),
    ) -> None:
        """fetch: (address, whether a client named it, extra credentials) -> the folder, which stays until `release`.

        roots: the folders in which local adapters may be.
        """
        self._fetch = fetch
        self._release = release
        self._roots = tuple(roots)

    def bring(self, uri: str, *, from_client: bool = False, credentials: Mapping[str, str] | None = None) -> Brought:
        """Fetch the files and compute their digest; the caller releases each result once. Raises ApiError."""
        try:
            if "://" not in uri or uri.startswith("file://"):
                path = self._local(uri)
                return Brought(path, adapter_digest(path, self._roots), is_fetched=False)
            if uri.partition("://")[0] not in SCHEMES:
                known = ", ".join(f"{each}://" for each in ("file", *SCHEMES))
                raise ApiError(400, f"the address begins with none of {known}", param="lora_path")
            path = self._fetch(uri, from_client, credentials or {})
            try:
                return Brought(path, adapter_digest(path), is_fetched=True)
            except (AdapterRefusedError, OSError):
                self._release(path)
                raise
        except AdapterRefusedError as refusal:
            sentence = without_paths(str(refusal), Path(uri.removeprefix("file://")))
            is_missing = isinstance(refusal, AdapterNotFoundError)
            reason = AdapterReason.DOWNLOAD_FAILED if is_missing else AdapterReason.ENGINE_REJECTED
            raise ApiError(400, sentence, param="lora_path", reason=reason) from None
        except FetchError as error:
            denied = isinstance(error, AccessDeniedError)
            reason = AdapterReason.CREDENTIALS_INVALID if denied else AdapterReason.DOWNLOAD_FAILED
            sentence = f"no adapter can be had from this address ({type(error).__name__})"
            raise ApiError(404, sentence, reason=reason) from None
        except OSError:
            sentence = "there is no adapter at this path"
            raise ApiError(404, sentence, param="lora_path", reason=AdapterReason.DOWNLOAD_FAILED) from None

    def release(self, brought: Brought) -> None:
        """Release fetched files: the cache may evict them unless another adapter holds them."""
        if brought.is_fetched:
            self._release(brought.path)

    def _local(self, uri: str) -> Path:
        path = Path(uri.removeprefix("file://"))
        if not path.is_absolute() or "\0" in uri:
            raise ApiError(400, "the path of an adapter is absolute", param="lora_path")
        if not self._roots:
            raise ApiError(400, "this server loads no adapters from local paths", param="lora_path")
        return path


def adapter_roots(cache: Path, model: Path) -> tuple[Path, ...]:
    """The allowed folders of local adapters: the cache, the operator's mounts, and the parent folder of the model."""
    beside = (model.parent,) if model.parent != model.parent.parent else ()  # never `/`, the parent of `/model`
    return (cache, Path("/mnt/slipway"), *beside)


def without_paths(sentence: str, path: Path) -> str:
    """Remove local paths from an error message for a client."""
    for known in {str(path), str(path.resolve())} - {"/", "."}:
        sentence = sentence.replace(known, "it")
    return sentence
