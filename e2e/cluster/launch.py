"""Starts and stops a real Kubernetes cluster of local processes, and injects and repairs faults in it.

    with Cluster(publish=GATEWAY) as cluster:
        cluster.wait_for_nodes()
        cluster.kubectl("get", "nodes")

The caller must be root, to write the id maps of a user namespace; nothing of the cluster
runs as host root. When the caller ends, however it ends, the whole cluster ends with it.

    host                        127.0.0.1:<port>, listening sockets handed to services.py
    └─ cluster (user, net, mount, pid namespace)
       etcd, kube-apiserver, controller manager, scheduler, services.py
       ├─ node-a (net, mount, pid namespace): kubelet, node.py with the runtime and the device plugin
       │  └─ pods (net namespace each) └─ containers (mount, pid, UTS, IPC namespace each)
       └─ node-b ...
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from e2e.cluster import build, components, network, pki, preflight, stubs
from e2e.cluster.access import STATE, Access
from e2e.cluster.catalogue import version_of
from e2e.cluster.components import API_IP, API_PORT, IN_CLUSTER_URL, Node, Service
from e2e.cluster.launcher_lock import LauncherLock
from e2e.cluster.namespaces import Program, Space, closed_ancestors, outermost
from e2e.cluster.paths import CHECKOUT, SYSTEM_PATH, cache_folder, cluster_folder
from e2e.cluster.space_init import FIRST_ID

COVERS = {"/tmp": 0o1777, "/run": 0o755, "/var/lib": 0o755, "/var/log": 0o755}
NODES = {"node-a": 8, "node-b": 8}  # name -> GPUs
GATEWAY = {"gateway": Service("slipway-system", "slipway-gateway", 8000)}


class Cluster(Access):
    """One cluster, from `start` to `stop`; better used as a context manager.

    `nodes` maps a node's name to the number of its GPUs. `publish` maps a name to a
    Service's (namespace, name, port), which then is at 127.0.0.1:`port(name)` on the host;
    it need not exist yet. `ports` fixes such host ports, and that of "api"; others are any
    that are free. `light` leaves out everything but etcd and the API server.
    `emulated_version`, such as "1.34", makes the control plane behave like that release.
    """

    def __init__(
        self,
        *,
        nodes: Mapping[str, int] | None = None,
        folder: Path | None = None,
        publish: Mapping[str, tuple[str, str, int]] | None = None,
        ports: Mapping[str, int] | None = None,
        light: bool = False,
        emulated_version: str | None = None,
    ) -> None:
        super().__init__(folder or cluster_folder("default"))
        wanted = {} if light else NODES if nodes is None else nodes
        self.nodes = {name: Node(name, index, gpus) for index, (name, gpus) in enumerate(wanted.items(), start=1)}
        self.programs: dict[str, Program] = {}
        self._publish = {name: Service(*service) for name, service in (publish or {}).items()}
        self._wanted_ports = dict(ports or {})
        self._light, self._emulated_version = light, emulated_version
        self._lock: LauncherLock | None = None
        self._spaces: dict[str, Space] = {}  # "cluster", and each running node
        self._links: dict[str, str] = {}  # node -> its interface on the cluster's bridge
        self._listeners: dict[str, socket.socket] = {}

    def __enter__(self) -> "Cluster":
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
        """Return when the API server is ready; the nodes register on their own."""
        preflight.require()
        self._build = build.ensure()
        self._stubs = stubs.generate(self._build)
        self._lock = LauncherLock(self.folder)
        self._pki, self._config = self.folder / "pki", self.folder / "config"
        for folder in (self._config, self.logs, self.folder / "home"):
            folder.mkdir()
        self._open_ports()
        self._write_identities()
        self._start_cluster_space()
        self._start("cluster", "etcd", components.etcd(self._binary, self._pki))
        self.start_apiserver(wait=False)
        self._start_services()
        for name in self.nodes:
            self._start_node_space(name)
        self._wait_for(self.is_ready, "the API server", limit=120)
        if not self._light:
            self.start_controllers()
            scheduler = components.scheduler(self._binary, self._config, emulated_version=self._emulated_version)
            self._start("cluster", "kube-scheduler", scheduler)
        for name in self.nodes:
            self.start_kubelet(name)
        self._write_state()

    def stop(self) -> None:
        """End every process; namespaces, mounts and interfaces go with them. The folder with the logs stays."""
        if self._lock:
            (self.folder / STATE).unlink(missing_ok=True)
        for program in self.programs.values():
            program.resume_nsenter()
        if cluster := self._spaces.pop("cluster", None):
            cluster.close()
        for space in self._spaces.values():
            space.close()
        for listener in self._listeners.values():
            listener.close()
        self._spaces.clear()
        self._listeners.clear()
        self.programs.clear()
        if self._lock:
            self._lock.release()
            self._lock = None

    @property
    def catalogue_version(self) -> str:
        """The tag of Slipway's images here: slipway/runtime:<this>."""
        return version_of(CHECKOUT)

    @property
    def ended(self) -> list[str]:
        """Programs that ended without having been stopped."""
        return [name for name, program in self.programs.items() if not program.alive]

    def wait_for_nodes(self, limit: float = 60) -> None:
        """Return when every node is Ready and has its GPUs."""
        self._wait_for(self._nodes_ready, "every node", limit)

    # Faults and their repair.

    def stop_apiserver(self, how: int = signal.SIGKILL) -> None:
        """The API server is away; everything else runs on."""
        self.programs.pop("kube-apiserver").stop(how)

    def start_apiserver(self, *, wait: bool = True) -> None:
        """The API server is back; return when it is ready."""
        argv = components.apiserver(
            self._binary, self._pki, self._config,
            controllers=not self._light, emulated_version=self._emulated_version,
        )  # fmt: skip
        self._start("cluster", "kube-apiserver", argv)
        if wait:
            self._wait_for(self.is_ready, "the API server", limit=60)

    def stop_etcd(self, how: int = signal.SIGKILL) -> None:
        """etcd is away; what it holds stays in the memory of the cluster's /var/lib."""
        self.programs.pop("etcd").stop(how)

    def start_etcd(self) -> None:
        """etcd is back; return when the API server is ready again."""
        self._start("cluster", "etcd", components.etcd(self._binary, self._pki))
        self._wait_for(self.is_ready, "the API server", limit=120)

    def signal_program(self, name: str, how: int) -> None:
        """Signal a component, such as "kube-apiserver": SIGSTOP makes it hang, SIGCONT lets it go on."""
        self.programs[name].send_signal(how)

    def is_up(self, node: str) -> bool:
        """Whether the node has power; one that is cut off has."""
        return node in self._spaces

    def start_controllers(self) -> None:
        """Start the controller manager; only a light cluster runs without."""
        if "kube-controller-manager" not in self.programs:
            manager = components.controller_manager(
                self._binary, self._pki, self._config, emulated_version=self._emulated_version
            )
            self._start("cluster", "kube-controller-manager", manager)

    def start_kubelet(self, node: str) -> None:
        """Start a node's kubelet; to restart one, first `stop_kubelet`."""
        runtime = self._spaces[node].path("/run/cri.sock")  # the kubelet gives up at once without it
        self._wait_for(runtime.exists, f"the runtime of {node}", limit=60)
        argv = components.kubelet(self._binary, self._pki, self._config, self.nodes[node])
        self._start(node, f"kubelet/{node}", argv)

    def stop_kubelet(self, node: str, how: int = signal.SIGKILL) -> None:
        """End a node's kubelet and leave its pods running."""
        self.programs.pop(f"kubelet/{node}").stop(how)

    def kill_node(self, node: str) -> None:
        """A node loses power: kubelet, runtime and pods end at once."""
        self._spaces.pop(node).close()
        self.programs = {name: program for name, program in self.programs.items() if not name.endswith(f"/{node}")}

    def start_node(self, node: str) -> None:
        """The node comes back, with an empty disk."""
        self._start_node_space(node)
        self.start_kubelet(node)

    def run_in_network(self, script: str) -> None:
        """Run a shell script in the network namespace that connects the nodes; raise when it fails."""
        self._spaces["cluster"].run(script)

    def cut_node(self, node: str, *, cut: bool = True) -> None:
        """Take the node off the network, or put it back; its pods run on."""
        self.run_in_network(f"ip link set {self._links[node]} {'down' if cut else 'up'}")

    def kill_container(
        self, namespace: str, pod: str, container: str | None = None, *, how: int = signal.SIGKILL, only: str = ""
    ) -> int:
        """Signal the processes of a container (the first one of the pod, unless named); return how many there were.

        `only` picks those whose command line contains it. The kubelet sees what it sees after a crash or an OOM kill.
        """
        processes = [pid for pid in self.processes_of(namespace, pod, container) if only in _command_line(pid)]
        for pid in processes:
            os.kill(pid, how)
        return len(processes)

    def processes_of(self, namespace: str, pod: str, container: str | None = None) -> list[int]:
        """The processes of a running container, as pids on the host; its pid 1 comes first."""
        found = self.api("GET", f"/api/v1/namespaces/{namespace}/pods/{pod}")
        statuses = found["status"]["containerStatuses"] + found["status"].get("initContainerStatuses", [])
        name = container or found["spec"]["containers"][0]["name"]
        (identity,) = (status["containerID"].partition("://")[2] for status in statuses if status["name"] == name)
        space = self._spaces[found["spec"]["nodeName"]]
        return space.processes_beside(int(space.path(f"/run/containers/{identity}/pid").read_text()))

    def enter(self, space: str = "cluster") -> list[str]:
        """Command prefix that runs a program in the cluster's namespaces, or a node's."""
        return self._spaces[space].enter

    def run(self, *argv: str | Path, timeout: float = 60) -> str:
        """Run a command in the cluster's network and return its output; raise when it fails."""
        command = [*self.enter(), *map(str, argv)]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=timeout).stdout

    # How it is put together.

    @property
    def _binary(self) -> Path:
        return self._build / "controlplane"

    @property
    def tools(self) -> Path:
        return self._build / "bin"

    def port(self, published: str) -> int:
        return int(self._ports[published])

    def _open_ports(self) -> None:
        """Listen on the host; the sockets stay the host's wherever they are handed to."""
        for name in ("api", *self._publish):
            self._listeners[name] = socket.create_server(("127.0.0.1", self._wanted_ports.get(name, 0)), backlog=512)
        self._ports = {name: listener.getsockname()[1] for name, listener in self._listeners.items()}

    def _write_identities(self) -> None:
        pki.create(
            self._pki,
            api_ips=["127.0.0.1", API_IP, "10.96.0.1"],
            nodes={node.name: node.ip for node in self.nodes.values()},
        )
        for user in ("kube-controller-manager", "kube-scheduler", *self.nodes):
            (self._config / f"{user}.kubeconfig").write_text(pki.kubeconfig(self._pki, user, IN_CLUSTER_URL))
        self.kubeconfig.touch(mode=0o600)
        self.kubeconfig.write_text(pki.kubeconfig(self._pki, "admin", self.url))
        for path in (self.folder, *self.folder.rglob("*")):
            os.chown(path, FIRST_ID, FIRST_ID)

    def _start_cluster_space(self) -> None:
        self._keeps = outermost([CHECKOUT, cache_folder(), self.folder, Path(sys.prefix), Path(sys.base_prefix)])
        covers = dict.fromkeys(closed_ancestors(self._keeps), 0o755) | COVERS
        space = self._spaces["cluster"] = Space(None, covers, self._keeps, network.of_cluster())
        assert self._lock is not None
        self._lock.write_namespaces(space.pid)

    def _start_services(self) -> None:
        published: dict[int, components.Published] = {
            self._listeners[name].fileno(): service for name, service in self._publish.items()
        }
        published[self._listeners["api"].fileno()] = (API_IP, API_PORT)
        argv = components.services(sys.executable, self._pki, published, api_only=self._light)
        self._start("cluster", "services", argv, pass_fds=list(published))
        for listener in self._listeners.values():
            listener.close()  # services.py has them now
        self._listeners.clear()

    def _start_node_space(self, name: str) -> None:
        node, cluster = self.nodes[name], self._spaces["cluster"]
        space = self._spaces[name] = Space(cluster, COVERS, self._keeps)
        link = self._links[name] = f"{name[:10]}-{os.urandom(2).hex()}"  # the old one may take a moment to go
        cluster.run(network.between(link, space.pid_in_parent, node))
        space.run(network.of_node(node))
        self._start(name, f"node/{name}", components.node(sys.executable, self._binary, CHECKOUT, node))

    def _write_state(self) -> None:
        state = {"pid": os.getpid(), "tools": str(self.tools), "ports": self._ports, "nodes": list(self.nodes)}
        new = self.folder / f"{STATE}.new"
        new.write_text(json.dumps(state))
        new.rename(self.folder / STATE)

    def _start(self, space: str, name: str, argv: list[str], pass_fds: Iterable[int] = ()) -> None:
        environment = {
            "PATH": SYSTEM_PATH,
            "HOME": "/tmp",
            "PYTHONPATH": f"{CHECKOUT}:{self._stubs}",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        with (self.logs / f"{name.replace('/', '-')}.log").open("ab") as log:
            self.programs[name] = self._spaces[space].start(argv, environment, log, pass_fds=pass_fds)

    def _wait_for(self, condition: Callable[[], bool], what: str, limit: float) -> None:
        deadline = time.monotonic() + limit
        while not condition():
            if self.ended or time.monotonic() > deadline:
                reason = f"{', '.join(self.ended)} ended" if self.ended else f"not within {limit:.0f} s"
                raise RuntimeError(f"{what} is not ready: {reason}; see {self.logs}")
            time.sleep(0.05)

    def _nodes_ready(self) -> bool:
        found = {node["metadata"]["name"]: node["status"] for node in self.api("GET", "/api/v1/nodes")["items"]}
        return all(name in found and _has_gpus(found[name], node.gpus) for name, node in self.nodes.items())


def _has_gpus(status: Mapping[str, list[dict[str, str]]], count: int) -> bool:
    ready = any(condition["type"] == "Ready" and condition["status"] == "True" for condition in status["conditions"])
    allocatable: Mapping[str, str] = status.get("allocatable", {})  # type: ignore[assignment]
    return ready and allocatable.get("nvidia.com/gpu", "0") == str(count)


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
