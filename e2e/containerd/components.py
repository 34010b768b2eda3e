"""Configurations, command lines and setup scripts of a real node's parts. Pure text; starts no processes."""

import json
from collections.abc import Sequence
from pathlib import Path

import yaml

from e2e.cluster.components import API_IP, NODE_NETWORK, SERVICE_RANGE, Node
from e2e.containerd.cgroups import Hierarchy

SOCKET = "/run/containerd/containerd.sock"
SANDBOX_IMAGE = "localhost/slipway-e2e/pod:1"
POD_RANGE = "10.244.0.0/16"
# Values that the kubelet would write. It finds them already there, in files over the host's settings.
KERNEL = {"kernel/panic": "10", "kernel/panic_on_oops": "1", "vm/overcommit_memory": "1"}
UNUSED_PLUGINS = (
    *(f"io.containerd.snapshotter.v1.{name}" for name in ("btrfs", "zfs", "devmapper", "blockfile", "erofs")),
    "io.containerd.differ.v1.erofs",
    "io.containerd.tracing.processor.v1.otlp",
    "io.containerd.internal.v1.tracing",
    "io.containerd.nri.v1.nri",
)


def mounts(folder: Path, tools: Path | None, hierarchies: Sequence[Hierarchy]) -> str:
    """The script that prepares the mount namespace of a node, run in it.

    Settings of the host's kernel are read-only, and those of the network namespace writable. The cgroup mounts show
    only the node's own. The disks of containerd and the kubelet are folders in `folder`.
    """
    lines = ["mount --bind /proc/sys /proc/sys", "mount -o remount,bind,ro /proc/sys"]
    lines += ["mount --bind /proc/sys/net /proc/sys/net", "mount -o remount,bind,rw /proc/sys/net"]
    lines += [f"mkdir -p {folder}/kernel"]
    for setting, value in KERNEL.items():
        file = f"{folder}/kernel/{setting.replace('/', '.')}"
        lines += [f"echo {value} > {file}", f"mount --bind {file} /proc/sys/{setting}"]
    lines += ["umount -R -l /sys", "mount -t sysfs sysfs /sys", *_cgroup_mounts(hierarchies)]
    if tools:
        lines.append(f"mount -t overlay -o ro,lowerdir={tools}/usr:/usr overlay /usr")
    for disk in ("containerd", "kubelet"):
        lines += [f"mkdir -p {folder}/disks/{disk} /var/lib/{disk}"]
        lines += [f"mount --bind {folder}/disks/{disk} /var/lib/{disk}"]
    lines += ["mkdir -p /run/lock", "mount -t tmpfs tmpfs /dev/shm", "mount --make-rshared /"]
    return "\n".join(lines)


def _cgroup_mounts(hierarchies: Sequence[Hierarchy]) -> list[str]:
    if hierarchies[0].unified:
        return ["mount -t cgroup2 cgroup2 /sys/fs/cgroup"]
    lines = ["mount -t tmpfs -o mode=755 tmpfs /sys/fs/cgroup"]
    for hierarchy in hierarchies:
        folder = f"/sys/fs/cgroup/{Path(hierarchy.mount).name}"
        lines += [f"mkdir {folder}", f"mount -t cgroup -o {hierarchy.options} cgroup {folder}"]
    return lines


def network_of_first(node: Node) -> str:
    """The script that prepares the network namespace of the first node: its bridge is the network of the machines."""
    return "\n".join(
        [
            "ip link set lo up",
            "ip link add nodes0 type bridge",
            "ip link add carrier0 type veth peer name carrier1",  # a bridge without a port that is up has no carrier
            "ip link set carrier1 master nodes0 up",
            "ip link set carrier0 up",
            f"ip addr add {API_IP}/24 dev nodes0",
            f"ip addr add {node.ip}/24 dev nodes0",
            "ip link set nodes0 up",
            # Addresses of Services are translated only for packets that have a route.
            f"ip route add default via {NODE_NETWORK}.254 dev nodes0",
            "echo 1 > /proc/sys/net/ipv4/ip_forward",
        ]
    )


def link(name: str, node: Node, pid: int) -> str:
    """In the network namespace of the first node: a veth pair to the node whose init is `pid`, and its pods' route."""
    return "\n".join(
        [
            f"ip link add {name} type veth peer name eth0 netns {pid}",
            f"ip link set {name} master nodes0 up",
            f"ip route replace {node.pod_range} via {node.ip}",
        ]
    )


