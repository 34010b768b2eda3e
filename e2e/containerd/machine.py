"""Starts and stops real Kubernetes nodes, with their control plane, in private namespaces of this machine.

    with Machine() as machine:
        machine.import_image(archive)
        machine.kubectl("run", ...)

    host                        127.0.0.1:<port>: listening sockets handed to e2e/cluster/services.py
    ├─ node-a (net, mount, pid, IPC, UTS, cgroup namespace; its root is the host's root)
    │  etcd, kube-apiserver, controller manager, scheduler, and kubelet, kube-proxy, kube-router, containerd
    │  └─ pods: containers of runc, with cgroups, seccomp and a network by CNI
    └─ node-b (the same namespaces, a veth pair to node-a): kubelet, kube-proxy, kube-router, containerd, pods

The caller must be root. When the caller ends, however it ends, all processes and mounts end with it; `stop` also
removes the cgroups and folders. After a `kill -9` of the caller, the next start removes those.
"""

import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from e2e.cluster import build as cluster_build
from e2e.cluster import components, pki
from e2e.cluster.access import Access
from e2e.cluster.components import API_IP, API_PORT, IN_CLUSTER_URL, Node
from e2e.cluster.launcher_lock import LauncherLock
from e2e.cluster.namespaces import Cgroups, Program, Space, outermost
from e2e.cluster.paths import CHECKOUT, SYSTEM_PATH, cache_folder, cluster_folder
from e2e.containerd import archive, build, cgroups, preflight, tools
from e2e.containerd import components as real

COVERS = {"/tmp": 0o1777, "/run": 0o755, "/var/lib": 0o755, "/var/log": 0o755}
NAMES = ("node-a", "node-b")
IDENTITIES = {name: name for name in ("kube-controller-manager", "kube-scheduler", "kube-proxy", *NAMES)}
IDENTITIES["kube-router"] = "admin"
KEPT = {"logs", ".cluster"}  # in the folder, after `stop`


class MissingError(RuntimeError):
    """This machine cannot run a real node; the message has one sentence for each reason."""


