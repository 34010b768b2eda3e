"""Clusters come and go, by whatever end, and leave nothing behind."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster.launch import Cluster
from e2e.cluster.paths import CHECKOUT
from tests.cluster.pods import Pods, container, pod, wait_until

FROM_SHELL = [sys.executable, "-m", "e2e.cluster"]
LAUNCHER = """
import signal, sys
from pathlib import Path
from e2e.cluster.launch import Cluster
signal.signal(signal.SIGINT, signal.default_int_handler)
with Cluster(light=True, folder=Path(sys.argv[1])):
    print("ready", flush=True)
    signal.pause()
"""


def host_state() -> dict[str, Any]:
    """What a cluster must not change on the host."""
    names = (
        "vm/overcommit_memory",
        "vm/panic_on_oom",
        "kernel/panic",
        "kernel/panic_on_oops",
        "kernel/keys/root_maxkeys",
        "kernel/keys/root_maxbytes",
        "net/ipv4/ip_forward",
    )
    folders = ("/var/lib/kubelet", "/usr/libexec/kubernetes", "/run/netns", "/var/lib/etcd")
    return {
        "mounts": Path("/proc/self/mountinfo").read_text(),
        "interfaces": sorted(os.listdir("/sys/class/net")),
        "settings": {name: Path("/proc/sys", name).read_text() for name in names},
        "folders": [folder for folder in folders if os.path.exists(folder)],
    }


def users_of(pid: int) -> str:
    """The user namespace of a process."""
    return os.readlink(f"/proc/{pid}/ns/user")


def processes_in(users: str) -> list[int]:
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if users_of(int(pid)) == users:
                found.append(int(pid))
    return found


@pytest.mark.cluster
def test_a_stopped_cluster_leaves_nothing_on_the_host(tmp_path: Path) -> None:
    before = host_state()

    with Cluster(nodes={"node-a": 8}, folder=tmp_path / "cluster") as cluster:
        cluster.wait_for_nodes()
        pods = Pods(cluster)
        pods.create(pod("busy", container(args=("-c", "while :; do sleep 1; done"))))
        pods.ready("busy")
        users = users_of(cluster.processes_of(pods.namespace, "busy")[0])
        assert len(processes_in(users)) > 8

    assert processes_in(users) == []
    assert host_state() == before


@pytest.mark.apiserver
@pytest.mark.timeout(120)
def test_a_component_that_hangs_goes_on_and_a_cluster_with_one_that_hangs_can_be_stopped(tmp_path: Path) -> None:
    def is_stopped(pid: int) -> bool:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    with Cluster(light=True, folder=tmp_path / "cluster") as cluster:
        pid = cluster.programs["kube-apiserver"].pid
        nsenter = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        cluster.signal_program("kube-apiserver", signal.SIGSTOP)
        wait_until(lambda: is_stopped(pid) and is_stopped(nsenter))
        cluster.signal_program("kube-apiserver", signal.SIGCONT)
        wait_until(lambda: not is_stopped(pid) and not is_stopped(nsenter))
        assert cluster.api("GET", "/api")["versions"] == ["v1"]

        cluster.signal_program("kube-apiserver", signal.SIGSTOP)
        wait_until(lambda: is_stopped(nsenter))
        users = users_of(pid)

    assert processes_in(users) == []
    assert not Path(f"/proc/{nsenter}").exists()


@pytest.mark.apiserver
@pytest.mark.parametrize(("how", "when"), [(signal.SIGKILL, "ready"), (signal.SIGINT, "starting")])
def test_a_cluster_ends_with_its_launcher_and_the_next_one_starts(tmp_path: Path, how: int, when: str) -> None:
    folder = tmp_path / "cluster"
    command = [sys.executable, "-c", LAUNCHER, str(folder)]
    with subprocess.Popen(command, cwd=CHECKOUT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as launcher:
        namespaces = wait_until(lambda: _namespaces(folder))
        users = users_of(namespaces)
        if when == "ready":
            assert launcher.stdout is not None
            assert launcher.stdout.readline() == b"ready\n"
        launcher.send_signal(how)

    wait_until(lambda: not processes_in(users), limit=10)
    with Cluster(light=True, folder=folder) as cluster:
        assert cluster.api("GET", "/version")["gitVersion"].startswith("v1.36.")


def _namespaces(folder: Path) -> int | None:
    """The pid that the launcher wrote down for its namespaces."""
    try:
        written = json.loads((folder.parent / f"{folder.name}.pid").read_text())
        return int(written["namespaces"]["pid"])
    except (OSError, ValueError, KeyError):
        return None


@pytest.mark.cluster
def test_a_cluster_in_the_background_runs_until_it_is_stopped(tmp_path: Path) -> None:
    def shell(*args: str) -> str:
        command = [*FROM_SHELL, f"--folder={tmp_path / 'cluster'}", *args]
        return subprocess.run(command, cwd=CHECKOUT, check=True, capture_output=True, text=True, timeout=120).stdout

    try:
        said = shell("up", "--detach")
        assert f"KUBECONFIG={tmp_path}/cluster/admin.kubeconfig" in said
        assert shell("kubectl", "get", "nodes", "-o", "name").split() == ["node/node-a", "node/node-b"]
        assert shell("helm", "version", "--short").startswith("v4.2")
        namespaces = _namespaces(tmp_path / "cluster")
        assert namespaces is not None
        users = users_of(namespaces)
    finally:
        assert shell("stop") == "stopped\n"

    assert processes_in(users) == []
    assert shell("stop") == "nothing was running\n"


@pytest.mark.apiserver
def test_an_older_release_can_be_emulated(tmp_path: Path) -> None:
    with Cluster(light=True, folder=tmp_path / "cluster", emulated_version="1.34") as cluster:
        assert cluster.api("GET", "/version")["emulationMinor"] == "34"


@pytest.mark.apiserver
def test_controllers_can_be_added_to_the_light_cluster(apiserver: Cluster) -> None:
    namespace = apiserver.create_namespace()

    apiserver.start_controllers()

    wait_until(lambda: "default" in apiserver.kubectl("get", "serviceaccounts", "-n", namespace, "-o", "name"))
