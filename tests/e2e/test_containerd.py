"""The real node's pure parts: which cgroups it makes, what it lacks, what it builds, its image of one program."""

import json
import re
import tarfile
from pathlib import Path

import pytest

from e2e.cluster.paths import HERE as CLUSTER
from e2e.containerd import archive, build, cgroups, components, images, preflight, tools
from e2e.containerd.cgroups import Hierarchy

V1 = """\
25 22 0:21 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755
26 25 0:22 / /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct
27 25 0:23 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset
28 25 0:24 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
29 25 0:25 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids
30 25 0:26 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd
31 25 0:27 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
"""
V1_MEMBERSHIP = "6:cpu,cpuacct:/\n5:cpuset:/\n4:memory:/jobs/7\n3:pids:/\n1:name=systemd:/session\n0::/\n"
V2 = "26 25 0:22 / /sys/fs/cgroup rw shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"


def test_version_one_gives_a_child_of_our_own_cgroup_in_each_hierarchy():
    found = cgroups.find(V1, V1_MEMBERSHIP)

    assert [hierarchy.options for hierarchy in found] == [
        "cpu,cpuacct", "cpuset", "memory", "pids", "none,name=systemd",
    ]  # fmt: skip
    assert [hierarchy.child("node") for hierarchy in found] == [
        "/sys/fs/cgroup/cpu,cpuacct/node",
        "/sys/fs/cgroup/cpuset/node",
        "/sys/fs/cgroup/memory/jobs/7/node",
        "/sys/fs/cgroup/pids/node",
        "/sys/fs/cgroup/systemd/session/node",
    ]
    assert cgroups.lacking(found) == []


def test_in_a_container_the_mounted_root_is_not_part_of_the_path():
    mounted = "28 25 0:24 /docker/ab /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"

    (found,) = cgroups.find(mounted, "4:memory:/docker/ab/job\n")

    assert found.child("node") == "/sys/fs/cgroup/memory/job/node"
    assert cgroups.lacking((found,)) == ["cpu", "cpuset", "pids"]


def test_version_two_gives_a_child_of_the_root():
    (found,) = cgroups.find(V2, "0::/user.slice/session-1.scope\n")

    assert found.unified
    assert found.child("node") == "/sys/fs/cgroup/node"


def test_on_version_two_processes_are_not_where_the_kubelet_has_children(tmp_path: Path):
    """A cgroup with controllers for its children may not have processes."""
    hierarchy = Hierarchy(str(tmp_path), "", "/")
    (tmp_path / "cgroup.subtree_control").write_text("cpu memory pids\n")

    made = cgroups.create((hierarchy,), "node")

    assert cgroups.lacking((hierarchy,)) == ["cpuset"]
    assert made.roots == (f"{tmp_path}/node",)
    assert made.processes == (f"{tmp_path}/node/parts",)
    cgroups.remove(made.roots)
    assert list(tmp_path.iterdir()) == [tmp_path / "cgroup.subtree_control"]


def test_cgroups_of_a_launcher_that_was_killed_are_removed_and_those_of_a_live_one_stay(tmp_path: Path):
    hierarchy = Hierarchy(str(tmp_path), "memory", "/")
    dead, alive = tmp_path / "slipway-node-4194305-ab", tmp_path / "slipway-node-1-ab"  # above the largest pid
    for folder in (dead / "kubepods" / "pod1", alive):
        folder.mkdir(parents=True)

    cgroups.remove_old((hierarchy,))

    assert list(tmp_path.iterdir()) == [alive]


GOOD = preflight.Machine("Linux", 0, (1 << 41) - 1, True, "nodev\tproc\nnodev\toverlay\n", (), (), (), True)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"system": "Darwin"}, "A real node needs Linux, and this is Darwin: use a virtual machine."),
        ({"user": 1000}, "A real node needs the host's root: run this with sudo or as root, outside user namespaces."),
        ({"all_users": False}, "A real node needs the host's root"),
        ({"capabilities": 1 << 12}, "A real node needs CAP_SYS_ADMIN, CAP_MKNOD: run this in a virtual machine."),
        ({"file_systems": "nodev\tproc\n"}, "The kernel has no overlay file system: run modprobe overlay."),
        ({"without_controllers": ("cpuset",)}, "The cgroup controllers cpuset are not available"),
        ({"commands": ("ip",)}, "The commands ip are missing: install iproute2 and util-linux."),
        (
            {"refused": "a cgroup (Read-only file system)"},
            "The kernel refuses a cgroup (Read-only file system): run this in a virtual machine.",
        ),
        ({"programs": ("runc",), "packages": False}, "The programs runc are missing: install them."),
    ],
)
def test_each_missing_prerequisite_is_one_sentence(changes, sentence):
    (found,) = preflight.missing(preflight.Machine(**(vars(GOOD) | changes)))

    assert found.startswith(sentence)


