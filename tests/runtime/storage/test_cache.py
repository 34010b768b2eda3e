"""One cache for all pods of a node: a model comes once, survives a kill, and goes only when nobody uses it."""

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipway_runtime.storage import cache as shelf
from slipway_runtime.storage import download
from slipway_runtime.storage.fetch import Access, FetchError, fetch, release, weights_digest
from slipway_runtime.storage.source import OutOfSpaceError, RemoteFile
from tests.runtime.storage.origin import Origin, a_model, an_origin

# Another pod: fetches, says where it is, and stays until its stdin closes.
POD = """
import sys
from pathlib import Path
from slipway_runtime.storage import download
from slipway_runtime.storage.fetch import fetch
download.PART_BYTES = 64 << 10
print("here", fetch(sys.argv[1], cache=Path(sys.argv[2]), limit_bytes=int(sys.argv[3])), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def origin() -> Iterator[Origin]:
    with an_origin() as origin:
        origin.files = a_model()
        yield origin


def a_pod(url: str, cache: Path, limit: int = 0) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", POD, url, str(cache), str(limit)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def answer(pod: subprocess.Popen[str]) -> Path:
    assert pod.stdout is not None
    return next(Path(line.split()[1]) for line in pod.stdout if line.startswith("here "))


def leave(pod: subprocess.Popen[str]) -> None:
    assert pod.stdin is not None
    pod.stdin.close()
    assert pod.wait(30) == 0


@pytest.mark.capability("ST-4")
def test_the_second_pod_of_a_node_downloads_nothing(origin: Origin, tmp_path: Path):
    """Both start at the same time; one fetches, the other waits for it."""
    url = f"{origin.url}/tiny"
    pods = [a_pod(url, tmp_path), a_pod(url, tmp_path)]
    first, second = (answer(pod) for pod in pods)
    for pod in pods:
        leave(pod)

    assert first == second
    assert (first / "model.safetensors").read_bytes() == origin.files["/tiny/model.safetensors"]
    asked_for_one_byte = 2 * 3
    bodies = {path: content for path, content in origin.files.items() if not path.endswith(".bin")}
    assert origin.total_sent <= sum(map(len, bodies.values())) + asked_for_one_byte

    sent = origin.total_sent
    leave_me = a_pod(url, tmp_path)
    assert answer(leave_me) == first
    leave(leave_me)
    assert origin.total_sent - sent <= 3, "one byte of each file, to know that it is the same"


@pytest.mark.capability("ST-4")
@pytest.mark.timeout(60)  # the fault was a wait without an end
@pytest.mark.parametrize("fetched_by_another", [True, False])
def test_a_pod_that_is_late_does_not_wait_for_the_end_of_the_first(tmp_path: Path, fetched_by_another: bool):
    """It decides to fetch, another pod completes the model meanwhile and keeps it in use."""
    files = [RemoteFile(name="config.json", size=2, location="here", version="1")]
    store = shelf.Cache(tmp_path)
    key = shelf.content_key(files)

    def complete() -> None:
        (tmp_path / "partial" / key / "config.json").write_bytes(b"{}")
        store.finish(key, "a model", files, {"config.json": "0"})

    if fetched_by_another:
        with store.coming(key) as folder:
            assert folder == tmp_path / "partial" / key
            complete()
        assert store.hold(key) == tmp_path / "models" / key
        with store.coming(key) as folder:
            assert folder is None
    else:
        descriptor = store._open(key)
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # another pod, which is killed before it has the whole model
        killer = threading.Timer(0.2, os.close, [descriptor])
        killer.start()
        with store.coming(key) as folder:
            assert folder == tmp_path / "partial" / key, "the next to try"
        killer.join()


@pytest.mark.capability("ST-1", "ST-4")
def test_what_a_killed_process_had_is_not_fetched_again(
    origin: Origin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(download, "PART_BYTES", 64 << 10)
    total = len(origin.files["/tiny/model.safetensors"])
    origin.stall_after = total // 2
    pod = a_pod(f"{origin.url}/tiny", tmp_path)
    for _ in range(download.THREADS):
        assert origin.stalled.acquire(timeout=60), "it is in the middle, and no answer to it goes on"
    partial = next((tmp_path / "partial").glob("*/model.safetensors.have"))

    def there() -> int:
        return sum(memoryview(partial.read_bytes()).cast("Q")[1:])

    while there() < total // 4:
        assert pod.poll() is None
        time.sleep(0.01)
    pod.send_signal(signal.SIGKILL)
    pod.wait()
    had = there()
    assert not list((tmp_path / "models").iterdir())
    origin.stall_after, sent = None, origin.total_sent
    origin.go_on.set()

    directory = fetch(f"{origin.url}/tiny", cache=tmp_path, access=Access())

    assert (directory / "model.safetensors").read_bytes() == origin.files["/tiny/model.safetensors"]
    beside = 3 + len(b'{"model_type": "llama"}{}')  # a question for each file, and the small files
    assert had >= total // 4
    assert origin.total_sent - sent <= total - had + beside, "not a byte twice"


def test_parts_of_another_size_are_fetched_again(origin: Origin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As after an upgrade: counts of small parts say nothing about large ones."""
    monkeypatch.setattr(download, "PART_BYTES", 64 << 10)
    origin.files["/tiny/model.safetensors"] = bytes(1 << 20)

    def enough(done: int, total: int) -> None:
        if done > total // 2:
            raise InterruptedError("the process ends")

    with pytest.raises(FetchError):
        fetch(f"{origin.url}/tiny", cache=tmp_path, access=Access(), on_progress=enough)
    origin.files["/tiny/model.safetensors"] = a_model()["/tiny/model.safetensors"]
    monkeypatch.setattr(download, "PART_BYTES", 128 << 10)

    directory = fetch(f"{origin.url}/tiny", cache=tmp_path, access=Access())

    assert (directory / "model.safetensors").read_bytes() == origin.files["/tiny/model.safetensors"]


