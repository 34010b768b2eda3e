"""`s3://bucket/prefix`: the objects directly under a prefix, on AWS or any store behind `AWS_ENDPOINT_URL`.

Without credentials in the environment the AWS credential chain is used (role of the pod, of the node), then anonymous
access, for public buckets. An object uploaded with a SHA-256, or named in `SHA256SUMS`, is checked.
"""

import base64
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar

from slipway_runtime.storage.address import Access, S3Model
from slipway_runtime.storage.source import (
    SUMS,
    AccessDeniedError,
    Checksum,
    FetchError,
    Interrupted,
    ModelNotFoundError,
    RemoteFile,
    describe_silence,
    parse_sums,
    read_whole,
)

PIECE: Final = 2 << 20  # bytes; a broken connection loses at most one piece, and a thread holds one in memory
_T = TypeVar("_T")


class S3Source:
    """Objects under a prefix."""

    def __init__(self, model: S3Model, access: Access) -> None:
        self.name = f"s3://{model.bucket}/{model.prefix}".rstrip("/")
        self._model = model
        self._access = access
        self._files: dict[str, RemoteFile] = {}
        self._store = self._connect(anonymous=access.anonymous)

    def _connect(self, *, anonymous: bool) -> Any:
        import s3fs  # only here: it costs half a second

        access = self._access
        return s3fs.S3FileSystem(
            anon=anonymous,
            key=None if anonymous else access.s3_key or None,
            secret=None if anonymous else access.s3_secret or None,
            token=None if anonymous else access.s3_session or None,
            endpoint_url=access.s3_endpoint or None,
            client_kwargs={"region_name": access.s3_region} if access.s3_region else {},
            config_kwargs={"connect_timeout": 10, "read_timeout": 60, "retries": {"max_attempts": 1}},
            skip_instance_cache=True,  # instances with equal arguments are shared, and so are their cached listings
            use_listings_cache=False,
        )

    def listing(self) -> dict[str, RemoteFile]:
        """The objects whose names have no further slash."""
        path = f"{self._model.bucket}/{self._model.prefix}".rstrip("/")
        try:
            entries = self._asked(lambda: self._store.ls(path, detail=True, refresh=True))
        except AccessDeniedError:
            if self._access.s3_key or self._access.anonymous:
                raise
            self._store = self._connect(anonymous=True)
            entries = self._asked(lambda: self._store.ls(path, detail=True, refresh=True))
        for entry in entries:
            name = str(entry["name"])[len(path) + 1 :]
            if entry["type"] == "file" and name:
                self._files[name] = RemoteFile(
                    name=name, size=int(entry["size"]), location=str(entry["name"]), version=str(entry.get("ETag", ""))
                )
        if not self._files:
            raise ModelNotFoundError(f"there is nothing directly under {self.name}")
        sums: dict[str, Checksum] = {}
        if listed := self._files.pop(SUMS, None):
            sums = parse_sums(read_whole(self, listed))
        for name, file in self._files.items():
            if checksum := sums.get(name) or self._stored_checksum(file):
                self._files[name] = replace(file, checksum=checksum)
        return self._files

    def about(self, names: Collection[str]) -> dict[str, RemoteFile]:
        """The named objects that exist."""
        return {name: self._files[name] for name in names if name in self._files}

    def read(self, file: RemoteFile, start: int, end: int) -> Iterator[bytes]:
        """A range of an object, piece by piece; raises an error when the object has changed."""
        bucket, _, key = file.location.partition("/")
        for first in range(start, end, PIECE):
            last = min(first + PIECE, end)
            yield self._asked(partial(self._piece, bucket, key, first, last, file.version))

    def close(self) -> None:
        """Does nothing: no connection stays open that would not close itself."""

    def _piece(self, bucket: str, key: str, start: int, end: int, version: str) -> bytes:
        matching = {"IfMatch": version} if version else {}
        answer = self._store.call_s3("get_object", Bucket=bucket, Key=key, Range=f"bytes={start}-{end - 1}", **matching)
        return bytes(self._read_body(answer["Body"]))

    def _read_body(self, body: Any) -> bytes:
        from fsspec.asyn import sync

        return bytes(sync(self._store.loop, body.read))

    def _stored_checksum(self, file: RemoteFile) -> Checksum | None:
        """The SHA-256 stored with the object; None for the composite checksum, with a dash, of a multipart upload."""
        bucket, _, key = file.location.partition("/")
        about = self._asked(lambda: self._store.call_s3("head_object", Bucket=bucket, Key=key, ChecksumMode="ENABLED"))
        encoded = str(about.get("ChecksumSHA256", ""))
        if not encoded or "-" in encoded:
            return None
        return Checksum("sha256", base64.b64decode(encoded).hex())

    def _asked(self, operation: Callable[[], _T]) -> _T:
        """The result of `operation`, with the library's exceptions translated to ours."""
        import aiohttp
        import botocore.exceptions as aws

        try:
            return operation()
        except FileNotFoundError as error:
            raise ModelNotFoundError(f"there is no {self.name}") from error
        except (PermissionError, aws.NoCredentialsError, aws.PartialCredentialsError) as error:
            raise AccessDeniedError(f"{self._host} refuses {self.name}: check the credentials") from error
        except aws.ClientError as error:
            raise self._told(error) from error
        except (aws.HTTPClientError, aws.BotoCoreError, aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Interrupted(describe_silence(self._host, error)) from error

    def _told(self, error: Any) -> Exception:
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        match status:
            case 401 | 403:
                return AccessDeniedError(f"{self._host} refuses {self.name}: check the credentials")
            case 404:
                return ModelNotFoundError(f"there is no {self.name}")
            case 412:
                return FetchError(f"{self.name}: an object was changed while it was fetched")
            case 408 | 429 | 500 | 502 | 503 | 504:
                return Interrupted(f"status {status}")
        return FetchError(f"{self._host} answers {status} for {self.name}")

    @property
    def _host(self) -> str:
        return self._access.s3_endpoint.partition("://")[2].rstrip("/") or "AWS S3"