def test_a_hierarchy_that_takes_no_cgroup_is_a_refusal_and_no_exception(tmp_path):
    nowhere = Hierarchy(str(tmp_path / "missing"), "pids", "/")

    assert "a cgroup (" in preflight._refused((nowhere,))


def test_missing_programs_are_fetched_where_there_is_apt_get():
    assert preflight.missing(preflight.Machine(**(vars(GOOD) | {"programs": ("runc", "nft")}))) == []


def test_nothing_is_fetched_for_a_machine_that_has_the_programs():
    assert tools.ensure({"sh": "dash"}) is None


def test_both_builds_pin_the_same_versions():
    """What they share is then compiled once, and kube-proxy is of the same Kubernetes as the kubelet."""
    pins = []
    for folder in (CLUSTER, build.HERE):
        text = (folder / "go.mod").read_text()
        pins.append(dict(re.findall(r"^\t(\S+) (v\S+)(?: // indirect)?$", text, re.MULTILINE)))
    cluster, node = pins

    moved = {module for module, version in cluster.items() if node.get(module) != version}

    assert moved == {"dario.cat/mergo", "github.com/cpuguy83/go-md2man/v2"}  # containerd requires newer ones
    for program in build.PROGRAMS:
        assert program.startswith("./") or f"\t{program}\n" in (build.HERE / "go.mod").read_text()


def test_the_image_of_one_program_is_a_docker_archive(tmp_path: Path):
    program = tmp_path / "pod"
    program.write_bytes(b"#!/bin/true\n")
    archive.write(tmp_path / "pod.tar", "localhost/pod:1", program, "eat", "5")

    with tarfile.open(tmp_path / "pod.tar") as tar:
        (manifest,) = json.load(tar.extractfile("manifest.json"))
        config = json.load(tar.extractfile(manifest["Config"]))
        with tarfile.open(fileobj=tar.extractfile(manifest["Layers"][0])) as layer:
            modes = {entry.name: entry.mode for entry in layer}

    assert manifest["RepoTags"] == ["localhost/pod:1"]
    assert config["config"] == {"Entrypoint": ["/pod", "eat", "5"], "User": "65532:65532"}
    assert modes == {"pod": 0o755}


def test_the_host_keeps_its_kernel_settings(tmp_path: Path):
    """The kubelet finds the values it wants in files; /proc/sys is read-only but for the network namespace's part."""
    lines = components.mounts(tmp_path, None, cgroups.find(V1, V1_MEMBERSHIP)).splitlines()

    assert lines.index("mount -o remount,bind,ro /proc/sys") < lines.index("mount --bind /proc/sys/net /proc/sys/net")
    for setting in components.KERNEL:
        assert any(line.endswith(f" /proc/sys/{setting}") for line in lines)
    assert "mount -t cgroup -o cpu,cpuacct cgroup /sys/fs/cgroup/cpu,cpuacct" in lines
    assert not any("overlay" in line for line in lines)


def test_images_have_the_names_that_the_chart_asks_for():
    values = (CLUSTER.parent.parent / "charts" / "slipway" / "Chart.yaml").read_text()
    (version,) = re.findall(r'^appVersion: "?([^"\n]+)', values, re.MULTILINE)

    assert images.name_of("operator") == f"docker.io/slipway/operator:{version}"
    assert images.name_of("runtime-cpu") == f"docker.io/slipway/runtime:{version}"


def test_a_derived_image_has_the_layers_of_its_source_and_one_more(tmp_path: Path):
    program, folder = tmp_path / "pod", tmp_path / "model"
    program.write_bytes(b"#!/bin/true\n")
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    archive.write(tmp_path / "pod.tar", "localhost/pod:1", program)
    archive.derive(tmp_path / "pod.tar", tmp_path / "new.tar", "localhost/new:1", ["serve"], {"/opt/model": folder})

    with tarfile.open(tmp_path / "new.tar") as tar:
        (manifest,) = json.load(tar.extractfile("manifest.json"))
        config = json.load(tar.extractfile(manifest["Config"]))
        contents = []
        for name in manifest["Layers"]:
            with tarfile.open(fileobj=tar.extractfile(name)) as layer:
                contents.append(layer.getnames())

    assert manifest["RepoTags"] == ["localhost/new:1"]
    assert config["config"] == {"Entrypoint": ["serve"], "User": "65532:65532"}
    assert len(config["rootfs"]["diff_ids"]) == 2
    assert contents == [["pod"], ["opt/model", "opt/model/config.json"]]


def test_an_image_is_built_again_when_something_that_is_copied_into_it_changed():
    dockerfile = (CLUSTER.parent.parent / "images" / "Dockerfile").read_text()
    lines = re.findall(r"^COPY (?!--from)(.+)$", dockerfile, re.MULTILINE)
    copied = {word.split("/")[0] for line in lines for word in line.split()[:-1]}

    assert copied <= {*images.SOURCES, *images.CODE}
