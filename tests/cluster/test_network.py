"""Addresses, Services, names and published ports of the local cluster."""

import socket
import subprocess

import pytest

from e2e.cluster.launch import Cluster
from tests.cluster.pods import PYTHON, Pods, container, pod, server, wait_until

pytestmark = pytest.mark.cluster

FETCH = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=5).read().decode())"
REACH_API = """
import json, ssl, urllib.request
folder = "/var/run/secrets/kubernetes.io/serviceaccount"
token, trust = open(folder + "/token").read(), ssl.create_default_context(cafile=folder + "/ca.crt")
request = urllib.request.Request("https://kubernetes.default.svc/version", headers={"Authorization": "Bearer " + token})
print(json.load(urllib.request.urlopen(request, context=trust))["gitVersion"])
"""


def fetch(cluster: Cluster, url: str) -> str:
    return cluster.run("/usr/bin/env", "python3", "-c", FETCH, url).strip()


def test_two_pods_use_the_same_port_and_a_service_leads_to_both(pods: Pods) -> None:
    for name in ("one", "two"):
        pods.create(server(name))
    addresses = {name: pods.ready(name)["podIP"] for name in ("one", "two")}

    for name, address in addresses.items():
        answer = fetch(pods.cluster, f"http://{address}:8000/")
        assert answer.startswith(name)
        assert answer.count("GPU-") == 2

    cluster_ip = pods.expose("server")
    wait_until(lambda: pods.endpoints("server") == sorted(addresses.values()))
    wait_until(lambda: {fetch(pods.cluster, f"http://{cluster_ip}/").split()[0] for _ in range(2)} == {"one", "two"})
    assert pods.exec("one", "python3", "-c", FETCH, "http://server/").split()[0] in ("one", "two")
    assert pods.exec("one", "python3", "-c", REACH_API).strip().startswith("v1.36.")


STREAM = """
import socket, time
listener = socket.create_server(("0.0.0.0", 8000))
while True:
    connection, _ = listener.accept()
    asked = b""
    while data := connection.recv(100):  # to the end of what the client says
        asked += data
    for word in asked.split():
        connection.sendall(word)
        time.sleep(0.3)
    connection.close()
"""


def test_a_published_port_streams_and_passes_each_sides_end_on(cluster: Cluster) -> None:
    def tokens() -> list[bytes] | None:
        """Each piece as it arrives; what was collected on the way would arrive as one."""
        try:
            with socket.create_connection(("127.0.0.1", cluster.port("stand-in")), timeout=5) as client:
                client.sendall(b"once upon a time")
                client.shutdown(socket.SHUT_WR)
                return list(iter(lambda: client.recv(100), b""))
        except ConnectionError:
            return None

    assert tokens() is None, "there is no such Service yet"

    cluster.api("POST", "/api/v1/namespaces", {"metadata": {"name": "stand-in"}})
    pods = Pods(cluster, "stand-in")
    try:
        stream = container("stream", PYTHON, ("-c", STREAM), ports=[{"name": "http", "containerPort": 8000}])
        pods.create(pod("stand-in", stream, labels={"app": "stand-in"}))
        pods.ready("stand-in")
        spec = {"selector": {"app": "stand-in"}, "ports": [{"name": "http", "port": 8000, "targetPort": "http"}]}
        cluster.api("POST", "/api/v1/namespaces/stand-in/services", {"metadata": {"name": "stand-in"}, "spec": spec})

        assert wait_until(tokens) == [b"once", b"upon", b"a", b"time"]
    finally:
        pods.remove()


def test_pods_have_no_way_out(pods: Pods) -> None:
    pods.create(pod("shy", container(image=PYTHON, args=("-c", "import time; time.sleep(600)"))))
    pods.ready("shy")
    reach = "import socket; s = socket.socket(); s.settimeout(3); print(s.connect_ex(('192.0.2.1', 80)))"

    assert pods.exec("shy", "python3", "-c", reach).strip() != "0"


def test_an_api_server_that_comes_back_finds_everything_as_it_was(pods: Pods) -> None:
    pods.create(server("one"))
    before = pods.ready("one")

    pods.cluster.stop_apiserver()
    assert fetch(pods.cluster, f"http://{before['podIP']}:8000/").startswith("one")
    pods.cluster.start_apiserver()

    after = pods.ready("one")
    assert after["containerStatuses"][0]["containerID"] == before["containerStatuses"][0]["containerID"]
    cluster_ip = pods.expose("late")
    wait_until(lambda: pods.endpoints("late") == [after["podIP"]])
    wait_until(lambda: _answers(pods.cluster, cluster_ip))


def _answers(cluster: Cluster, cluster_ip: str) -> bool:
    try:
        return fetch(cluster, f"http://{cluster_ip}/").startswith("one")
    except subprocess.CalledProcessError:
        return False
