"""A model's address leads to a directory with its files, or to a sentence why not."""

import hashlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipway_runtime.models.pooling import MEAN, read_embedding_config
from slipway_runtime.server.tokenizer import _named_templates
from slipway_runtime.storage.fetch import (
    Access,
    AccessDeniedError,
    FetchError,
    HubModel,
    LocalModel,
    ModelNotFoundError,
    RetryPolicy,
    S3Model,
    UnreachableError,
    WebModel,
    check_digest,
    fetch,
    parse,
    shown,
    weights_digest,
)
from tests.runtime.storage.hub import Hub, a_hub

FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b'{"model": {}}',
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": bytes(range(256)) * 4096,
    "pytorch_model.bin": b"a pickle",
    "modeling_evil.py": b"import os",
    "original/model.safetensors": b"the same weights in another format",
    "README.md": b"words",
}


@pytest.fixture(scope="module")
def running_hub() -> Iterator[Hub]:
    with a_hub() as hub:
        yield hub


@pytest.fixture
def hub(running_hub: Hub) -> Hub:
    running_hub.repositories = {"org/tiny": {"main": dict(FILES), "v1": dict(FILES, **{"config.json": b"{}"})}}
    running_hub.downloads.clear()
    running_hub.cut_after = None
    return running_hub


@pytest.mark.parametrize(
    ("uri", "meaning"),
    [
        ("file:///opt/models/tiny", LocalModel(Path("/opt/models/tiny"))),
        ("file://localhost/opt/a%20b", LocalModel(Path("/opt/a b"))),
        ("/opt/models/tiny", LocalModel(Path("/opt/models/tiny"))),
        ("models/tiny", LocalModel(Path.cwd() / "models/tiny")),
        ("hf://org/name@abc123", HubModel("org/name", "abc123")),
        ("hf://org/name@refs/pr/1", HubModel("org/name", "refs/pr/1")),
        ("hf://org/name", HubModel("org/name", None)),
        ("s3://bucket/some/prefix/", S3Model("bucket", "some/prefix")),
        ("s3://bucket", S3Model("bucket", "")),
        ("https://host:8443/models/tiny", WebModel("https://host:8443/models/tiny/")),
    ],
)
def test_addresses_are_understood(uri: str, meaning: object):
    assert parse(uri) == meaning


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "file://opt/tiny",
        "hf://name",
        "hf://a/b/c",
        "hf:///b",
        "s3:///x",
        "s3://B/x",
        "https://",
        "https://user:word@host/tiny",
        "https://host/tiny?X-Amz-Signature=abc",
        "ftp://x/y",
        "https://[host/tiny",
    ],
)
def test_senseless_addresses_are_refused_with_a_sentence(uri: str):
    with pytest.raises(FetchError):
        parse(uri)
    assert "word" not in shown(uri)
    assert "Signature" not in shown(uri)


def test_a_local_model_is_used_where_it_is(tmp_path: Path):
    assert fetch(f"file://{tmp_path}", cache=tmp_path / "cache") == tmp_path
    with pytest.raises(ModelNotFoundError, match="no directory"):
        fetch(f"file://{tmp_path}/missing", cache=tmp_path)


