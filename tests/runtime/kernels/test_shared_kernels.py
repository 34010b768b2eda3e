"""Triton's compiler and the folder that replicas of a node share: what one process compiled, the next one loads."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.kernels.compiling import CARD, KERNELS, compiled, ended, start

ALL = sorted([*KERNELS, "answer"])


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What Triton compiles without a folder, which every other run must get too; and a folder, filled by then.

    Another service has filled its part of the folder `foreign`.
    """
    base = tmp_path_factory.mktemp("kernels")
    (base / "root").mkdir()
    (base / "foreign").mkdir()
    plain, first, other = compiled(
        {"private": str(base / "plain")},
        {"private": str(base / "first"), "root": str(base / "root")},
        {"private": str(base / "other"), "root": str(base / "foreign"), "key": "a foreign key"},
    )
    assert plain["compiled"] == first["compiled"] == other["compiled"] == ALL
    assert first["counts"] == other["counts"] == [len(ALL), 0, 0]
    return plain | {"root": base / "root", "foreign": base / "foreign"}


def got(result: dict[str, Any]) -> tuple[Any, Any]:
    """The code that a run would execute."""
    assert result["private"], "nothing is loaded from the folder itself"
    return result["got"], result["library"]


@pytest.mark.capability("ST-10")
def test_the_second_process_compiles_nothing_and_has_the_same_code(alone, tmp_path: Path):
    """Neither a kernel by Triton nor a library by the C compiler."""
    (second,) = compiled({"private": str(tmp_path), "root": str(alone["root"])})

    assert second["compiled"] == []
    assert second["counts"] == [0, len(ALL), 0]
    assert got(second) == got(alone)


def _replace(path: Path, content: bytes) -> None:
    path.unlink()  # it is read-only
    path.write_bytes(content)


def _change(files: list[Path], foreign: list[Path]) -> None:
    for path in files:
        content = bytearray(path.read_bytes())
        content[-20] ^= 1
        _replace(path, bytes(content))


def _cut(files: list[Path], foreign: list[Path]) -> None:
    for path in files:
        content = path.read_bytes()
        _replace(path, content[: len(content) // 2])


def _exchange(files: list[Path], foreign: list[Path]) -> None:
    """Each file is whole and sealed, and lies under the name of another one."""
    contents = [path.read_bytes() for path in files]
    for path, content in zip(files, contents[1:] + contents[:1], strict=True):
        _replace(path, content)


def _take_foreign(files: list[Path], foreign: list[Path]) -> None:
    """The same kernels, sealed by another service."""
    for path, other in zip(files, foreign, strict=True):
        assert path.name == other.name
        _replace(path, other.read_bytes())


@pytest.mark.capability("ST-10")
def test_bad_files_are_compiled_anew_and_replaced(alone, tmp_path: Path):
    harms = (_change, _cut, _exchange, _take_foreign)
    runs = []
    for harm in harms:
        root = tmp_path / harm.__name__
        shutil.copytree(alone["root"], root)
        harm(sorted(root.glob("*/*/*")), sorted(alone["foreign"].glob("*/*/*")))
        runs += [{"private": str(tmp_path / f"{harm.__name__}-{n}"), "root": str(root)} for n in (1, 2)]

    results = compiled(*runs)

    for harmed, after in zip(results[::2], results[1::2], strict=True):
        assert harmed["compiled"] == ALL
        assert harmed["counts"] == [len(ALL), 0, len(ALL)]
        assert after["compiled"] == [], "the next start shares again"
        assert got(harmed) == got(after) == got(alone)


@pytest.mark.capability("ST-10")
def test_other_versions_and_cards_share_nothing_and_a_missing_folder_harms_nothing(alone, tmp_path: Path):
    root = tmp_path / "root"
    shutil.copytree(alone["root"], root)
    runs = [
        {"root": str(root), "triton": "3.8.0"},
        {"root": str(root), "card": CARD.replace("H100", "H200")},
        {"root": "/proc/slipway-kernels"},
    ]

    results = compiled(*({"private": str(tmp_path / str(n))} | run for n, run in enumerate(runs)))

    for result in results:
        assert result["compiled"] == ALL
        assert result["counts"] == [len(ALL), 0, 0]
        assert got(result) == got(alone)
    assert [bool(result["fault"]) for result in results] == [False, False, True]


@pytest.mark.capability("ST-10")
def test_two_processes_that_start_together_leave_whole_files(alone, tmp_path: Path):
    root = tmp_path / "root"
    root.mkdir()
    pair = [start({"private": str(tmp_path / name), "root": str(root)}) for name in ("a", "b")]
    results = [result for one in pair for result in ended(one)]

    (third,) = compiled({"private": str(tmp_path / "c"), "root": str(root)})

    assert third["compiled"] == []
    assert all(got(result) == got(alone) for result in (*results, third))
    assert all(result["counts"][2] == 0 for result in results)
    assert len(list(root.glob("*/*/*"))) == len(ALL)
