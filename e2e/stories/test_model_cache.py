"""A model is brought to nodes once: pulled before replicas need it, shared by pods, or mounted from an image."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from e2e.manifests import as_yaml, static
from e2e.slipway import Slipway, wait_for
from slipway_api import names

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

FOLDER = "/var/lib/slipway-models"
MODELS = "registry.local/models/tiny:1"  # an image with nothing but files
# A web server that reads from the middle, and prints how many bytes of each file it has sent.
ORIGIN = """
import http.server, os
class Origin(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        path = "/models" + self.path
        if ".." in path or not os.path.isfile(path):
            self.send_error(404)
            return
        first, last = 0, os.path.getsize(path) - 1
        asked = self.headers.get("Range", "").removeprefix("bytes=").split("-")
        if len(asked) == 2:
            first, last = int(asked[0]), min(last, int(asked[1]))
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{last}/{os.path.getsize(path)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(last - first + 1))
        self.end_headers()
        with open(path, "rb") as file:
            file.seek(first)
            self.wfile.write(file.read(last - first + 1))
        print("sent", last - first + 1, self.path, flush=True)
    def log_message(self, *_):
        pass
http.server.ThreadingHTTPServer(("0.0.0.0", 8080), Origin).serve_forever()
"""


def helper(name: str, container: dict[str, Any], volumes: list[dict[str, Any]], **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "containers": [{"name": "main"} | container],
            "volumes": volumes,
            "terminationGracePeriodSeconds": 0,
            "restartPolicy": "OnFailure",
            **spec,
        },
    }


def folder_maker(node: str) -> dict[str, Any]:
    """Makes the folder of a node that replicas share, writable for everybody: what an administrator does once."""
    container = {
        "image": "localhost/sh:1",
        "args": ["-c", f"rm -rf {FOLDER}/*; chmod 1777 {FOLDER}"],
        "securityContext": {"runAsUser": 0},
        "volumeMounts": [{"name": "folder", "mountPath": FOLDER}],
    }
    volume = {"name": "folder", "hostPath": {"path": FOLDER, "type": "DirectoryOrCreate"}}
    return helper(f"folder-of-{node}", container, [volume], nodeName=node)


def origin() -> dict[str, Any]:
    container = {
        "image": "localhost/python:3.11",
        "args": ["-c", ORIGIN],
        "volumeMounts": [{"name": "models", "mountPath": "/models"}],
    }
    return helper("origin", container, [{"name": "models", "image": {"reference": MODELS}}])


@pytest.fixture
def with_folders(clean: Slipway) -> Iterator[Slipway]:
    """Slipway on nodes with a folder for models, and a web server that has one."""
    helpers = [folder_maker("node-a"), folder_maker("node-b"), origin()]
    clean.apply(json.dumps({"apiVersion": "v1", "kind": "List", "items": helpers}))
    clean.install(f"modelCache.nodePath={FOLDER}")
    for node in ("node-a", "node-b"):
        wait_for(f"the folder of {node}", lambda node=node: phase(clean, f"folder-of-{node}") == "Succeeded")
    yield clean
    for service in clean.services():
        clean.delete(service)
    clean.access.kubectl("delete", "pod", "--wait=false", *(one["metadata"]["name"] for one in helpers))
    clean.install()


def phase(slipway: Slipway, pod: str) -> str:
    return str(slipway.core.read_namespaced_pod(pod, "default").status.phase)


def sent(slipway: Slipway) -> int:
    """Bytes that the web server has sent so far."""
    lines = slipway.access.kubectl("logs", "origin").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("sent "))


@pytest.mark.full
@pytest.mark.capability("ST-4", "ST-6")
def test_a_model_comes_to_each_node_once_before_replicas_that_then_download_nothing(with_folders: Slipway) -> None:
    slipway = with_folders
    address = wait_for("the web server", lambda: slipway.core.read_namespaced_pod("origin", "default").status.pod_ip)
    uri = f"http://{address}:8080/tiny"
    model = {"uri": uri, "cache": {"policy": "Node"}}

    slipway.apply(as_yaml(static("first", 0, model=model, prePull={"maxConcurrent": 1})))
    cached = wait_for(
        "both nodes have the model",
        lambda: (c := slipway.condition("first", "ModelCached")) and c["status"] == "True" and c,
        timeout=120,
    )
    status = slipway.service("first")["status"]["modelCache"]
    by_pulls = sent(slipway)

    slipway.apply(as_yaml(static("second", 2, model=model)))
    slipway.wait_ready("second", replicas=2)
    by_replicas = sent(slipway) - by_pulls

    assert cached["reason"] == "Cached"
    assert status["nodesReady"] == status["nodesTotal"] == 2
    assert by_pulls > status["bytes"] > 100_000
    # Each replica asks what the address means now, a byte of each file; the files themselves do not come again.
    assert by_replicas < 200, slipway.access.kubectl("logs", "origin")
    slipway.wait_events("first", "ModelCached")
    pulls = slipway.core.list_namespaced_pod("default", label_selector=f"{names.LABEL_PRE_PULL}=first").items
    assert {pod.spec.node_name for pod in pulls} == {"node-a", "node-b"}
    print(f"pulled {by_pulls} bytes to 2 nodes; 2 replicas then downloaded {by_replicas} bytes")


@pytest.mark.capability("PL-12")
def test_a_model_in_an_image_is_mounted_in_a_restricted_namespace(clean: Slipway) -> None:
    label = ("label", "namespace", "default", "--overwrite")
    clean.access.kubectl(*label, "pod-security.kubernetes.io/enforce=restricted")
    try:
        clean.apply(as_yaml(static("boxed", 1, model={"uri": f"oci://{MODELS}#tiny"}, prePull={})))
        clean.wait_ready("boxed", replicas=1)
        wait_for("both nodes", lambda: (clean.condition("boxed", "ModelCached") or {}).get("status") == "True")
        (pod,) = clean.pods("boxed")
        said = clean.openai().completions.create(model="boxed", prompt="Once upon a time", max_tokens=4)
    finally:
        clean.access.kubectl(*label, "pod-security.kubernetes.io/enforce-")

    assert said.choices[0].text
    volume = next(one for one in pod.to_dict()["spec"]["volumes"] if one["name"] == "slipway-image")
    assert volume["image"]["reference"] == MODELS
