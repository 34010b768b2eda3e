"""A folder on a web server becomes a model's directory: in parts, resumed, checked; every failure is a sentence."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from slipway_runtime import serve
from slipway_runtime.settings import RuntimeSettings
from slipway_runtime.storage import download, public_network
from slipway_runtime.storage.fetch import (
    Access,
    AccessDeniedError,
    FetchError,
    ModelNotFoundError,
    RetryPolicy,
    UnreachableError,
    fetch,
)
from slipway_runtime.storage.source import BrokenFileError, OutOfSpaceError
from tests.runtime.storage.origin import Origin, a_model, an_origin

AT_ONCE = RetryPolicy(attempts=4, first_delay=0, longest_delay=0)
WEIGHTS = "/tiny/model.safetensors"


@pytest.fixture
def origin() -> Iterator[Origin]:
    with an_origin() as origin:
        origin.files = a_model()
        yield origin


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "PART_BYTES", 128 << 10)


def bring(origin: Origin, cache: Path, access: Access | None = None, **more: object) -> Path:
    return fetch(
        f"{origin.url}/tiny", cache=cache, access=access or Access(), retry=AT_ONCE, **more  # type: ignore[arg-type]
    )  # fmt: skip


def a_token(token: str, *origins: Origin) -> Access:
    """Access with a bearer token for these origins."""
    return Access(bearer_token=token).with_hosts_of(*(origin.url for origin in origins))


@pytest.mark.capability("ST-1", "ST-2")
def test_a_folder_is_fetched_in_parts_and_without_what_runs_code(origin: Origin, tmp_path: Path):
    seen: list[tuple[int, int]] = []
    directory = bring(origin, tmp_path, on_progress=lambda done, total: seen.append((done, total)))

    assert sorted(path.name for path in directory.glob("[!.]*")) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert (directory / "model.safetensors").read_bytes() == origin.files[WEIGHTS]
    assert len([path for path, _ in origin.asked if path == WEIGHTS]) == 1 + 8, "one question, eight parts"
    total = sum(len(content) for name, content in origin.files.items() if not name.endswith(".bin"))
    assert seen[0] == (0, total)
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


@pytest.mark.capability("ST-1")
def test_cut_connections_cost_what_was_not_received_and_nothing_else(origin: Origin, tmp_path: Path):
    origin.cuts = {WEIGHTS: 12}  # of 8 parts, each about once or twice

    directory = bring(origin, tmp_path)

    assert (directory / "model.safetensors").read_bytes() == origin.files[WEIGHTS]
    assert origin.cuts[WEIGHTS] == 0, "all of them happened"
    asked = 1  # the first question, for one byte
    assert origin.sent[WEIGHTS] <= len(origin.files[WEIGHTS]) + asked + 12 * 16_384, "at most a piece a cut, twice"


def test_a_server_that_cannot_read_from_the_middle_is_read_from_the_start(origin: Origin, tmp_path: Path):
    origin.reads_from_the_middle = False
    origin.cuts = {WEIGHTS: 2}  # the first is the question

    directory = bring(origin, tmp_path)

    assert (directory / "model.safetensors").read_bytes() == origin.files[WEIGHTS]


def test_shards_come_by_the_index(origin: Origin, tmp_path: Path):
    whole = origin.files.pop(WEIGHTS)
    origin.files["/tiny/model.safetensors.index.json"] = json.dumps(
        {"weight_map": {"a": "model-00001.safetensors", "b": "model-00002.safetensors"}}
    ).encode()
    origin.files["/tiny/model-00001.safetensors"] = whole[:1000]
    with pytest.raises(ModelNotFoundError, match=r"the index names model-00002\.safetensors, which is not there"):
        bring(origin, tmp_path)
    origin.files["/tiny/model-00002.safetensors"] = whole[1000:]

    directory = bring(origin, tmp_path)

    assert (directory / "model-00002.safetensors").read_bytes() == whole[1000:]


@pytest.mark.capability("ST-1")
def test_an_adapter_is_fetched_like_a_model_and_within_its_limit(origin: Origin, tmp_path: Path):
    origin.files = {"/tiny/adapter_config.json": b"{}", "/tiny/adapter_model.safetensors": bytes(5000)}
    with pytest.raises(OutOfSpaceError, match="has 5002 bytes, more than the 4000 that are allowed"):
        bring(origin, tmp_path, at_most_bytes=4000)
    assert (bring(origin, tmp_path, at_most_bytes=6000) / "adapter_model.safetensors").read_bytes() == bytes(5000)


@pytest.mark.capability("ST-1")
def test_sums_in_the_folder_are_obeyed(origin: Origin, tmp_path: Path):
    right = hashlib.sha256(origin.files[WEIGHTS]).hexdigest()
    origin.files["/tiny/SHA256SUMS"] = f"{'0' * 64}  config.json\n{right} *model.safetensors\n".encode()
    with pytest.raises(BrokenFileError, match=r"config\.json arrived broken \(sha256 .*, expected 000000000000…\)"):
        bring(origin, tmp_path)
    config = hashlib.sha256(origin.files["/tiny/config.json"]).hexdigest()
    origin.files["/tiny/SHA256SUMS"] = f"{config}  ./config.json\n{right} *model.safetensors\n".encode()

    assert (bring(origin, tmp_path) / "model.safetensors").read_bytes() == origin.files[WEIGHTS]


def test_a_busy_server_is_asked_again_and_a_dead_one_not_for_ever(origin: Origin, tmp_path: Path):
    origin.failures = {WEIGHTS: [503, 429, 500]}
    assert bring(origin, tmp_path / "a").is_dir()

    origin.failures = {WEIGHTS: [503] * 50}
    with pytest.raises(UnreachableError, match="does not answer: status 503, 4 times"):
        bring(origin, tmp_path / "b")
    assert len(origin.failures[WEIGHTS]) == 46


def test_a_body_that_never_comes_ends_in_a_sentence(origin: Origin, tmp_path: Path):
    origin.claims = {WEIGHTS: len(origin.files[WEIGHTS]) + 1000}  # the last bytes do not exist
    with pytest.raises(FetchError, match=r"model\.safetensors"):
        bring(origin, tmp_path)


@pytest.mark.capability("ST-1")
def test_the_bearer_token_opens_the_folder_and_goes_to_no_other_host(origin: Origin, tmp_path: Path):
    origin.bearer = "s3cret"
    with pytest.raises(AccessDeniedError, match="with status 401: check the credentials") as refused:
        bring(origin, tmp_path, a_token("wr0ng", origin))
    assert "wr0ng" not in str(refused.value)
    assert bring(origin, tmp_path, a_token("s3cret", origin)).is_dir()

    with an_origin() as other:
        other.redirect_to = origin.url
        origin.bearer = ""
        origin.asked.clear()
        bring(other, tmp_path / "redirected", a_token("s3cret", other))
        assert {authorization for _, authorization in other.asked} == {"Bearer s3cret"}
        assert origin.asked
        assert {authorization for _, authorization in origin.asked} == {""}, "another port is another host"


@pytest.mark.capability("ST-1")
def test_an_address_that_a_client_names_gets_no_token(origin: Origin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Finding 6: the token of the process is for the hosts that its command line names."""
    monkeypatch.setenv("HTTP_BEARER_TOKEN", "s3cret")
    with an_origin() as named:
        settings = RuntimeSettings(model_uri=f"{named.url}/model", cache_directory=tmp_path)
        for from_client in (False, True):
            relaxed = replace(settings, private_adapter_addresses=True)
            serve._fetch_adapter(relaxed, f"{origin.url}/tiny", from_client, {})
        assert {authorization for _, authorization in origin.asked} == {""}

        named.files = {name.replace("/tiny", "/adapter"): content for name, content in origin.files.items()}
        serve._fetch_adapter(settings, f"{named.url}/adapter", False, {})
        assert {authorization for _, authorization in named.asked} == {"Bearer s3cret"}

        origin.asked.clear()
        monkeypatch.setenv("HTTP_BEARER_HOSTS", origin.url)
        serve._fetch_adapter(settings, f"{origin.url}/tiny", False, {})
        assert {authorization for _, authorization in origin.asked} == {"Bearer s3cret"}


