"""Shell scripts that connect the network namespaces of cluster and nodes. Pure text.

The cluster's namespace has a bridge `nodes0`, and every address of the Service range is
local there. Each node has a veth pair to that bridge, and a bridge `pods0` of its own.

Both bridges have a fixed MAC address. A bridge without one takes the lowest of its ports': when that port goes, with
its node or pod, the others send to an address that nobody has until their neighbour entry expires, for up to a minute.
"""

from e2e.cluster.components import API_IP, SERVICE_RANGE, Node

NODES_BRIDGE_MAC = "02:00:00:00:00:01"
PODS_BRIDGE_MAC = "02:00:00:00:00:02"


def of_cluster() -> str:
    """Inside the cluster's new network namespace."""
    return f"""
        ip link set lo up
        ip link add nodes0 address {NODES_BRIDGE_MAC} type bridge
        ip addr add {API_IP}/24 dev nodes0
        ip link set nodes0 up
        ip route add local {SERVICE_RANGE} dev lo
        echo 1 > /proc/sys/net/ipv4/ip_forward
    """


def between(link: str, pid: int, node: Node) -> str:
    """In the cluster's namespace: a veth pair `link` to the node whose init is `pid`, and the route to its pods."""
    return f"""
        ip link add {link} type veth peer name eth0 netns {pid}
        ip link set {link} master nodes0 up
        ip route replace {node.pod_range} via {node.ip}
    """


def of_node(node: Node) -> str:
    """In the node's namespace, at the other end of that veth pair."""
    return f"""
        ip link set lo up
        ip addr add {node.ip}/24 dev eth0
        ip link set eth0 up
        ip route add default via {API_IP}
        ip link add pods0 address {PODS_BRIDGE_MAC} type bridge
        ip addr add {node.pod_gateway}/24 dev pods0
        ip link set pods0 up
        echo 1 > /proc/sys/net/ipv4/ip_forward
    """
