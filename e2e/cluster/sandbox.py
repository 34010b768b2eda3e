"""A pod's network: a namespace with one address on the node's bridge."""

import subprocess
import time

import cri_pb2 as api

BRIDGE = "pods0"


class Sandbox:
    """The network and the log folder that the containers of one pod share; `config` is the CRI's PodSandboxConfig."""

    def __init__(self, identity: str, config: api.PodSandboxConfig, node_index: int, ip_index: int) -> None:
        self.id, self.config = identity, config
        self.created = time.time_ns()
        self.ready = True
        self.hostname = config.hostname or config.metadata.name
        self.resolv_conf = resolv_conf(config.dns_config)
        self.ip = self.network = ""  # both stay empty on the node's own network
        if config.linux.security_context.namespace_options.network != api.NODE:
            self.ip = f"10.244.{node_index}.{ip_index}"
            self._name = f"pod-{identity[:8]}"
            self.network = f"/run/netns/{self._name}"
            self._connect(f"10.244.{node_index}.1")

    def _connect(self, gateway: str) -> None:
        link = f"v{self.id[:8]}"
        _ip("netns", "add", self._name)
        plug = f"link add {link} type veth peer name eth0 netns {self._name}\nlink set {link} master {BRIDGE} up\n"
        _ip("-batch", "-", script=plug)
        address = f"link set lo up\naddr add {self.ip}/24 dev eth0\nlink set eth0 up\nroute add default via {gateway}\n"
        _ip("-n", self._name, "-batch", "-", script=address)

    def stop(self) -> None:
        """Give the address back; the kubelet has stopped the containers."""
        if self.ready and self.network:
            _ip("netns", "delete", self._name)
        self.ready = False


def resolv_conf(dns: api.DNSConfig) -> str:
    """The text of /etc/resolv.conf, from the kubelet's DNS settings."""
    lines = [f"nameserver {server}" for server in dns.servers]
    lines += [f"search {' '.join(dns.searches)}"] if dns.searches else []
    lines += [f"options {' '.join(dns.options)}"] if dns.options else []
    return "".join(line + "\n" for line in lines)


def _ip(*arguments: str, script: str | None = None) -> None:
    subprocess.run(["ip", *arguments], input=script, text=True, check=True)
