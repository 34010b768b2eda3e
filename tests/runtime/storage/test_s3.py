"""A prefix of a bucket becomes a model's directory, against a real S3 API server in a process of its own."""

import base64
import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import httpx
import numpy as np
import pytest

from slipway_runtime.storage.fetch import (
    Access,
    AccessDeniedError,
    FetchError,
    ModelNotFoundError,
    RetryPolicy,
    UnreachableError,
    fetch,
)
from slipway_runtime.storage.source import BrokenFileError
from tests.runtime.storage.wire import a_wire

ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "hunter2", "AWS_REGION": "eu-central-1"}
WEIGHTS = np.arange(1 << 20, dtype=">u8").tobytes()  # 8 MiB, no two pieces of it alike
ONCE = RetryPolicy(attempts=2, first_delay=0, longest_delay=0)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """moto, as its package starts it."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"],
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment,
    )  # fmt: skip
    assert server.stderr is not None
    for line in server.stderr:
        if found := re.search(r"http://127\.0\.0\.1:(\d+)", line):
            break
    else:
        raise AssertionError("the S3 server did not start")
    drain = server.stderr  # what it logs of requests fits its pipe: a few lines a test
    assert drain is not None
    yield int(found[1])
    server.kill()
    server.wait()


@pytest.fixture
def store(port: int) -> Iterator[Any]:
    httpx.post(f"http://127.0.0.1:{port}/moto-api/reset")
    client = boto3.client(
        "s3", endpoint_url=f"http://127.0.0.1:{port}", region_name="us-east-1", aws_access_key_id="key",
        aws_secret_access_key="hunter2",
    )  # fmt: skip
    client.create_bucket(Bucket="models")
    for name, content in {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": WEIGHTS,
                          "pytorch_model.bin": b"a pickle", "original/x.safetensors": b"a copy"}.items():  # fmt: skip
        client.put_object(Bucket="models", Key=f"team/tiny/{name}", Body=content)
    yield client
    httpx.post(f"http://127.0.0.1:{port}/moto-api/reset-auth", content=b"1000000")


def access(port: int, **other: str) -> Access:
    return Access.of({**ENVIRONMENT, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", **other})


@pytest.mark.capability("ST-1", "ST-2")
def test_the_objects_under_a_prefix_are_a_model(store: Any, port: int, tmp_path: Path):
    directory = fetch("s3://models/team/tiny", cache=tmp_path, access=access(port))

    assert sorted(path.name for path in directory.glob("[!.]*")) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert (directory / "model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.capability("ST-1")
def test_a_cut_costs_a_piece_and_the_second_time_nothing_comes(store: Any, port: int, tmp_path: Path):
    with a_wire(port) as wire:
        wire.cut_after = 5 << 20
        directory = fetch("s3://models/team/tiny/", cache=tmp_path, access=access(wire.port), retry=ONCE)
        assert (directory / "model.safetensors").read_bytes() == WEIGHTS
        assert wire.cut_after is None
        assert wire.received < len(WEIGHTS) + (2 << 20) + 65_536, "one piece of 2 MiB twice, and headers"

        wire.received = 0
        assert fetch("s3://models/team/tiny/", cache=tmp_path, access=access(wire.port)) == directory
        assert wire.received < 65_536


@pytest.mark.capability("ST-1")
def test_a_checksum_that_the_uploader_left_is_obeyed(store: Any, port: int, tmp_path: Path):
    right = base64.b64encode(hashlib.sha256(WEIGHTS).digest()).decode()
    store.put_object(Bucket="models", Key="team/tiny/model.safetensors", Body=WEIGHTS, ChecksumSHA256=right)
    assert fetch("s3://models/team/tiny", cache=tmp_path, access=access(port)).is_dir()

    store.put_object(Bucket="models", Key="team/tiny/SHA256SUMS", Body=f"{'0' * 64}  model.safetensors\n".encode())
    with pytest.raises(BrokenFileError, match=r"model\.safetensors arrived broken .* and was removed"):
        fetch("s3://models/team/tiny", cache=tmp_path, access=access(port))


@pytest.mark.parametrize(
    ("uri", "words", "kind"),
    [
        ("s3://models/team/nothing", "there is no s3://models/team/nothing", ModelNotFoundError),
        ("s3://nothing/team/tiny", "there is no s3://nothing/team/tiny", ModelNotFoundError),
        ("s3://models/team", "there is nothing directly under s3://models/team", ModelNotFoundError),
    ],
)
def test_what_is_not_there_is_said_in_a_sentence(
    store: Any, port: int, tmp_path: Path, uri: str, words: str, kind: type[FetchError]
):
    with pytest.raises(kind, match=words):
        fetch(uri, cache=tmp_path, access=access(port), retry=ONCE)


def test_refused_credentials_are_said_without_saying_them(store: Any, port: int, tmp_path: Path):
    httpx.post(f"http://127.0.0.1:{port}/moto-api/reset-auth", content=b"0")  # from now on it checks
    with pytest.raises(AccessDeniedError, match=rf"127\.0\.0\.1:{port} refuses s3://models/team/tiny") as refused:
        fetch("s3://models/team/tiny", cache=tmp_path, access=access(port), retry=ONCE)
    assert "hunter2" not in str(refused.value)


def test_a_store_that_is_away_is_said_in_a_sentence(tmp_path: Path):
    with pytest.raises(UnreachableError, match=r"does not answer: 127\.0\.0\.1:9: the connection is refused, 2"):
        fetch("s3://models/team/tiny", cache=tmp_path, access=access(9), retry=ONCE)