def network_of_other(node: Node, first: Node) -> str:
    """In the network namespace of another node, once it has its end of that pair."""
    return "\n".join(
        [
            "ip link set lo up",
            f"ip addr add {node.ip}/24 dev eth0",
            "ip link set eth0 up",
            f"ip route add default via {API_IP}",
            f"ip route add {first.pod_range} via {first.ip}",
            "echo 1 > /proc/sys/net/ipv4/ip_forward",
        ]
    )


def containerd(programs: Path, config: Path, node: Node) -> list[str]:
    """containerd with runc, the overlay snapshotter and CNI; it writes its configuration into `config`."""
    disabled = ", ".join(json.dumps(plugin) for plugin in UNUSED_PLUGINS)
    settings = f"""version = 3
root = "/var/lib/containerd"
state = "/run/containerd"
disabled_plugins = [{disabled}]
[grpc]
  address = "{SOCKET}"
[plugins."io.containerd.cri.v1.images"]
  snapshotter = "overlayfs"
  [plugins."io.containerd.cri.v1.images".pinned_images]
    sandbox = "{SANDBOX_IMAGE}"
[plugins."io.containerd.cri.v1.runtime"]
  restrict_oom_score_adj = true  # a machine may lack CAP_SYS_RESOURCE
  [plugins."io.containerd.cri.v1.runtime".cni]
    bin_dirs = ["{programs}"]
    conf_dir = "{config}/cni-{node.name}"
  [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
      BinaryName = "runc"
      SystemdCgroup = false
"""
    (config / f"containerd-{node.name}.toml").write_text(settings)
    return [str(programs / "containerd"), f"--config={config}/containerd-{node.name}.toml"]


def cni(config: Path, node: Node) -> None:
    """The network of pods: a bridge with the node's range of addresses; written into `config`."""
    addresses = {"type": "host-local", "ranges": [[{"subnet": node.pod_range}]], "routes": [{"dst": "0.0.0.0/0"}]}
    bridge = {"type": "bridge", "bridge": "pods0", "isGateway": True, "ipMasq": False, "hairpinMode": True}
    plugins = [bridge | {"ipam": addresses}, {"type": "portmap", "capabilities": {"portMappings": True}}]
    folder = config / f"cni-{node.name}"
    folder.mkdir(exist_ok=True)
    network = {"cniVersion": "1.0.0", "name": "pods", "plugins": plugins}
    (folder / "10-pods.conflist").write_text(json.dumps(network))


def kubelet_changes() -> dict[str, object]:
    """What the kubelet of a real node has other than that of the local cluster: limits, quotas and firewall rules."""
    return {
        "containerRuntimeEndpoint": f"unix://{SOCKET}",
        "cgroupDriver": "cgroupfs",
        "cgroupsPerQOS": True,
        "cgroupRoot": "/",
        "enforceNodeAllocatable": ["pods"],
        "seccompDefault": True,
        "localStorageCapacityIsolation": True,
        "makeIPTablesUtilChains": True,
        "maxPods": 60,
        # The disk is the host's, and may be nearly full: images that were just imported are not to be deleted.
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
    }


def kube_proxy(programs: Path, config: Path, node: Node) -> list[str]:
    """The real kube-proxy, by nftables; conntrack settings belong to the host's kernel, and stay as they are."""
    untouched = {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"}
    settings = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "clientConnection": {"kubeconfig": f"{config}/kube-proxy.kubeconfig"},
        "clusterCIDR": POD_RANGE,
        "bindAddress": "0.0.0.0",
        "conntrack": untouched,
        "hostnameOverride": node.name,
    }
    (config / f"kube-proxy-{node.name}.yaml").write_text(yaml.safe_dump(settings))
    return [str(programs / "kube-proxy"), f"--config={config}/kube-proxy-{node.name}.yaml"]


def kube_router(programs: Path, config: Path, node: Node) -> list[str]:
    """kube-router as the engine of NetworkPolicies and nothing else."""
    return [
        str(programs / "kube-router"), f"--kubeconfig={config}/kube-router.kubeconfig",
        "--run-firewall=true", "--run-router=false", "--run-service-proxy=false",
        f"--hostname-override={node.name}", f"--service-cluster-ip-range={SERVICE_RANGE}",
        "--metrics-port=0", "--health-port=0",
    ]  # fmt: skip
