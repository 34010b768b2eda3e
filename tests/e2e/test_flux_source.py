"""The source of Flux's story: the same files are the same revision, and the tarball is what the artifact says it is."""

import hashlib
import io
import tarfile
import urllib.error
import urllib.request

import pytest

from e2e.cluster.build import version_of
from e2e.flux import build
from e2e.flux.controller import ArtifactServer, tarball_of


def test_an_artifact_names_the_digest_and_size_of_the_tarball_that_is_served():
    server = ArtifactServer()
    server.start()
    try:
        artifact = server.add(tarball_of({"a.yaml": "kind: A\n", "folder/b.yaml": "kind: B\n"}))
        with urllib.request.urlopen(artifact["url"], timeout=10) as answer:
            body = answer.read()
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(artifact["url"] + ".sig", timeout=10)
    finally:
        server.stop()

    assert artifact["digest"] == f"sha256:{hashlib.sha256(body).hexdigest()}"
    assert artifact["size"] == len(body)
    with tarfile.open(fileobj=io.BytesIO(body)) as tar:
        assert {one.name: tar.extractfile(one).read() for one in tar} == {
            "a.yaml": b"kind: A\n",
            "folder/b.yaml": b"kind: B\n",
        }


def test_a_revision_changes_with_a_file_and_not_with_their_order():
    server = ArtifactServer()
    try:
        one, same = server.add(tarball_of({"a": "1", "b": "2"})), server.add(tarball_of({"b": "2", "a": "1"}))
        other = server.add(tarball_of({"a": "1", "b": "3"}))
    finally:
        server.start()
        server.stop()

    assert one["revision"] == same["revision"] != other["revision"]


@pytest.mark.parametrize("program", [build.KUSTOMIZE, build.HELM], ids=lambda program: program.name)
def test_the_controllers_module_pins_the_kubernetes_libraries_of_the_clusters_minor_version(program):
    flux, cluster = (program.folder / "go.mod").read_text(), (build.HERE.parent / "cluster" / "go.mod").read_text()

    assert version_of("k8s.io/client-go", flux).split(".")[1] == version_of("k8s.io/kubernetes", cluster).split(".")[1]