@pytest.mark.capability("ST-2", "ST-1")
def test_only_what_runs_no_code_comes_from_the_hub(hub: Hub, tmp_path: Path):
    directory = fetch("hf://org/tiny@v1", cache=tmp_path, endpoint=hub.url)

    assert sorted(path.name for path in directory.rglob("[!.]*")) == [
        "chat_template.jinja",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert (directory / "config.json").read_bytes() == b"{}", "the revision that was asked for"
    assert (directory / "model.safetensors").read_bytes() == FILES["model.safetensors"]


@pytest.mark.capability("API-16")
def test_how_an_embedding_model_pools_comes_from_the_hub_and_nothing_else_of_folders(hub: Hub, tmp_path: Path):
    pooling = b'{"pooling_mode_mean_tokens": true}'
    folders = {"1_Pooling/config.json": pooling, "onnx/config.json": b"{}", "2_Normalize/config.json": b"{}"}
    hub.repositories["org/vectors"] = {"main": dict(FILES) | folders}

    directory = fetch("hf://org/vectors@main", cache=tmp_path, endpoint=hub.url)

    assert sorted(path.name for path in directory.rglob("*config.json")) == ["1_Pooling.config.json", "config.json"]
    assert read_embedding_config(directory, "auto", 8).pooling == MEAN


def test_the_chat_template_for_tools_comes_from_the_hub(hub: Hub, tmp_path: Path):
    """review/api-users.md 12."""
    folders = {"additional_chat_templates/tool_use.jinja": b"with tools", "onnx/chat.jinja": b"x"}
    hub.repositories["org/hermes"] = {"main": dict(FILES) | folders}

    directory = fetch("hf://org/hermes@main", cache=tmp_path, endpoint=hub.url)
    names = {path.name for path in directory.rglob("*.jinja")}

    assert names == {"additional_chat_templates.tool_use.jinja", "chat_template.jinja"}
    assert _named_templates(directory)["tool_use"] == "with tools"


def test_what_is_in_the_cache_is_not_fetched_again(hub: Hub, tmp_path: Path):
    first = fetch("hf://org/tiny@v1", cache=tmp_path, endpoint=hub.url)
    hub.downloads.clear()

    assert fetch("hf://org/tiny@v1", cache=tmp_path, endpoint=hub.url) == first
    assert hub.downloads == []


def test_two_processes_fetch_a_model_once(hub: Hub, tmp_path: Path):
    threads = [
        threading.Thread(target=fetch, args=("hf://org/tiny@v1",), kwargs={"cache": tmp_path, "endpoint": hub.url})
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(hub.downloads) == ["chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json"]


@pytest.mark.capability("ST-1")
def test_a_broken_download_is_resumed(hub: Hub, tmp_path: Path):
    hub.repositories["org/tiny"]["v1"]["model.safetensors"] = large = FILES["model.safetensors"] * 12
    hub.cut_after = 11 * 2**20

    directory = fetch("hf://org/tiny@v1", cache=tmp_path, endpoint=hub.url)

    assert (directory / "model.safetensors").read_bytes() == large
    assert any(name.startswith("model.safetensors@") for name in hub.downloads), "from where it broke"


@pytest.mark.capability("ST-1")
@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_file_that_arrives_broken_is_refused_and_fetched_again(hub: Hub, tmp_path: Path, name: str):
    hub.corrupt = {name}
    with pytest.raises(FetchError, match=f"{name} arrived broken"):
        fetch("hf://org/tiny@v1", cache=tmp_path, endpoint=hub.url)

    directory = fetch("hf://org/tiny@v1", cache=tmp_path, endpoint=hub.url)

    assert (directory / name).read_bytes() == FILES[name]


@pytest.mark.parametrize(
    ("uri", "words", "kind"),
    [
        ("hf://org/nothing@v1", "does not exist", ModelNotFoundError),
        ("hf://org/gated@main", "asks for credentials, or for its terms", AccessDeniedError),
        ("hf://org/..@main", "is not a name that a repository can have", FetchError),
        ("hf://org/tiny@v9", "no such revision", ModelNotFoundError),
        ("hf://org/pickled@main", "pickled weights", FetchError),
    ],
)
def test_what_the_hub_does_not_have_is_said_in_a_sentence(
    hub: Hub, tmp_path: Path, uri: str, words: str, kind: type[FetchError]
):
    hub.gated = {"org/gated"}
    hub.repositories["org/gated"] = {"main": {"config.json": b"{}"}}
    hub.repositories["org/pickled"] = {"main": {"config.json": b"{}", "pytorch_model.bin": b"x"}}

    with pytest.raises(kind, match=words) as refused:
        fetch(uri, cache=tmp_path, endpoint=hub.url)

    assert type(refused.value) is kind


def test_a_hub_that_is_away_is_said_in_a_sentence(tmp_path: Path):
    with pytest.raises(
        UnreachableError, match=r"does not answer: 127\.0\.0\.1:9: the connection is refused, 2"
    ) as refused:
        fetch(
            "hf://org/tiny@v1",
            cache=tmp_path,
            endpoint="http://127.0.0.1:9",
            retry=RetryPolicy(attempts=2, first_delay=0),
        )

    assert not isinstance(refused.value, ModelNotFoundError), "it may be back in a minute"


def test_the_digest_of_one_file_is_its_sha256_and_of_several_that_of_sha256sums_output(tmp_path: Path):
    (tmp_path / "model-1.safetensors").write_bytes(b"one")
    one, two = hashlib.sha256(b"one").hexdigest(), hashlib.sha256(b"two").hexdigest()
    assert weights_digest(tmp_path) == f"sha256:{one}"

    (tmp_path / "model-2.safetensors").write_bytes(b"two")
    listing = f"{one}  model-1.safetensors\n{two}  model-2.safetensors\n"

    assert weights_digest(tmp_path) == f"sha256:{hashlib.sha256(listing.encode()).hexdigest()}"


def test_other_weights_than_promised_refuse_to_start(tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(b"one")
    check_digest(tmp_path, weights_digest(tmp_path))

    with pytest.raises(FetchError, match="refusing to start"):
        check_digest(tmp_path, "sha256:" + "0" * 64)


def test_a_refused_address_is_shown_without_what_may_be_a_secret():
    for uri in ("https://user:hunter2@host/tiny", "https://host/tiny?sig=hunter2", "s3://user:hunter2@bucket/x"):
        with pytest.raises(FetchError) as refused:
            parse(uri)
        assert "hunter2" not in str(refused.value)


def test_a_list_of_sums_beside_local_weights_is_not_believed(tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(b"other weights")
    (tmp_path / ".slipway.json").write_text('{"files": {"model.safetensors": {"sha256": "%s"}}}' % ("0" * 64))

    assert weights_digest(tmp_path, tmp_path / "cache") == f"sha256:{hashlib.sha256(b'other weights').hexdigest()}"


def test_the_hub_gets_the_token_and_a_commit_needs_no_hub(hub: Hub, tmp_path: Path):
    uri = f"hf://org/tiny@{hub.sha('org/tiny', 'v1')}"
    hub.tokens.clear()
    access = Access(hub_endpoint=hub.url, hub_token="hf_secret")

    first = fetch(uri, cache=tmp_path, access=access)
    assert set(hub.tokens) == {"Bearer hf_secret"}
    assert "hf_secret" not in repr(access)
    hub.tokens.clear()

    assert fetch(uri, cache=tmp_path, access=access) == first
    assert hub.tokens == [], "not one request"


def test_a_new_revision_brings_only_what_is_new(hub: Hub, tmp_path: Path):
    fetch("hf://org/tiny@v1", cache=tmp_path, endpoint=hub.url)
    hub.downloads.clear()

    directory = fetch("hf://org/tiny@main", cache=tmp_path, endpoint=hub.url)

    assert hub.downloads == ["config.json"]
    assert (directory / "config.json").read_bytes() == FILES["config.json"]
    assert (directory / "model.safetensors").read_bytes() == FILES["model.safetensors"]


def test_the_index_decides_which_of_two_copies_of_the_weights_comes(hub: Hub, tmp_path: Path):
    index = json.dumps({"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}).encode()
    hub.repositories["org/sharded"] = {"main": {
        "config.json": b"{}", "model.safetensors.index.json": index, "model-1-of-2.safetensors": b"1" * 100,
        "model-2-of-2.safetensors": b"2" * 100, "consolidated.safetensors": b"the same once more",
    }}  # fmt: skip

    directory = fetch("hf://org/sharded", cache=tmp_path, endpoint=hub.url)

    assert not (directory / "consolidated.safetensors").exists()
    assert (directory / "model-2-of-2.safetensors").read_bytes() == b"2" * 100


def test_without_its_hub_a_model_that_came_before_still_starts(hub: Hub, tmp_path: Path):
    first = fetch("hf://org/tiny@v1", cache=tmp_path, access=Access(hub_endpoint=hub.url))
    hub.away = True
    try:
        again = fetch(
            "hf://org/tiny@v1", cache=tmp_path, access=Access(hub_endpoint=hub.url),
            retry=RetryPolicy(attempts=1),
        )  # fmt: skip
    finally:
        hub.away = False
    assert again == first
