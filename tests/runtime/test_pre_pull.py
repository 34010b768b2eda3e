"""A pod that brings a model to its node, before and beside the pod that serves it."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipway_api import names
from slipway_runtime import termination
from slipway_runtime.main import pre_pull
from slipway_runtime.storage.fetch import fetch
from tests.runtime.storage.origin import Origin, a_model, an_origin


@pytest.fixture
def origin() -> Iterator[Origin]:
    with an_origin() as origin:
        origin.files = a_model()
        yield origin


@pytest.fixture
def message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that the kubelet mounts for the termination message."""
    path = tmp_path / "termination-log"
    path.touch()
    monkeypatch.setattr(termination, "TERMINATION_MESSAGE", path)
    return path


@pytest.mark.capability("ST-6", "ST-4")
def test_what_a_pod_has_pulled_a_replica_does_not_download(origin: Origin, tmp_path: Path, message: Path):
    cache = tmp_path / "cache"

    assert pre_pull(origin.url + "/tiny", "", cache) == 0

    sent = origin.total_sent
    directory = fetch(origin.url + "/tiny", cache=cache)
    # The source is asked what the address means now: a byte of each file, no content.
    assert origin.total_sent - sent < 100
    said = json.loads(message.read_text())
    assert said["path"] == str(directory)
    assert said["bytes"] >= sum(len(content) for content in a_model().values() if content != b"a pickle")


def test_a_model_that_is_not_there_is_told_as_a_replica_would(origin: Origin, tmp_path: Path, message: Path):
    assert pre_pull(origin.url + "/missing", "", tmp_path / "cache") == 1

    assert message.read_text().startswith(names.WORD_MODEL_NOT_FOUND)


def test_a_draft_model_is_pulled_after_the_model(origin: Origin, tmp_path: Path, message: Path):
    cache = tmp_path / "cache"

    assert pre_pull(f"{origin.url}/tiny", "", cache, draft_model_uri=f"{origin.url}/missing") == 1
    assert message.read_text().startswith(f"{names.WORD_INVALID_SPEC}{names.DRAFT_MODEL_FIELD}: ")
    assert pre_pull(f"{origin.url}/tiny", "", cache, draft_model_uri=f"{origin.url}/tiny") == 0


def test_the_command_line_of_the_pod_pulls_and_computes_no_digest(tmp_path: Path):
    """An image volume of 140 GB is not read to the end only to be pulled."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"not even weights")
    environment = {**os.environ, names.ENV_PRE_PULL_TOKENIZER: "", "SLIPWAY_CACHE_DIR": str(tmp_path / "cache")}

    done = subprocess.run(
        [sys.executable, "-m", "slipway_runtime.main", "pull", f"file://{model}"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"bytes": 16, "path": str(model)}
