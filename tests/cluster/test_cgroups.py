"""Cgroups of a real node on this machine's own hierarchies: what its processes see, and that nothing stays."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from e2e.cluster.namespaces import Space
from e2e.containerd import cgroups
from e2e.containerd.cgroups import Hierarchy

pytestmark = [pytest.mark.cluster, pytest.mark.skipif(os.geteuid() != 0, reason="cgroups are made by root")]


def seen_inside(hierarchies: tuple[Hierarchy, ...], name: str, command: str) -> str:
    """What a command prints in a space of its own with cgroups in these hierarchies; they are removed after it."""
    made = cgroups.create(hierarchies, name)
    space = None
    try:
        space = Space(None, {}, [], "", made)
        return subprocess.run([*space.enter, "sh", "-c", command], capture_output=True, text=True, check=True).stdout
    finally:
        if space:
            space.close()
        cgroups.remove(made.roots)


def test_a_space_is_the_root_of_its_own_cgroups():
    hierarchies = cgroups.of_this_process()
    if not hierarchies:
        pytest.skip("no hierarchy of cgroups is mounted")
    name = f"{cgroups.PREFIX}{os.getpid()}-test"

    seen = seen_inside(hierarchies, name, "cat /proc/self/cgroup; cat /proc/sys/kernel/hostname")

    paths = {line.split(":")[2] for line in seen.splitlines() if line.count(":") == 2}
    assert paths <= {"/", f"/{cgroups.LEAF}"}
    assert [hierarchy for hierarchy in hierarchies if os.path.exists(hierarchy.child(name))] == []


def test_on_version_two_processes_are_below_the_root_that_they_see():
    """Also on a machine whose controllers are all in version 1: its unified hierarchy has none, and the same rules."""
    mounted = re.search(r"^\S+ \S+ \S+ / (\S+) .* - cgroup2 ", Path("/proc/self/mountinfo").read_text(), re.MULTILINE)
    if mounted is None:
        pytest.skip("no hierarchy of version 2 is mounted")
    hierarchy, name = Hierarchy(mounted[1], "", "/"), f"{cgroups.PREFIX}{os.getpid()}-test"

    seen = seen_inside(
        (hierarchy,),
        name,
        "grep ^0:: /proc/self/cgroup; mount -t tmpfs tmpfs /mnt; mkdir /mnt/c; mount -t cgroup2 cgroup2 /mnt/c;"
        " ls -d /mnt/c/*/; mkdir /mnt/c/kubepods; cat /mnt/c/cgroup.procs; echo;"
        f" cat /mnt/c/{cgroups.LEAF}/cgroup.procs",
    )

    first, second, *processes = seen.splitlines()
    assert first == f"0::/{cgroups.LEAF}"
    assert second == f"/mnt/c/{cgroups.LEAF}/"
    assert processes[0] == "", "the root has no process, so that it may have children with controllers"
    assert len(processes) > 2
    assert not os.path.exists(hierarchy.child(name))