@pytest.mark.capability("ST-4")
def test_what_was_not_used_for_longest_goes_first_and_what_is_used_stays(origin: Origin, tmp_path: Path):
    size = 1 << 18
    for name in ("a", "b", "c", "d"):
        origin.files |= {path.replace("/tiny", f"/{name}"): content for path, content in a_model(size).items()}
        origin.files[f"/{name}/model.safetensors"] = name.encode() * size
    limit = 3 * size + 4096

    used_elsewhere = a_pod(f"{origin.url}/a", tmp_path, limit)
    a = answer(used_elsewhere)
    b, c = (fetch(f"{origin.url}/{name}", cache=tmp_path, access=Access(), limit_bytes=limit) for name in "bc")
    release(b, cache=tmp_path)
    release(c, cache=tmp_path)
    for age, directory in enumerate((a, b, c)):
        os.utime(tmp_path / "locks" / f"{directory.name}.lock", (1000 + age, 1000 + age))

    d = fetch(f"{origin.url}/d", cache=tmp_path, access=Access(), limit_bytes=limit)
    assert [path.exists() for path in (a, b, c, d)] == [True, False, True, True], "a is older, but another pod uses it"

    c_again = fetch(f"{origin.url}/c", cache=tmp_path, access=Access(), limit_bytes=limit)
    assert c_again == c
    with pytest.raises(OutOfSpaceError, match=r"needs 0\.00 GiB, and 0\.00 GiB of the cache's limit of 0\.00 GiB"):
        fetch(f"{origin.url}/b", cache=tmp_path, access=Access(), limit_bytes=limit)  # a, c and d are all in use

    used_elsewhere.kill()  # whatever ends a process ends its claim
    used_elsewhere.wait()
    assert fetch(f"{origin.url}/b", cache=tmp_path, access=Access(), limit_bytes=limit).is_dir()
    assert not a.exists()


def test_what_two_models_share_is_on_the_disk_once(origin: Origin, tmp_path: Path):
    origin.etags = {"/tiny/model.safetensors": '"weights"'}
    first = fetch(f"{origin.url}/tiny", cache=tmp_path, access=Access())
    origin.files["/tiny/config.json"] = b'{"model_type": "mistral"}'
    sent = origin.sent["/tiny/model.safetensors"]

    second = fetch(f"{origin.url}/tiny", cache=tmp_path, access=Access())

    assert second != first
    assert (second / "model.safetensors").samefile(first / "model.safetensors")
    assert origin.sent["/tiny/model.safetensors"] == sent + 1
    once = sum(len(content) for path, content in origin.files.items() if not path.endswith(".bin"))
    assert shelf.size_of([tmp_path / "models"]) < once + 8192


def test_weights_that_were_summed_on_their_way_are_not_read_again(origin: Origin, tmp_path: Path):
    directory = fetch(f"{origin.url}/tiny", cache=tmp_path, access=Access())
    digest = weights_digest(directory)
    weights = directory / "model.safetensors"
    weights.chmod(0o600)
    weights.write_bytes(b"")

    assert weights_digest(directory, tmp_path) == digest
    assert weights_digest(directory) != digest


def test_a_half_evicted_model_is_no_model(origin: Origin, tmp_path: Path):
    directory = fetch(f"{origin.url}/tiny", cache=tmp_path, access=Access())
    release(directory, cache=tmp_path)
    (directory / shelf.MANIFEST).unlink()
    (directory / "config.json").unlink()

    again = fetch(f"{origin.url}/tiny", cache=tmp_path, access=Access())

    assert again == directory
    assert (again / "config.json").read_bytes() == origin.files["/tiny/config.json"]
