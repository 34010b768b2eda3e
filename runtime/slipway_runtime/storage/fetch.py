"""From a model's address to a directory with its files, checked.

| address                      | where the files come from                                          |
|------------------------------|--------------------------------------------------------------------|
| `file:///path`               | that directory, as it is                                           |
| `hf://organisation/name@rev` | the hub (or `HF_ENDPOINT`), into the cache: resumed, checksummed   |

Only weights as safetensors, JSON files and chat templates are brought: nothing that runs code on loading.
The digest of weights is `sha256:` and the SHA-256 of `model.safetensors`; where there are several files, that of what
`sha256sum *.safetensors` prints for them.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from slipway_runtime.storage.cache import hub_directory, is_verified, only_one, remember_verified

WEIGHTS: Final = ("*.safetensors",)
TOKENIZER: Final = ("*.json", "*.jinja")


class FetchError(Exception):
    """The model cannot be had; the message is a sentence for the user."""


class ModelNotFoundError(FetchError):
    """Nothing is at this address, and waiting will not bring it: somebody has to write another, or give access."""


@dataclass(frozen=True)
class LocalModel:
    """`file://`: a directory that is there."""

    path: Path


@dataclass(frozen=True)
class HubModel:
    """`hf://`: a repository on the hub, at one revision."""

    repository: str
    revision: str | None  # None: the newest, which may change under a running service


def parse(uri: str) -> LocalModel | HubModel:
    """What an address means; raises FetchError where it means nothing."""
    parts = urlsplit(uri)
    if uri and not parts.scheme:
        return LocalModel(Path(uri).resolve())  # as people type it: slipway-runtime serve models/tiny
    if parts.scheme == "file":
        if parts.netloc not in {"", "localhost"} or not parts.path.startswith("/"):
            raise FetchError(f"{uri} is no local path: write file:///absolute/path")
        return LocalModel(Path(unquote(parts.path)))
    if parts.scheme == "hf":
        repository, _, revision = uri.removeprefix("hf://").partition("@")
        if repository.count("/") != 1 or not all(repository.split("/")):
            raise FetchError(f"{uri} is no repository: write hf://organisation/name@revision")
        return HubModel(repository, revision or None)
    raise FetchError(f"{uri} has an unknown scheme: file:// and hf:// are supported")


def fetch(uri: str, *, cache: Path, weights: bool = True, endpoint: str | None = None) -> Path:
    """Bring what the address names, and return the directory it is in. Blocks; safe to repeat and to interrupt."""
    match parse(uri):
        case LocalModel(path):
            if not path.is_dir():
                raise ModelNotFoundError(f"{uri}: there is no directory {path}")
            return path
        case HubModel() as model:
            with only_one(cache, uri):
                return _from_hub(model, cache, weights=weights, endpoint=endpoint)


def _from_hub(model: HubModel, cache: Path, *, weights: bool, endpoint: str | None) -> Path:
    # Only here: the library costs a quarter of the start, and a model of this machine needs none of it.
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()  # stderr carries JSON lines
    name = f"hf://{model.repository}" + (f"@{model.revision}" if model.revision else "")
    hub = HfApi(endpoint=endpoint)
    try:
        # The hub's library resumes what was interrupted, and goes without the network when everything is there.
        # Files in folders of a repository are other formats of the same weights.
        directory = Path(
            hub.snapshot_download(
                model.repository,
                revision=model.revision,
                cache_dir=hub_directory(cache),
                allow_patterns=[*TOKENIZER, *(WEIGHTS if weights else ())],
                ignore_patterns=["*/*"],
            )
        )
        if not is_verified(cache, directory):
            found = hub.verify_repo_checksums(model.repository, revision=directory.name, cache_dir=hub_directory(cache))
            for broken in found.mismatches:
                (directory / broken["path"]).resolve().unlink()  # what the link points at, so that it is fetched again
            if found.mismatches:
                names = ", ".join(broken["path"] for broken in found.mismatches)
                raise FetchError(f"{name}: {names} arrived broken and was removed; it will be fetched again")
            if weights:
                remember_verified(cache, directory)
    except GatedRepoError as error:
        raise FetchError(f"{name} asks for credentials, or for its terms to be accepted") from error
    except RepositoryNotFoundError as error:
        raise ModelNotFoundError(f"{name} does not exist, or is not visible without credentials") from error
    except RevisionNotFoundError as error:
        raise ModelNotFoundError(f"{name}: there is no such revision") from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise FetchError(f"{name} could not be fetched: {type(error).__name__}") from error
    if weights and not any(directory.glob("*.safetensors")):
        raise FetchError(f"{name} has no *.safetensors: pickled weights are not loaded, because they can run code")
    return directory


def weights_digest(directory: Path) -> str:
    """`sha256:…` of the weights, as the module says. Reads all of them."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise FetchError(f"{directory} has no *.safetensors")
    sums = [(_sha256(file), file.name) for file in files]
    if len(sums) == 1:
        return f"sha256:{sums[0][0]}"
    listing = "".join(f"{digest}  {name}\n" for digest, name in sums)
    return f"sha256:{hashlib.sha256(listing.encode()).hexdigest()}"


def check_digest(directory: Path, expected: str) -> None:
    """Refuse weights that are not those the service was made for."""
    found = weights_digest(directory)
    if found != expected.lower():
        raise FetchError(f"the weights have the digest {found}, the service was made for {expected}: refusing to start")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
