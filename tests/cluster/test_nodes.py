"""Nodes that break and are mended."""

import pytest

from e2e.cluster.launch import Cluster
from tests.cluster.pods import Pods, is_ready, is_up, node_status, server, wait_until

pytestmark = pytest.mark.cluster


def test_pods_outlive_the_kubelet_and_are_found_again(pods: Pods) -> None:
    cluster = pods.cluster
    pods.create(server("one", nodeName="node-a"))
    before = pods.ready("one")["containerStatuses"][0]

    cluster.stop_kubelet("node-a")
    wait_until(lambda: not is_ready(node_status(cluster, "node-a")))
    assert cluster.processes_of(pods.namespace, "one")

    cluster.start_kubelet("node-a")
    wait_until(lambda: is_up(cluster, "node-a"))
    after = pods.ready("one")["containerStatuses"][0]
    assert (after["containerID"], after["restartCount"]) == (before["containerID"], before["restartCount"])


def test_a_node_that_loses_power_loses_its_pods_and_comes_back_empty(pods: Pods) -> None:
    cluster = pods.cluster
    pods.create(server("one", nodeName="node-b"))
    pods.ready("one")

    cluster.kill_node("node-b")
    wait_until(lambda: not is_ready(node_status(cluster, "node-b")))
    assert is_ready(node_status(cluster, "node-a")), "the other node notices nothing"
    wait_until(lambda: (pods.find("one") or {"metadata": {}})["metadata"].get("deletionTimestamp"))

    cluster.start_node("node-b")
    wait_until(lambda: is_up(cluster, "node-b"))
    pods.gone("one")


def test_the_bridge_between_nodes_keeps_its_address_when_ports_come_and_go(cluster: Cluster) -> None:
    """A killed node took the bridge's MAC address with it, and the other node was cut off for a minute."""
    cluster.run_in_network(
        """
        before=$(ip -o link show nodes0 | sed 's/.*ether \\([^ ]*\\).*/\\1/')
        ip link add lowest address 00:00:00:00:00:10 type veth peer name lowest-peer
        ip link set lowest master nodes0
        after=$(ip -o link show nodes0 | sed 's/.*ether \\([^ ]*\\).*/\\1/')
        ip link del lowest
        test -n "$before" && test "$before" = "$after"
        """
    )


def test_a_node_cut_off_the_network_is_missed_and_welcomed_back(cluster: Cluster) -> None:
    cluster.cut_node("node-b")
    wait_until(lambda: not is_ready(node_status(cluster, "node-b")))

    cluster.cut_node("node-b", cut=False)
    wait_until(lambda: is_up(cluster, "node-b"))
