"""The limits of a container are read from both versions of control groups. review/containers.md 4."""

from pathlib import Path

import pytest

from slipway_runtime.cgroups import ContainerLimits, read_limits

UNLIMITED_V1 = "9223372036854771712"


def limits(tmp_path: Path, files: dict[str, str], membership: str = "") -> ContainerLimits:
    """The limits that a machine with these files below /sys/fs/cgroup has."""
    for name, text in files.items():
        file = tmp_path / "cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    (tmp_path / "membership").write_text(membership)
    return read_limits(tmp_path / "cgroup", tmp_path / "membership")


@pytest.mark.parametrize(
    ("files", "memory_left", "processors"),
    [
        ({}, None, None),
        ({"memory.max": "3000", "memory.current": "1000", "cpu.max": "150000 100000"}, 2000, 1.5),
        ({"memory.max": "max", "memory.current": "1000", "cpu.max": "max 100000"}, None, None),
        ({"memory.max": "1000", "memory.current": "3000"}, 0, None),
        ({"memory/memory.limit_in_bytes": "3000", "memory/memory.usage_in_bytes": "1000"}, 2000, None),
        ({"memory/memory.limit_in_bytes": UNLIMITED_V1, "memory/memory.usage_in_bytes": "1000"}, None, None),
        ({"cpu/cpu.cfs_quota_us": "250000", "cpu/cpu.cfs_period_us": "100000"}, None, 2.5),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None, None),
        ({"cpu,cpuacct/cpu.cfs_quota_us": "50000", "cpu,cpuacct/cpu.cfs_period_us": "100000"}, None, 0.5),
        # Half of a pair, or nonsense, limits nothing.
        ({"memory.max": "3000", "cpu.max": "many", "cpu/cpu.cfs_quota_us": "100000"}, None, None),
    ],
)
def test_a_container_sees_its_own_limits(files, memory_left, processors, tmp_path):
    assert limits(tmp_path, files) == ContainerLimits(memory_left, processors)


def test_the_smallest_limit_of_all_levels_counts_in_version_2(tmp_path):
    files = {
        "pod/memory.max": "5000",
        "pod/memory.current": "4000",
        "pod/cpu.max": "400000 100000",
        "pod/server/memory.max": "9000",
        "pod/server/memory.current": "1000",
        "pod/server/cpu.max": "300000 100000",
    }

    assert limits(tmp_path, files, "0::/pod/server\n") == ContainerLimits(1000, 3.0)


def test_the_smallest_limit_of_all_levels_counts_in_version_1(tmp_path):
    files = {
        "memory/memory.limit_in_bytes": UNLIMITED_V1,
        "memory/memory.usage_in_bytes": "7000",
        "memory/pod/memory.limit_in_bytes": "5000",
        "memory/pod/memory.usage_in_bytes": "1000",
        "memory/pod/server/memory.limit_in_bytes": "3000",
        "memory/pod/server/memory.usage_in_bytes": "1000",
        "cpu/pod/cpu.cfs_quota_us": "100000",
        "cpu/pod/cpu.cfs_period_us": "100000",
    }

    assert limits(tmp_path, files, "4:memory:/pod/server\n2:cpu,cpuacct:/pod\n") == ContainerLimits(2000, 1.0)


def test_a_group_that_is_not_below_the_mounted_folder_means_the_folder_itself(tmp_path):
    """A container of version 1 often sees its own group mounted, and the node's path of it in /proc/self/cgroup."""
    files = {"memory/memory.limit_in_bytes": "3000", "memory/memory.usage_in_bytes": "1000"}

    assert limits(tmp_path, files, "4:memory:/kubepods/burstable/pod1/server\n").memory_left == 2000
    assert limits(tmp_path, files, "4:memory:/../../other\n").memory_left == 2000


def test_a_machine_without_control_groups_has_no_limits(tmp_path):
    assert read_limits(tmp_path / "none", tmp_path / "none") == ContainerLimits()
