"""A real node: kubelet, containerd, runc and CNI run a pod as any cluster does, and leave nothing on the machine."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster.paths import CHECKOUT
from e2e.containerd import cgroups
from e2e.containerd.components import SANDBOX_IMAGE
from e2e.containerd.machine import KEPT, Machine
from e2e.slipway import wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.containers, pytest.mark.timeout(300)]

RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
}
SETTINGS = ("kernel/panic", "kernel/panic_on_oops", "vm/overcommit_memory", "net/ipv4/ip_forward")
LAUNCHER = """
import json, signal, sys
from pathlib import Path
from e2e.containerd.machine import Machine
with Machine(folder=Path(sys.argv[1])) as machine:
    print(json.dumps({"pids": machine.pids, "cgroups": machine.cgroups}), flush=True)
    signal.pause()
"""
ARBITRARY_USER = 1000660000  # as OpenShift assigns them


def pod(name: str, *args: str, memory: str = "32Mi", **labels: str) -> dict[str, Any]:
    """A pod of the node's own image, allowed in a namespace that enforces Pod Security `restricted`."""
    security = {"runAsNonRoot": True, "runAsUser": ARBITRARY_USER, "seccompProfile": {"type": "RuntimeDefault"}}
    container = {"name": "main", "image": SANDBOX_IMAGE, "imagePullPolicy": "Never", "args": list(args)}
    container |= {"securityContext": RESTRICTED, "resources": {"limits": {"memory": memory, "cpu": "100m"}}}
    spec = {"containers": [container], "securityContext": security, "restartPolicy": "Never"}
    spec |= {"terminationGracePeriodSeconds": 1, "automountServiceAccountToken": False}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": spec}


def traces(machine: Machine) -> dict[str, list[str]]:
    """What exists on the host only because of this machine."""
    kinds = ("cgroup", "ipc", "mnt", "net", "pid", "uts")
    namespaces = {os.readlink(f"/proc/{pid}/ns/{kind}") for pid in machine.pids for kind in kinds}
    return {"namespaces": sorted(namespaces), "cgroups": machine.cgroups}


def host() -> dict[str, Any]:
    """What a node must not change on the host."""
    return {
        "mounts": Path("/proc/self/mountinfo").read_text(),
        "interfaces": sorted(os.listdir("/sys/class/net")),
        "settings": {name: Path("/proc/sys", name).read_text() for name in SETTINGS},
        "folders": [path for path in ("/run/containerd", "/var/lib/kubelet", "/etc/cni") if os.path.exists(path)],
    }


def users_of(namespaces: list[str]) -> list[str]:
    """Processes that are in one of these namespaces."""
    found = []
    for process in filter(str.isdigit, os.listdir("/proc")):
        for kind in ("mnt", "net", "pid"):
            try:
                if os.readlink(f"/proc/{process}/ns/{kind}") in namespaces:
                    found.append(f"{process} {kind}")
            except OSError:  # it has ended
                break
    return found


@pytest.mark.capability("REL-3")
def test_a_pod_runs_restricted_in_a_real_container_and_nothing_is_left_behind(
    real_containers: None, tmp_path: Path
) -> None:
    before = host()

    with Machine(folder=tmp_path / "node") as machine:
        namespace = machine.create_namespace(restricted=True)
        machine.kubectl("apply", "-n", namespace, "-f", "-", stdin=json.dumps(pod("server", "serve", ":8000")))
        machine.kubectl("wait", "-n", namespace, "pod/server", "--for=condition=Ready", "--timeout=60s")
        status = machine.api("GET", f"/api/v1/namespaces/{namespace}/pods/server")["status"]
        asked = machine.kubectl(
            "exec", "-n", namespace, "server", "--", "/pod", "get", f"http://{status['podIP']}:8000/"
        )
        kept = traces(machine)
        assert users_of(kept["namespaces"]), "there is something to leave behind"

    assert status["containerStatuses"][0]["containerID"].startswith("containerd://")
    assert "200 " in asked
    assert f"uid: {ARBITRARY_USER}\n" in asked
    assert "CapEff: 0000000000000000\n" in asked
    assert "NoNewPrivs: 1\n" in asked
    assert "Seccomp: 2\n" in asked
    assert "write: open /written: read-only file system\n" in asked
    assert users_of(kept["namespaces"]) == []
    assert [folder for folder in kept["cgroups"] if os.path.exists(folder)] == []
    assert set(os.listdir(tmp_path / "node")) <= KEPT
    assert host() == before


@pytest.mark.full
@pytest.mark.capability("REL-3")
def test_a_killed_launcher_leaves_no_process_and_the_next_start_removes_its_cgroups(
    real_containers: None, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", LAUNCHER, str(tmp_path / "node")]
    with subprocess.Popen(command, cwd=CHECKOUT, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        started = json.loads(launcher.stdout.readline())
        (pid,) = started["pids"]
        namespaces = [os.readlink(f"/proc/{pid}/ns/{kind}") for kind in ("mnt", "net", "pid")]
        launcher.send_signal(signal.SIGKILL)

    assert wait_for("no process is left", lambda: users_of(namespaces) == [], timeout=20)
    assert all(os.path.exists(folder) for folder in started["cgroups"]), "nobody was there to remove them"
    cgroups.remove_old(cgroups.of_this_process())
    assert [folder for folder in started["cgroups"] if os.path.exists(folder)] == []
