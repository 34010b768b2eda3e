"""Installs Slipway on a real node from images of a release, and makes a runtime image without torch."""

import json
import sys
from pathlib import Path
from typing import Any

from e2e.cluster.paths import CHECKOUT
from e2e.containerd import archive, images
from e2e.containerd.machine import NAMES, Machine
from e2e.slipway import GATEWAY, RELEASE_NAMESPACE, Slipway
from slipway_api import names

NODE = NAMES[0]  # it has the images: each is half a gigabyte
USER = 1000660000  # as OpenShift assigns them: no image has a name for it
RUNTIME_IMAGE = "localhost/slipway-e2e/runtime-without-packages:1"
MODEL_IMAGE, MODEL_FOLDER = "localhost/slipway-e2e/models:1", "models/tiny"  # an image with a model, for image volumes
PACKAGES, MOUNTED = "packages", "/opt/packages"  # the volume with the packages that the image leaves out
PYTHON = (3, 11)  # of the images' Debian: packages compiled for another one do not load


SETTINGS = (f"podSecurity.user={USER}", "podSecurity.group=0")


def install(machine: Machine) -> Slipway:
    """Install the chart as an arbitrary user in a namespace that enforces Pod Security `restricted`."""
    for path in images.ensure().values():
        machine.import_image(path, NODE)
    for other in set(NAMES) - {NODE}:  # it has none of the images; pods of the tests name it
        machine.kubectl("patch", "node", other, "--patch", '{"spec": {"unschedulable": true}}')
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    machine.api("POST", "/api/v1/namespaces", {"metadata": {"name": RELEASE_NAMESPACE, "labels": labels}})
    slipway = Slipway(machine)
    slipway.install(*SETTINGS)
    service = machine.api("GET", f"/api/v1/namespaces/{RELEASE_NAMESPACE}/services/slipway-gateway")
    machine.publish(GATEWAY, service["spec"]["clusterIP"], 8000)
    return slipway


def why_no_packages() -> str | None:
    """The reason why the packages of this machine cannot be used in the images, as a sentence."""
    if sys.version_info[:2] != PYTHON:
        have, need = (".".join(map(str, version)) for version in (sys.version_info[:2], PYTHON))
        return f"The packages of Python {have} do not load in the images, which have {need}."
    return None


def provide_runtime(machine: Machine) -> None:
    """Make the runtime of a release runnable without its 6 GB of packages.

    The image has Debian, Slipway's wheel and the embedded model, as the runtime's own image. torch and the other
    packages are those of this environment, on a persistent volume that replicas mount read-only.
    """
    path = machine.folder / "runtime.tar"
    model = "/opt/slipway/models/tiny"
    source = images.ensure(["operator"])["operator"]
    archive.derive(source, path, RUNTIME_IMAGE, ["slipway-runtime"], {model: CHECKOUT / "models" / "tiny"})
    machine.import_image(path, NODE)
    archive.derive(machine.sandbox_archive, path, MODEL_IMAGE, ["/pod"], {MODEL_FOLDER: CHECKOUT / "models" / "tiny"})
    machine.import_image(path, NODE)
    path.unlink()
    packages = Path(sys.prefix, "lib", f"python{PYTHON[0]}.{PYTHON[1]}", "site-packages")
    shared = {"accessModes": ["ReadOnlyMany"], "storageClassName": ""}
    volume = shared | {"capacity": {"storage": "1Gi"}, "hostPath": {"path": str(packages), "type": "Directory"}}
    claim = shared | {"resources": {"requests": {"storage": "1Gi"}}, "volumeName": PACKAGES}
    for kind, spec in (("PersistentVolume", volume), ("PersistentVolumeClaim", claim)):
        manifest = {"apiVersion": "v1", "kind": kind, "metadata": {"name": PACKAGES}, "spec": spec}
        machine.kubectl("apply", "-n", "default", "-f", "-", stdin=json.dumps(manifest))


def service(name: str, uri: str = "file:///opt/slipway/models/tiny", **spec: Any) -> dict[str, Any]:
    """A service whose replicas run that image with those packages, on CPUs and within limits."""
    environment = [{"name": "PYTHONPATH", "value": f"/opt/slipway/app:{MOUNTED}"}]
    mount = {"name": PACKAGES, "mountPath": MOUNTED, "readOnly": True}
    server = {"name": "server", "env": environment, "volumeMounts": [mount]}
    volume = {"name": PACKAGES, "persistentVolumeClaim": {"claimName": PACKAGES, "readOnly": True}}
    limits = {"requests": {"cpu": "100m", "memory": "512Mi"}, "limits": {"cpu": "1", "memory": "2Gi"}}
    spec = {
        "model": {"uri": uri},
        "runtime": {"image": RUNTIME_IMAGE, "maxModelLen": 512, "kvCache": {"bytes": "6Mi"}},
        "resources": {"gpu": {"count": 0}, **limits},
        "template": {"spec": {"containers": [server], "volumes": [volume]}},
        "replicas": 1,
    } | spec
    return {"apiVersion": names.API_VERSION, "kind": "InferenceService", "metadata": {"name": name}, "spec": spec}
