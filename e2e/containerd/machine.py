"""Starts and stops a real Kubernetes node, with its control plane, in private namespaces of this machine.

    with Machine() as machine:
        machine.import_image(archive)
        machine.kubectl("run", ...)

    host                        127.0.0.1:<port>: listening sockets handed to e2e/cluster/services.py
    └─ machine (net, mount, pid, IPC, UTS, cgroup namespace; its root is the host's root)
       etcd, kube-apiserver, controller manager, scheduler, kubelet, kube-proxy, kube-router, containerd
       └─ pods: containers of runc, with cgroups, seccomp and a network by CNI

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
from e2e.cluster.access import Access, ApiError
from e2e.cluster.components import API_IP, API_PORT, IN_CLUSTER_URL, Node
from e2e.cluster.launcher_lock import LauncherLock
from e2e.cluster.namespaces import Cgroups, Program, Space, outermost
from e2e.cluster.paths import CHECKOUT, SYSTEM_PATH, cache_folder, cluster_folder
from e2e.containerd import archive, build, cgroups, preflight, tools
from e2e.containerd import components as real

COVERS = {"/tmp": 0o1777, "/run": 0o755, "/var/lib": 0o755, "/var/log": 0o755}
NODE = Node("node-a", 1, 0)
IDENTITIES = {name: name for name in ("kube-controller-manager", "kube-scheduler", "kube-proxy", NODE.name)}
IDENTITIES["kube-router"] = "admin"
KEPT = {"logs", ".cluster"}  # in the folder, after `stop`


class MissingError(RuntimeError):
    """This machine cannot run a real node; the message has one sentence for each reason."""


class Machine(Access):
    """One node and its control plane, from `start` to `stop`; better used as a context manager.

    `policies` starts the engine that enforces NetworkPolicies.
    """

    def __init__(self, *, folder: Path | None = None, policies: bool = False) -> None:
        super().__init__(folder or cluster_folder("containerd"))
        self.programs: dict[str, Program] = {}
        self._policies = policies
        self._ports: dict[str, int] = {}
        self._lock: LauncherLock | None = None
        self._space: Space | None = None
        self._cgroups: Cgroups | None = None

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
        self._start_space(tools_root)
        self._start_control_plane(api)
        self._start_node()

    def stop(self) -> None:
        """End every process, then remove the cgroups and all folders but the logs."""
        if self._space:
            self._space.close()
            self._space = None
        self.programs.clear()
        if self._cgroups:
            cgroups.remove(self._cgroups.roots)
            self._cgroups = None
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

    def import_image(self, path: Path, timeout: float = 600) -> None:
        """Import the images of a docker archive into containerd."""
        import_ = ["--namespace=k8s.io", "images", "import", "--local", str(path)]
        self.run(str(self._programs / "ctr"), f"--address={real.SOCKET}", *import_, timeout=timeout)

    def import_program(self, image: str, *arguments: str) -> None:
        """Import an image whose entrypoint is `pod`, the program of pod/main.go, with these arguments."""
        path = self.folder / "program.tar"
        archive.write(path, image, self._programs / "pod", *arguments)
        self.import_image(path)

    @property
    def sandbox_archive(self) -> Path:
        """The archive of the image with `pod` alone."""
        return self.folder / "sandbox.tar"

    def run(self, *argv: str | Path, timeout: float = 60) -> str:
        """Run a command in the node's namespaces and return its output; raise when it fails."""
        command = [*self.enter(), *map(str, argv)]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=timeout).stdout

    def enter(self) -> list[str]:
        """Command prefix that runs a program in the node's namespaces and cgroups."""
        assert self._space is not None
        return self._space.enter

    @property
    def pid(self) -> int:
        """The init process of the node, as a pid of the host."""
        assert self._space is not None
        return self._space.pid

    @property
    def cgroups(self) -> tuple[str, ...]:
        """The folders of the node's cgroups on the host."""
        assert self._cgroups is not None
        return self._cgroups.roots

    # How it is put together.

    def _write_identities(self) -> None:
        pki.create(self._pki, api_ips=["127.0.0.1", API_IP, "10.96.0.1"], nodes={NODE.name: NODE.ip})
        for file, identity in IDENTITIES.items():
            kubeconfig = self._config / f"{file}.kubeconfig"
            kubeconfig.touch(mode=0o600)
            kubeconfig.write_text(pki.kubeconfig(self._pki, identity, IN_CLUSTER_URL))
        self.kubeconfig.touch(mode=0o600)
        self.kubeconfig.write_text(pki.kubeconfig(self._pki, "admin", self.url))

    def _start_space(self, tools_root: Path | None) -> None:
        hierarchies = cgroups.of_this_process()
        cgroups.remove_old(hierarchies)
        name = f"{cgroups.PREFIX}{os.getpid()}-{secrets.token_hex(3)}"
        # Known before they are made: what a failure leaves is removed as well.
        self._cgroups = Cgroups(tuple(hierarchy.child(name) for hierarchy in hierarchies), ())
        self._cgroups = cgroups.create(hierarchies, name)
        keeps = outermost([CHECKOUT, cache_folder(), self.folder, Path(sys.prefix), Path(sys.base_prefix)])
        setup = f"{real.mounts(self.folder, tools_root, hierarchies)}\n{real.network(NODE)}\nhostname {NODE.name}"
        self._space = Space(None, COVERS, keeps, setup, self._cgroups)
        assert self._lock is not None
        self._lock.write_namespaces(self._space.pid)

    def _start_control_plane(self, api: socket.socket) -> None:
        binary = self._build / "controlplane"
        self._start("etcd", components.etcd(binary, self._pki))
        self._start("kube-apiserver", components.apiserver(binary, self._pki, self._config))
        with api:
            self._start_services("services-api", api, (API_IP, API_PORT))
        self._start("containerd", real.containerd(self._programs, self._config))
        self._wait_for(self.is_ready, "the API server", limit=120)
        self._start("kube-controller-manager", components.controller_manager(binary, self._pki, self._config))
        self._start("kube-scheduler", components.scheduler(binary, self._config))

    def _start_node(self) -> None:
        assert self._space is not None
        self._wait_for(self._space.path(real.SOCKET).exists, "containerd", limit=60)
        archive.write(self.sandbox_archive, real.SANDBOX_IMAGE, self._programs / "pod")
        self.import_image(self.sandbox_archive)
        real.cni(self._config, NODE)
        binary, changes = self._build / "controlplane", real.kubelet_changes()
        self._start("kubelet", components.kubelet(binary, self._pki, self._config, NODE, changes))
        self._start("kube-proxy", real.kube_proxy(self._programs, self._config, NODE))
        self._wait_for(self._node_ready, "the node", limit=120)
        if self._policies:
            self._start("kube-router", real.kube_router(self._programs, self._config, NODE))

    def _start_services(self, name: str, listener: socket.socket, address: tuple[str, int]) -> None:
        argv = components.services(sys.executable, self._pki, {listener.fileno(): address}, api_only=True)
        self._start(name, argv, pass_fds=[listener.fileno()])

    def _start(self, name: str, argv: list[str], pass_fds: Iterable[int] = ()) -> None:
        assert self._space is not None
        environment = {
            "PATH": f"{self._programs}:{SYSTEM_PATH}",
            "HOME": "/tmp",
            "PYTHONPATH": str(CHECKOUT),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        with (self.logs / f"{name}.log").open("ab") as log:
            self.programs[name] = self._space.start(argv, environment, log, pass_fds=pass_fds)

    def _wait_for(self, condition: Callable[[], bool], what: str, limit: float) -> None:
        deadline = time.monotonic() + limit
        while not condition():
            if self.ended or time.monotonic() > deadline:
                reason = f"{', '.join(self.ended)} ended" if self.ended else f"not within {limit:.0f} s"
                raise RuntimeError(f"{what} is not ready: {reason}; see {self.logs}")
            time.sleep(0.1)

    def _node_ready(self) -> bool:
        try:
            conditions = self.api("GET", f"/api/v1/nodes/{NODE.name}")["status"]["conditions"]
        except (OSError, ApiError, KeyError):
            return False
        return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)