def test_an_address_that_a_client_names_leads_into_no_private_network(
    origin: Origin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Finding 6: neither at once nor by a redirect."""
    settings = RuntimeSettings(model_uri="file:///models/tiny", cache_directory=tmp_path)
    with pytest.raises(AccessDeniedError, match=r"127\.0\.0\.1 is an address of a private network"):
        serve._fetch_adapter(settings, f"{origin.url}/tiny", True, {})
    assert not origin.asked

    monkeypatch.setattr(public_network, "is_public", lambda address: address == "127.0.0.1")
    with an_origin() as public:
        public.redirect_to = origin.url.replace("127.0.0.1", "127.0.0.2")
        with pytest.raises(AccessDeniedError, match=r"127\.0\.0\.2 is an address of a private network"):
            serve._fetch_adapter(settings, f"{public.url}/tiny", True, {})
    assert public.asked
    assert not origin.asked


@pytest.mark.parametrize(
    ("address", "is_public"),
    [
        *(("8.8.8.8", True), ("2606:4700::1111", True)),
        *(("10.1.2.3", False), ("127.0.0.1", False), ("169.254.169.254", False), ("100.64.0.1", False)),
        *(("192.168.0.1", False), ("172.16.0.1", False), ("0.0.0.0", False), ("224.0.0.1", False)),
        *(("::1", False), ("fe80::1%eth0", False), ("fd00::1", False), ("::ffff:10.0.0.1", False)),
        # IPv4 addresses inside of IPv6 ones: NAT64, its local range, 6to4, IPv4-compatible; and site-local addresses.
        *(("64:ff9b::a9fe:a9fe", False), ("64:ff9b::808:808", True), ("64:ff9b:1::808:808", False)),
        *(("2002:a9fe:a9fe::1", False), ("2002:808:808::1", True), ("::a9fe:a9fe", False), ("::808:808", False)),
        *(("fec0::1", False), ("::ffff:169.254.169.254", False), ("::ffff:8.8.8.8", True), ("ff02::1", False)),
        ("168.63.129.16", False),  # of Azure's virtual machines
    ],
)
def test_which_addresses_are_public(address: str, is_public: bool):
    assert public_network.is_public(address) is is_public


def test_a_file_that_changes_on_its_way_is_refused(origin: Origin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(download, "THREADS", 1)  # part after part: some are asked for after the change
    origin.etags = {WEIGHTS: '"one"'}
    half = len(origin.files[WEIGHTS]) // 2

    def change(done: int, total: int) -> None:
        if done > half:
            origin.etags[WEIGHTS] = '"two"'

    with pytest.raises(FetchError, match=r"model\.safetensors was changed while it was fetched"):
        bring(origin, tmp_path, on_progress=change)
    assert (bring(origin, tmp_path) / "model.safetensors").read_bytes() == origin.files[WEIGHTS]


@pytest.mark.parametrize(
    ("change", "words", "kind"),
    [
        ({WEIGHTS: None, "/tiny/config.json": None, "/tiny/tokenizer.json": None}, "has no model at /tiny/",
         ModelNotFoundError),
        ({WEIGHTS: None}, r"has no \*\.safetensors", ModelNotFoundError),
        ({"/tiny/model.safetensors.index.json": b"[]"}, "is not an index of shards", FetchError),
        ({"/tiny/model.safetensors.index.json": b'{"weight_map": {"a": "../x.safetensors"}}'}, "leads elsewhere",
         FetchError),
        ({"/tiny/model.safetensors.index.json": b'{"weight_map": {"a": "/etc/x.safetensors"}}'}, "leads elsewhere",
         FetchError),
        ({"/tiny/model.safetensors.index.json": b'{"weight_map": {"a": "model.bin"}}'}, r"that is no \*\.safetensors",
         FetchError),
        ({"/tiny/model.safetensors.index.json": b'{"weight_map": {"a": 7}}'}, r"that is no \*\.safetensors",
         FetchError),
        ({"/tiny/model.safetensors.index.json": b" " * (17 << 20)}, "which is not a list of files", FetchError),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_folder_is_said_in_a_sentence(
    origin: Origin, tmp_path: Path, change: dict[str, bytes | None], words: str, kind: type[FetchError]
):
    for path, content in change.items():
        if content is None:
            del origin.files[path]
        else:
            origin.files[path] = content
    with pytest.raises(kind, match=words) as refused:
        bring(origin, tmp_path)
    assert "\n" not in str(refused.value)


@pytest.mark.capability("ST-1")
def test_a_model_larger_than_the_disk_is_refused_before_its_first_byte(origin: Origin, tmp_path: Path):
    origin.claims = {WEIGHTS: 1 << 60}
    with pytest.raises(OutOfSpaceError, match=r"needs 1073741824\.00 GiB, and the disk of the cache has \d+\.\d\d GiB"):
        bring(origin, tmp_path)
    assert origin.sent[WEIGHTS] == 1, "the one byte that was asked for to know the size"