class Machine(Access):
    """One or two nodes and their control plane, from `start` to `stop`; better used as a context manager.

    `policies` starts the engine that enforces NetworkPolicies, on each node.
    """

    def __init__(self, *, folder: Path | None = None, nodes: int = 1, policies: bool = False) -> None:
        super().__init__(folder or cluster_folder("containerd"))
        self.programs: dict[str, Program] = {}
        self._policies = policies
        self._ports: dict[str, int] = {}
        self._lock: LauncherLock | None = None
        self._nodes = [Node(name, index, 0) for index, name in enumerate(NAMES[:nodes], start=1)]
        self._spaces: dict[str, Space] = {}  # of each node that has been started
        self._cgroups: dict[str, Cgroups] = {}

    def __enter__(self) -> "Machine":
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # Start and stop.

    def start(self) -> None:
        """Return when the node is Ready; raises MissingError or ToolsMissingError if the machine lacks something."""
        if sentences := preflight.missing(preflight.this_machine()):
            raise MissingError(" ".join(sentences))
        self._programs = build.ensure() / "bin"
        self._build = cluster_build.ensure()
        tools_root = tools.ensure(tools.NODE)
        self._lock = LauncherLock(self.folder)
        self._pki, self._config = self.folder / "pki", self.folder / "config"
        for folder in (self._config, self.logs, self.folder / "home"):
            folder.mkdir()
        api = socket.create_server(("127.0.0.1", 0), backlog=512)
        self._ports["api"] = api.getsockname()[1]
        self._write_identities()
        cgroups.remove_old(cgroups.of_this_process())
        for node in self._nodes:
            self._start_space(node, tools_root)
        self._start_control_plane(api)
        for node in self._nodes:
            self._start_node(node)
        self._wait_for(self._nodes_ready, "every node", limit=120)
        if self._policies:
            for node in self._nodes:
                argv = real.kube_router(self._programs, self._config, node)
                self._start(f"kube-router/{node.name}", argv, node.name)

    def stop(self) -> None:
        """End every process, then remove the cgroups and all folders but the logs."""
        for space in self._spaces.values():
            space.close()
        self._spaces.clear()
        self.programs.clear()
        for made in self._cgroups.values():
            cgroups.remove(made.roots)
        self._cgroups.clear()
        if self._lock:
            for entry in self.folder.iterdir():
                if entry.is_dir() and entry.name not in KEPT:
                    shutil.rmtree(entry)
                elif entry.name not in KEPT:
                    entry.unlink()
            self._lock.release()
            self._lock = None

    @property
    def ended(self) -> list[str]:
        """Programs that ended without having been stopped."""
        return [name for name, program in self.programs.items() if not program.alive]

    # Use.

    @property
    def tools(self) -> Path:
        """Folder with the commands `kubectl` and `helm`."""
        return self._build / "bin"

    def port(self, published: str) -> int:
        """The port on 127.0.0.1 of something published."""
        return self._ports[published]

    def publish(self, name: str, ip: str, port: int) -> None:
        """Make an address of the node's network, such as a ClusterIP, reachable at 127.0.0.1:`port(name)`."""
        with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
            self._ports[name] = listener.getsockname()[1]
            self._start_services(f"services-{name}", listener, (ip, port))

    def import_image(self, path: Path, node: str | None = None, timeout: float = 600) -> None:
        """Import the images of a docker archive into the containerd of a node, or of every node."""
        ctr = [str(self._programs / "ctr"), f"--address={real.SOCKET}", "--namespace=k8s.io"]
        for name in [node] if node else self._spaces:
            self.run(*ctr, "images", "import", "--local", path, node=name, timeout=timeout)

    def import_program(self, image: str, *arguments: str) -> None:
        """Import an image whose entrypoint is `pod`, the program of pod/main.go, with these arguments."""
        path = self.folder / "program.tar"
        archive.write(path, image, self._programs / "pod", *arguments)
        self.import_image(path)

    @property
    def sandbox_archive(self) -> Path:
        """The archive of the image with `pod` alone."""
        return self.folder / "sandbox.tar"

    def run(self, *argv: str | Path, node: str = NAMES[0], timeout: float = 60) -> str:
        """Run a command in a node's namespaces and return its output; raise when it fails."""
        command = [*self._spaces[node].enter, *map(str, argv)]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=timeout).stdout

    @property
    def pids(self) -> list[int]:
        """The init process of each node, as a pid of the host."""
        return [space.pid for space in self._spaces.values()]

    @property
    def cgroups(self) -> list[str]:
        """The folders of the nodes' cgroups on the host."""
        return [folder for made in self._cgroups.values() for folder in made.roots]

    # How it is put together.

    def _write_identities(self) -> None:
        nodes = {name: Node(name, index, 0).ip for index, name in enumerate(NAMES, start=1)}
        pki.create(self._pki, api_ips=["127.0.0.1", API_IP, "10.96.0.1"], nodes=nodes)
        for file, identity in IDENTITIES.items():
            kubeconfig = self._config / f"{file}.kubeconfig"
            kubeconfig.touch(mode=0o600)
            kubeconfig.write_text(pki.kubeconfig(self._pki, identity, IN_CLUSTER_URL))
        self.kubeconfig.touch(mode=0o600)
        self.kubeconfig.write_text(pki.kubeconfig(self._pki, "admin", self.url))

    def _start_space(self, node: Node, tools_root: Path | None) -> None:
        hierarchies, first = cgroups.of_this_process(), self._nodes[0]
        name = f"{cgroups.PREFIX}{os.getpid()}-{secrets.token_hex(3)}"
        # Known before they are made: what a failure leaves is removed as well.
        self._cgroups[node.name] = Cgroups(tuple(hierarchy.child(name) for hierarchy in hierarchies), ())
        made = self._cgroups[node.name] = cgroups.create(hierarchies, name)
        keeps = outermost([CHECKOUT, cache_folder(), self.folder, Path(sys.prefix), Path(sys.base_prefix)])
        setup = [real.mounts(self.folder / node.name, tools_root, hierarchies), f"hostname {node.name}"]
        setup += [real.network_of_first(node)] if node == first else []
        space = self._spaces[node.name] = Space(None, COVERS, keeps, "\n".join(setup), made)
        assert self._lock is not None
        if node == first:
            self._lock.write_namespaces(space.pid)
        else:  # by pids of the host: the first node cannot see the other's
            network = ["nsenter", f"--target={self._spaces[first.name].pid}", "--net", "sh", "-ec"]
            subprocess.run([*network, real.link(node.name, node, space.pid)], check=True)
            space.run(real.network_of_other(node, first))

    def _start_control_plane(self, api: socket.socket) -> None:
        binary = self._build / "controlplane"
        self._start("etcd", components.etcd(binary, self._pki))
        self._start("kube-apiserver", components.apiserver(binary, self._pki, self._config))
        with api:
            self._start_services("services-api", api, (API_IP, API_PORT))
        for node in self._nodes:
            argv = real.containerd(self._programs, self._config, node)
            self._start(f"containerd/{node.name}", argv, node.name)
        self._wait_for(self.is_ready, "the API server", limit=120)
        self._start("kube-controller-manager", components.controller_manager(binary, self._pki, self._config))
        self._start("kube-scheduler", components.scheduler(binary, self._config))
        for node in self._nodes:
            self._wait_for(self._spaces[node.name].path(real.SOCKET).exists, "containerd", limit=60)
        archive.write(self.sandbox_archive, real.SANDBOX_IMAGE, self._programs / "pod")
        self.import_image(self.sandbox_archive)

    def _start_node(self, node: Node) -> None:
        real.cni(self._config, node)
        binary, changes = self._build / "controlplane", real.kubelet_changes()
        kubelet = components.kubelet(binary, self._pki, self._config, node, changes)
        self._start(f"kubelet/{node.name}", kubelet, node.name)
        self._start(f"kube-proxy/{node.name}", real.kube_proxy(self._programs, self._config, node), node.name)

    def _start_services(self, name: str, listener: socket.socket, address: tuple[str, int]) -> None:
        argv = components.services(sys.executable, self._pki, {listener.fileno(): address}, api_only=True)
        self._start(name, argv, pass_fds=[listener.fileno()])

    def _start(self, name: str, argv: list[str], node: str = NAMES[0], pass_fds: Iterable[int] = ()) -> None:
        environment = {
            "PATH": f"{self._programs}:{SYSTEM_PATH}",
            "HOME": "/tmp",
            "PYTHONPATH": str(CHECKOUT),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        with (self.logs / f"{name.replace('/', '-')}.log").open("ab") as log:
            self.programs[name] = self._spaces[node].start(argv, environment, log, pass_fds=pass_fds)

    def _wait_for(self, condition: Callable[[], bool], what: str, limit: float) -> None:
        deadline = time.monotonic() + limit
        while not condition():
            if self.ended or time.monotonic() > deadline:
                reason = f"{', '.join(self.ended)} ended" if self.ended else f"not within {limit:.0f} s"
                raise RuntimeError(f"{what} is not ready: {reason}; see {self.logs}")
            time.sleep(0.1)

    def _nodes_ready(self) -> bool:
        found = {node["metadata"]["name"]: node["status"] for node in self.api("GET", "/api/v1/nodes")["items"]}
        return all(
            any(condition["type"] == "Ready" and condition["status"] == "True" for condition in status["conditions"])
            for status in (found.get(node.name, {"conditions": []}) for node in self._nodes)
        )
