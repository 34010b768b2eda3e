"""The folder of compiled kernels: what verifies is shared, nothing else is used, and no fault of it is an error."""

import os
import resource
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from slipway_runtime.storage.kernel_store import ABANDONED_SECONDS, KernelStore

FILES = {"_norm.cubin": b"\x7fELF" + bytes(1000), "_norm.json": b"{}"}
NOBODY = 65534


def a_store(root: Path, key: bytes = b"a key", toolchain: str = "triton 3.9.0", **limits: int) -> KernelStore:
    root.mkdir(exist_ok=True)
    return KernelStore(root, key, toolchain, **limits)


def entry(root: Path, kernel: str = "KERNEL") -> Path:
    (found,) = root.glob(f"*/*/{kernel}")
    return found


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that all users may read. Those of pytest, and some folders above them, are closed to others."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@contextmanager
def without_rights() -> Iterator[None]:
    """As a user who does not own the folders."""
    if os.geteuid():
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.capability("ST-10")
def test_a_second_process_gets_what_the_first_one_compiled(tmp_path: Path):
    first, second = a_store(tmp_path / "kernels"), a_store(tmp_path / "kernels")

    assert first.load("KERNEL") is None
    first.save("KERNEL", FILES)

    assert second.load("KERNEL") == FILES
    assert (first.counts.compiled, first.counts.shared, first.counts.refused) == (1, 0, 0)
    assert (second.counts.compiled, second.counts.shared, second.counts.refused) == (0, 1, 0)
    assert entry(tmp_path / "kernels").stat().st_mode & 0o222 == 0, "nobody changes it by mistake"


@pytest.mark.capability("ST-10")
@pytest.mark.parametrize(
    "other", [{"key": b"the key of another service"}, {"toolchain": "triton 3.10.0"}], ids=["key", "toolchain"]
)
def test_another_key_or_toolchain_has_a_folder_of_its_own(tmp_path: Path, other):
    a_store(tmp_path / "kernels").save("KERNEL", FILES)

    store = a_store(tmp_path / "kernels", **other)

    assert store.load("KERNEL") is None
    assert store.counts.refused == 0, "it is not a fault, so there is no warning of one"


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    _replace(path, bytes(content))


def _replace(path: Path, content: bytes) -> None:
    path.unlink()
    path.write_bytes(content)


def _link_away(path: Path) -> None:
    """A link to a file that would verify."""
    copy = path.parent.parent / "copy"
    path.rename(copy)
    path.symlink_to(copy)


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _huge(path: Path) -> None:
    """More than fits in memory; it takes no room on the disk."""
    _replace(path, b"")
    os.truncate(path, 1 << 42)


def _of_another_kernel(path: Path) -> None:
    _replace(path, path.with_name("OTHER").read_bytes())


def _of_another_key(path: Path) -> None:
    root = path.parents[3] / "foreign"
    a_store(root, b"foreign").save("KERNEL", FILES)
    _replace(path, entry(root).read_bytes())


def _of_another_toolchain(path: Path) -> None:
    root = path.parents[3] / "older"
    a_store(root, toolchain="triton 3.8.0").save("KERNEL", FILES)
    _replace(path, entry(root).read_bytes())


@pytest.mark.capability("ST-10")
@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "tamper",
    [
        _flip,
        lambda path: _replace(path, path.read_bytes()[:100]),
        lambda path: _replace(path, b""),
        _link_away,
        _pipe,
        _huge,
        _of_another_kernel,
        _of_another_key,
        _of_another_toolchain,
    ],
    ids=["changed", "half", "empty", "link", "pipe", "huge", "other kernel", "other key", "other toolchain"],
)
def test_what_does_not_verify_is_refused_counted_and_written_anew(tmp_path: Path, tamper):
    root = tmp_path / "kernels"
    first = a_store(root)
    first.save("KERNEL", FILES)
    first.save("OTHER", {"_other.cubin": b"other code"})
    path = entry(root)
    tamper(path)
    second = a_store(root)

    with capture_logs() as lines:
        assert second.load("KERNEL") is None

    assert second.counts.refused == 1
    (warning,) = [line for line in lines if line["log_level"] == "warning"]
    assert warning["path"] == str(path)
    assert not path.is_symlink()
    assert not path.exists()
    second.save("KERNEL", FILES)
    assert a_store(root).load("KERNEL") == FILES


@pytest.mark.capability("ST-10")
def test_a_pipe_that_has_a_writer_is_refused(tmp_path: Path):
    store = a_store(tmp_path / "kernels")
    store.save("KERNEL", FILES)
    path = entry(tmp_path / "kernels")
    _pipe(path)
    writer = os.open(path, os.O_RDWR)
    try:
        assert store.load("KERNEL") is None
    finally:
        os.close(writer)
    assert store.counts.refused == 1


@pytest.mark.capability("ST-10")
def test_of_two_writers_the_first_whole_file_stays(tmp_path: Path):
    """Both may have compiled it, and a compiler may give other bytes each time."""
    first, second = a_store(tmp_path / "kernels"), a_store(tmp_path / "kernels")
    first.save("KERNEL", FILES)
    second.save("KERNEL", {"_norm.cubin": b"the same kernel, compiled by another process"})

    assert a_store(tmp_path / "kernels").load("KERNEL") == FILES
    assert not list((tmp_path / "kernels").glob("*/*/.incomplete-*"))


