"""Threads for computing: what the container is given, never more than there are cores."""

import pytest

from slipway_runtime.loading import compute_threads


def cpuinfo(processors: int, *, threads_per_core: int) -> str:
    return "\n\n".join(
        f"processor\t: {n}\nphysical id\t: 0\ncore id\t\t: {n // threads_per_core}" for n in range(processors)
    )


@pytest.mark.parametrize(
    ("quota", "processors", "threads_per_core", "threads"),
    [
        ("max 100000", 2, 1, 2),
        ("max 100000", 16, 2, 7),  # 8 cores, one of them for everything else
        ("150000 100000", 16, 2, 1),
        ("300000 100000", 16, 2, 3),
        ("1600000 100000", 16, 2, 7),
        ("50000 100000", 2, 1, 1),
        (None, 2, 2, 1),
    ],
)
def test_a_quota_and_the_cores_bound_the_threads(quota, processors, threads_per_core, threads, tmp_path):
    if quota is not None:
        (tmp_path / "cpu.max").write_text(quota + "\n")
    (tmp_path / "cpuinfo").write_text(cpuinfo(processors, threads_per_core=threads_per_core))
    found = compute_threads(tmp_path / "cpu.max", tmp_path / "cpuinfo", frozenset(range(processors)))
    assert found == threads


def test_a_process_bound_to_some_processors_counts_only_those(tmp_path):
    (tmp_path / "cpuinfo").write_text(cpuinfo(8, threads_per_core=1))
    assert compute_threads(tmp_path / "none", tmp_path / "cpuinfo", frozenset({1, 5})) == 2
