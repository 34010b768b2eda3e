"""`hf://organisation/name@revision`: a repository on the hub. Large files have their SHA-256 there, small ones git's.

`huggingface_hub` finds the repository, its commit and its files, and builds URLs and headers; the files are downloaded
like those of every other source, so that resuming, checking and the cache are the same for all.
"""

from collections.abc import Collection, Iterator
from typing import Any, Final
from urllib.parse import urlsplit

from slipway_runtime.storage.address import HubModel
from slipway_runtime.storage.source import (
    AccessDeniedError,
    Checksum,
    FetchError,
    Interrupted,
    ModelNotFoundError,
    RemoteFile,
    describe_silence,
)
from slipway_runtime.storage.web import Web

# The pooling of an embedding model, and the chat template for requests with tools; stored under names without a folder,
# because the cache stores no subfolders.
_KEPT_FROM_FOLDERS: Final = {
    "1_Pooling/config.json": "1_Pooling.config.json",
    "additional_chat_templates/tool_use.jinja": "additional_chat_templates.tool_use.jinja",
}


class HubSource:
    """One revision of a repository."""

    def __init__(self, model: HubModel, endpoint: str, token: str, *, anonymous: bool = False) -> None:
        """anonymous: send no token, not even that of a login on this machine."""
        # Imported here: the library costs a quarter of the start, and a local model does not need it.
        from huggingface_hub import constants
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # public, by its manual

        self.name = f"hf://{model.repository}" + (f"@{model.revision}" if model.revision else "")
        self._model = model
        self._endpoint = endpoint or constants.ENDPOINT
        # None: the token of a login on this machine, if it has one.
        self._token: str | bool | None = False if anonymous else token or None
        self._web = Web(build_hf_headers(token=self._token))
        self._files: dict[str, RemoteFile] = {}

    def listing(self) -> dict[str, RemoteFile]:
        """The files at the top of the repository; its folders hold other formats of the same weights."""
        from huggingface_hub import HfApi, hf_hub_url

        info = self._asked(
            lambda: HfApi(endpoint=self._endpoint, token=self._token).model_info(
                self._model.repository, revision=self._model.revision, files_metadata=True, timeout=30
            )
        )
        for file in info.siblings or ():
            name = _KEPT_FROM_FOLDERS.get(file.rfilename, file.rfilename)
            if "/" in name or file.size is None:
                continue
            checksum = Checksum("git", file.blob_id) if file.blob_id else None
            if file.lfs is not None:
                checksum = Checksum("sha256", file.lfs.sha256)
            self._files[name] = RemoteFile(
                name=name,
                size=file.size,
                location=hf_hub_url(self._model.repository, file.rfilename, revision=info.sha, endpoint=self._endpoint),
                version=info.sha or "",
                checksum=checksum,
            )
        return self._files

    def about(self, names: Collection[str]) -> dict[str, RemoteFile]:
        """The named files that are in the repository."""
        return {name: self._files[name] for name in names if name in self._files}

    def read(self, file: RemoteFile, start: int, end: int) -> Iterator[bytes]:
        """A range of a file of this commit."""
        return self._web.read(file.location, start, end)

    def close(self) -> None:
        """Close all connections."""
        self._web.close()

    def _asked(self, operation: Any) -> Any:
        """The result of `operation`, with the library's exceptions translated to ours."""
        from huggingface_hub import errors

        try:
            return operation()
        except errors.GatedRepoError as error:
            raise AccessDeniedError(f"{self.name} asks for credentials, or for its terms to be accepted") from error
        except errors.RepositoryNotFoundError as error:
            raise ModelNotFoundError(f"{self.name} does not exist, or is not visible without credentials") from error
        except errors.RevisionNotFoundError as error:
            raise ModelNotFoundError(f"{self.name}: there is no such revision") from error
        except errors.HFValidationError as error:
            raise FetchError(f"{self.name} is not a name that a repository can have") from error
        except errors.HfHubHTTPError as error:
            status = error.response.status_code
            if status in {401, 403}:
                raise AccessDeniedError(f"{self.name} is refused with status {status}: check the token") from error
            if status < 500 and status not in {408, 429}:
                raise FetchError(f"{urlsplit(self._endpoint).netloc} answers {status} for {self.name}") from error
            raise Interrupted(f"status {status}") from error
        except (errors.HTTPError, OSError) as error:  # type: ignore[attr-defined]  # of the HTTP library it uses
            raise Interrupted(describe_silence(urlsplit(self._endpoint).netloc, error)) from error