@pytest.mark.capability("ST-10")
def test_a_read_only_folder_is_read_and_not_written(open_folder: Path):
    root = open_folder / "kernels"
    a_store(root).save("KERNEL", FILES)
    for folder in (root, *root.glob("*"), *root.glob("*/*")):
        folder.chmod(0o555)
    with without_rights(), capture_logs() as lines:
        store = KernelStore(root, b"a key", "triton 3.9.0")
        assert store.load("KERNEL") == FILES
        store.save("OTHER", FILES)
        store.save("ANOTHER", FILES)
        other = KernelStore(root, b"another key", "triton 3.9.0")
        assert other.load("KERNEL") is None
    for folder in (root, *root.glob("*"), *root.glob("*/*")):
        folder.chmod(0o755)

    assert store.fault
    assert other.fault
    assert store.counts.compiled == 2
    assert [path.name for path in root.glob("*/*/*")] == ["KERNEL"]
    assert sum("are not written" in line["event"] for line in lines) == 2, "once for each process"


@pytest.mark.capability("ST-10")
def test_a_folder_that_belongs_to_another_user_is_a_warning_and_no_forgery(open_folder: Path):
    root = open_folder / "kernels"
    a_store(root).save("KERNEL", FILES)
    root.chmod(0o000)
    with without_rights():
        store = KernelStore(root, b"a key", "triton 3.9.0")
        assert store.load("KERNEL") is None
    root.chmod(0o755)

    assert store.fault == "Permission denied"
    assert store.counts.refused == 0


@pytest.mark.capability("ST-10")
@pytest.mark.parametrize("root", ["nothing/kernels", "file/kernels", "link"])
def test_a_folder_that_cannot_be_made_is_a_warning(tmp_path: Path, root: str):
    (tmp_path / "file").write_text("")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to("elsewhere")

    store = KernelStore(tmp_path / root, b"a key", "triton 3.9.0")

    assert store.fault
    assert store.load("KERNEL") is None
    assert store.counts.refused == 0, "nobody changed a kernel"
    store.save("KERNEL", FILES)
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.capability("ST-10")
def test_a_file_that_cannot_be_written_whole_leaves_nothing(tmp_path: Path):
    store = a_store(tmp_path / "kernels")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (512, before[1]))
        with capture_logs():
            store.save("KERNEL", FILES)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)

    assert store.fault == "File too large"
    assert not [path for path in (tmp_path / "kernels").rglob("*") if path.is_file()]


@pytest.mark.capability("ST-10")
def test_the_folders_that_were_not_used_for_longest_are_evicted(tmp_path: Path):
    root = tmp_path / "kernels"
    large = {"_norm.cubin": bytes(30_000)}
    for age, toolchain in ((3, "oldest"), (2, "older")):
        a_store(root, toolchain=toolchain).save("KERNEL", large)
        folder = next(one for one in root.glob("*/*") if one.stat().st_mtime > 1e9)
        os.utime(folder, (1e6 - age, 1e6 - age))
    store = a_store(root, b"of another service", limit_bytes=100_000)

    store.save("FIRST", large)  # 90 KB and three seals are in use
    assert len(list(root.glob("*/*/*"))) == 3
    store.save("SECOND", large)

    assert a_store(root, toolchain="oldest").load("KERNEL") is None
    assert a_store(root, toolchain="older").load("KERNEL") == large
    assert {path.name for path in root.glob("*/*/*")} == {"KERNEL", "FIRST", "SECOND"}


@pytest.mark.capability("ST-10")
def test_a_store_that_is_full_of_its_own_kernels_stops_writing(tmp_path: Path):
    store = a_store(tmp_path / "kernels", limit_bytes=50_000)
    for kernel in ("A", "B", "C"):
        store.save(kernel, {"_norm.cubin": bytes(30_000)})

    assert store.fault.endswith("of the limit of 50000 are in use")
    assert a_store(tmp_path / "kernels").load("A") is not None
    assert a_store(tmp_path / "kernels").load("B") is None


@pytest.mark.capability("ST-10")
def test_eviction_deletes_nothing_behind_a_link(tmp_path: Path):
    """Whoever may write to the folder must not have a replica delete its own files."""
    root, own = tmp_path / "kernels", tmp_path / "own"
    (own / "triton").mkdir(parents=True)
    (own / "triton" / "file").write_bytes(bytes(10_000))
    store = a_store(root, limit_bytes=5_000)
    (root / "service").symlink_to(own)
    (root / "other").mkdir()
    (root / "other" / "toolchain").symlink_to(own / "triton")
    (root / "other" / "old").mkdir()
    (root / "other" / "old" / "KERNEL").write_bytes(bytes(6_000))

    store.save("KERNEL", FILES)

    assert (own / "triton" / "file").exists()
    assert not (root / "other" / "old").exists()
    assert not store.fault


@pytest.mark.capability("ST-10")
def test_what_a_process_that_ended_left_incomplete_is_deleted(tmp_path: Path):
    root = tmp_path / "kernels"
    a_store(root).save("KERNEL", FILES)
    old, new = (entry(root).with_name(f".incomplete-{name}") for name in ("old", "new"))
    for path in (old, new):
        path.write_bytes(b"half")
    past = old.stat().st_mtime - ABANDONED_SECONDS - 1
    os.utime(old, (past, past))

    a_store(root)

    assert not old.exists()
    assert new.exists(), "its writer may be at work"
