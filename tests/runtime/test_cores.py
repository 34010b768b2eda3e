"""Threads for computing: what the container is given, never more than there are cores."""

import pytest

from slipway_runtime.cgroups import ContainerLimits
from slipway_runtime.loading import compute_threads


def cpuinfo(processors: int, *, threads_per_core: int) -> str:
    return "\n\n".join(
        f"processor\t: {n}\nphysical id\t: 0\ncore id\t\t: {n // threads_per_core}" for n in range(processors)
    )


@pytest.mark.parametrize(
    ("quota", "processors", "threads_per_core", "threads"),
    [
        (None, 2, 1, 2),
        (None, 16, 2, 7),  # 8 cores, one of them for everything else
        (1.5, 16, 2, 1),
        (3.0, 16, 2, 3),
        (16.0, 16, 2, 7),
        (0.5, 2, 1, 1),
        (None, 2, 2, 1),
    ],
)
def test_a_quota_and_the_cores_bound_the_threads(quota, processors, threads_per_core, threads, tmp_path):
    (tmp_path / "cpuinfo").write_text(cpuinfo(processors, threads_per_core=threads_per_core))
    found = compute_threads(ContainerLimits(processors=quota), tmp_path / "cpuinfo", frozenset(range(processors)))
    assert found == threads


def test_a_process_bound_to_some_processors_counts_only_those(tmp_path):
    (tmp_path / "cpuinfo").write_text(cpuinfo(8, threads_per_core=1))
    assert compute_threads(ContainerLimits(), tmp_path / "cpuinfo", frozenset({1, 5})) == 2
