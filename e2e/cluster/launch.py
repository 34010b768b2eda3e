"""Start and stop a real Kubernetes cluster of local processes.

    python launch.py [--port N] [--folder F]    run a cluster until Ctrl-C

As a library: `with Cluster(...) as cluster:` and then `cluster.kubeconfig`. The caller
must be root, to write the id maps of a user namespace; nothing of the cluster runs as
host root. When the caller ends, however it ends, the whole cluster ends with it.

    host                        services.py's listening socket, 127.0.0.1:<port>
    └─ cluster (user, net, mount, pid namespace)
       etcd, kube-apiserver, controller manager, scheduler, services.py
       ├─ node-a (net, mount, pid namespace): kubelet, cri.py, stream, device_plugin.py
       │  └─ pods (net namespace each) └─ containers (mount, pid, UTS, IPC namespace each)
       └─ node-b ...
"""

import argparse
import fcntl
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import components
import pki
import stubs
from components import API_IP, API_PORT, IN_CLUSTER_URL, SERVICE_RANGE, Node
from namespaces import FIRST_ID, Program, Space, closed_ancestors

HERE = Path(__file__).resolve().parent
COVERS = {"/tmp": 0o1777, "/run": 0o755, "/var/lib": 0o755, "/var/log": 0o755}


def cache_folder() -> Path:
    """Where builds and running clusters live; the same rule as in build.sh."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slipway"
    return Path(os.environ.get("SLIPWAY_CACHE", default)).resolve()


class Cluster:
    """One cluster; `nodes` maps a node's name to the number of its GPUs."""

    def __init__(self, nodes: dict[str, int] | None = None, folder: Path | None = None, port: int = 0) -> None:
        nodes = nodes or {"node-a": 8, "node-b": 8}
        self.nodes = {name: Node(name, index, gpus) for index, (name, gpus) in enumerate(nodes.items(), start=1)}
        self.folder = (folder or cache_folder() / "cluster").resolve()
        self.kubeconfig = self.folder / "admin.kubeconfig"  # for clients on the host
        self.programs: dict[str, Program] = {}
        self._port = port
        self._lock: TextIO | None = None
        self._spaces: dict[str, Space] = {}  # "cluster", and each running node

    def __enter__(self) -> "Cluster":
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Return when the API server is ready; the nodes register on their own."""
        if os.geteuid():
            raise SystemExit("run as root: mapping a range of user ids needs it, once, at the start")
        build = Path(subprocess.run([HERE / "build.sh"], check=True, stdout=subprocess.PIPE, text=True).stdout.strip())
        self._binary, self._stubs = build / "controlplane", stubs.generate(build)
        self._claim_folder()
        self._write_identities()
        self._start_cluster_space()
        self._start("cluster", "etcd", components.etcd(self._binary, self._pki))
        self._start("cluster", "kube-apiserver", components.apiserver(self._binary, self._pki, self._config))
        self._start_services()
        for name in self.nodes:
            self._start_node_space(name)
        self._wait_for(self._api_ready, "the API server", limit=120)
        manager = components.controller_manager(self._binary, self._pki, self._config)
        self._start("cluster", "kube-controller-manager", manager)
        self._start("cluster", "kube-scheduler", components.scheduler(self._binary, self._config))
        for name in self.nodes:
            self.start_kubelet(name)

    def stop(self) -> None:
        """End every process; namespaces, mounts and interfaces go with them."""
        if cluster := self._spaces.pop("cluster", None):
            cluster.close()
        for space in self._spaces.values():
            space.close()
        self._spaces.clear()
        self.programs.clear()
        if self._lock:
            self._lock.close()

    def start_kubelet(self, node: str) -> None:
        """Start a node's kubelet; to restart one, first `stop_kubelet`."""
        runtime = self._spaces[node].path("/run/cri.sock")  # the kubelet gives up at once without it
        self._wait_for(runtime.exists, f"the runtime of {node}", limit=30)
        argv = components.kubelet(self._binary, self._pki, self._config, self.nodes[node])
        self._start(node, f"kubelet/{node}", argv)

    def stop_kubelet(self, node: str, how: int = signal.SIGKILL) -> None:
        """End a node's kubelet and leave its pods running."""
        self.programs.pop(f"kubelet/{node}").stop(how)

    def kill_node(self, node: str) -> None:
        """A node loses power: kubelet, runtime and pods are gone at once, without a word."""
        self._spaces.pop(node).close()
        self.programs = {name: program for name, program in self.programs.items() if not name.endswith(f"/{node}")}

    def start_node(self, node: str) -> None:
        """The node comes back, with an empty disk."""
        self._start_node_space(node)
        self.start_kubelet(node)

    def cut_node(self, node: str, cut: bool = True) -> None:
        """Take the node off the network, or put it back; its pods run on."""
        self._spaces["cluster"].run(f"ip link set {self._links[node]} {'down' if cut else 'up'}")

    def enter(self, space: str = "cluster") -> list[str]:
        """Command prefix that runs a program in the cluster's namespaces, or a node's."""
        return self._spaces[space].enter

    def _claim_folder(self) -> None:
        """Empty the folder of the last cluster, and make sure nobody else runs one here."""
        mine = self.folder / ".cluster"
        if self.folder.exists() and any(self.folder.iterdir()) and not mine.exists():
            raise SystemExit(f"{self.folder} has other things in it; give the cluster a folder of its own")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = (self.folder.parent / f"{self.folder.name}.lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit(f"a cluster is running in {self.folder} already") from None
        shutil.rmtree(self.folder)
        self._pki, self._config, self._logs = (self.folder / name for name in ("pki", "config", "logs"))
        for folder in (self._config, self._logs):
            folder.mkdir(parents=True)
        mine.touch()

    def _write_identities(self) -> None:
        pki.create(
            self._pki,
            api_ips=["127.0.0.1", API_IP, "10.96.0.1"],
            nodes={node.name: node.ip for node in self.nodes.values()},
        )
        for user in ("kube-controller-manager", "kube-scheduler", *self.nodes):
            (self._config / f"{user}.kubeconfig").write_text(pki.kubeconfig(self._pki, user, IN_CLUSTER_URL))
        self._listener = socket.create_server(("127.0.0.1", self._port))
        self._host_url = f"https://127.0.0.1:{self._listener.getsockname()[1]}"
        self.kubeconfig.write_text(pki.kubeconfig(self._pki, "admin", self._host_url))
        self.kubeconfig.chmod(0o600)
        for path in (self.folder, *self.folder.rglob("*")):
            os.chown(path, FIRST_ID, FIRST_ID)

    def _start_cluster_space(self) -> None:
        self._keeps = _outermost(str(path) for path in (HERE, cache_folder(), self.folder, sys.prefix, sys.base_prefix))
        covers = dict.fromkeys(closed_ancestors(self._keeps), 0o755) | COVERS
        self._spaces["cluster"] = Space(
            None,
            covers,
            self._keeps,
            f"""
            ip link set lo up
            ip link add nodes0 type bridge
            ip addr add {API_IP}/24 dev nodes0
            ip link set nodes0 up
            ip route add local {SERVICE_RANGE} dev lo
            echo 1 > /proc/sys/net/ipv4/ip_forward
            """,
        )
        self._links: dict[str, str] = {}

    def _start_services(self) -> None:
        fd = self._listener.fileno()
        argv = [sys.executable, str(HERE / "services.py"), f"--api={IN_CLUSTER_URL}", f"--pki={self._pki}"]
        self._start("cluster", "services", [*argv, f"--publish={fd}={API_IP}:{API_PORT}"], pass_fds=[fd])
        self._listener.close()  # services.py has it now

    def _start_node_space(self, name: str) -> None:
        node, cluster = self.nodes[name], self._spaces["cluster"]
        space = self._spaces[name] = Space(cluster, COVERS, self._keeps)
        link = self._links[name] = f"{name[:10]}-{os.urandom(2).hex()}"  # the old one may take a moment to go
        cluster.run(
            f"""
            ip link add {link} type veth peer name eth0 netns {space.pid_in_parent}
            ip link set {link} master nodes0 up
            ip route replace {node.pod_range} via {node.ip}
            """
        )
        space.run(
            f"""
            ip link set lo up
            ip addr add {node.ip}/24 dev eth0
            ip link set eth0 up
            ip route add default via {API_IP}
            ip link add pods0 type bridge
            ip addr add {node.pod_gateway}/24 dev pods0
            ip link set pods0 up
            echo 1 > /proc/sys/net/ipv4/ip_forward
            """
        )
        runtime = [sys.executable, str(HERE / "cri.py"), f"--node-index={node.index}"]
        self._start(name, f"cri/{name}", [*runtime, f"--images={HERE}/images.yaml", "--root=/run/containers"])
        self._start(name, f"stream/{name}", [str(self._binary), "stream", "--socket=/run/stream.sock"])
        gpus = [sys.executable, str(HERE / "device_plugin.py"), str(node.gpus)]
        self._start(name, f"device-plugin/{name}", gpus)

    def _start(self, space: str, name: str, argv: list[str], **popen: object) -> None:
        environment = {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/tmp",
            "PYTHONPATH": str(self._stubs),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        with (self._logs / f"{name.replace('/', '-')}.log").open("ab") as log:
            program = self._spaces[space].start(argv, env=environment, stdout=log, stderr=log, cwd="/", **popen)
        self.programs[name] = program

    def _wait_for(self, condition: Callable[[], bool], what: str, limit: float) -> None:
        deadline = time.monotonic() + limit
        while not condition():
            ended = [name for name, program in self.programs.items() if not program.alive]
            if ended or time.monotonic() > deadline:
                reason = f"{', '.join(ended)} ended" if ended else f"not within {limit:.0f} s"
                raise RuntimeError(f"{what} is not ready: {reason}; see {self._logs}")
            time.sleep(0.02)

    def _api_ready(self) -> bool:
        trust = ssl.create_default_context(cafile=self._pki / "ca.crt")
        try:
            return urllib.request.urlopen(f"{self._host_url}/readyz", context=trust, timeout=5).status == 200
        except OSError:
            return False


def _outermost(paths) -> list[str]:
    """The paths that are not below another one of them."""
    paths = {str(Path(path).resolve()) for path in paths}
    return sorted(p for p in paths if not any(p.startswith(other + "/") for other in paths))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0, help="port of the API server on the host (default: any)")
    parser.add_argument("--folder", type=Path, help="state and logs; give a second cluster its own")
    options = parser.parse_args()
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, lambda *_: sys.exit(0))
    began = time.monotonic()
    with Cluster(folder=options.folder, port=options.port) as cluster:
        print(f"ready after {time.monotonic() - began:.1f} s; stop with Ctrl-C", flush=True)
        print(f"export KUBECONFIG={cluster.kubeconfig}", flush=True)
        signal.pause()


if __name__ == "__main__":
    main()
