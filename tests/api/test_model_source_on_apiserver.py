"""Where a model is kept and how it is reached: the API server knows which of these fields go together."""

from typing import Any

import pytest

from tests.api.manifests import a_manifest, apply, assert_refused

pytestmark = pytest.mark.apiserver

HUB = "hf://org/model"
DIGEST = "@sha256:" + "0123456789abcdef" * 4


def a_model(uri: str = HUB, **model: Any) -> dict[str, Any]:
    return {"model": {"uri": uri} | model}


ACCEPTED: list[tuple[str, dict[str, Any]]] = [
    ("an image", a_model("oci://ghcr.io/org/model:1")),
    ("an image of a port, by digest, with a directory", a_model(f"oci://registry:5000/a/b/model{DIGEST}#models/llama")),
    ("an image with tag and digest", a_model(f"oci://registry.example/model:v1.2{DIGEST}")),
    ("a node cache", a_model(cache={"policy": "Node"})),
    ("a shared claim", a_model("s3://bucket/llama", cache={"policy": "Shared", "claimName": "models"})),
    ("a pull to nodes with a cache", a_model(cache={"policy": "Node"}) | {"prePull": {}}),
    ("a pull of an image", a_model("oci://ghcr.io/org/model:1") | {"prePull": {"maxConcurrent": 64}}),
    ("a pull of the runtime's image", a_model("file:///opt/slipway/models/tiny") | {"prePull": {}}),
    (
        "a private network",
        a_model(
            network={
                "hubEndpoint": "https://hub.internal:8443/hf",
                "proxy": "http://proxy.internal:3128",
                "noProxy": ".internal,10.0.0.0/8,*.svc",
                "caBundleRef": {"name": "corporate-ca"},
            }
        ),
    ),
]

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("an image without a name", a_model("oci://registry.example"), "oci://registry/name:tag"),
    ("an image in capitals", a_model("oci://registry.example/Model:1"), "oci://registry/name:tag"),
    ("a directory upwards", a_model("oci://registry.example/model:1#a/../../etc"), "oci://registry/name:tag"),
    ("a tokenizer in an image", a_model(tokenizer={"uri": "oci://registry.example/model:1"}), "uri must be hf://"),
    ("a shared cache without a claim", a_model(cache={"policy": "Shared"}), "claimName is needed for policy Shared"),
    ("a claim without a shared cache", a_model(cache={"policy": "Node", "claimName": "models"}), "and only there"),
    ("a claim beside no cache", a_model(cache={"claimName": "models"}), "and only there"),
    ("a cache of a claim", a_model("pvc://models/llama", cache={"policy": "Node"}), "not downloaded"),
    ("a cache of an image", a_model("oci://ghcr.io/org/model:1", cache={"policy": "Node"}), "not downloaded"),
    ("an unknown policy", a_model(cache={"policy": "Everywhere"}), 'supported values: "None", "Shared", "Node"'),
    ("a pull to nowhere", a_model() | {"prePull": {}}, "prePull needs a model that a node or a claim keeps"),
    ("no node at once", a_model(cache={"policy": "Node"}) | {"prePull": {"maxConcurrent": 0}}, "maxConcurrent"),
    ("a password of a hub", a_model(network={"hubEndpoint": "https://me:secret@hub"}), "without a password"),
    ("a password of a proxy", a_model(network={"proxy": "http://me:secret@proxy:3128"}), "without a password"),
    ("a proxy without a scheme", a_model(network={"proxy": "proxy:3128"}), "network.proxy must be"),
    ("exceptions of no proxy", a_model(network={"noProxy": ".internal"}), "network.noProxy needs network.proxy"),
    ("a bundle without a name", a_model(network={"caBundleRef": {}}), "caBundleRef.name: Required value"),
]


@pytest.mark.parametrize("spec", [row[1] for row in ACCEPTED], ids=[row[0] for row in ACCEPTED])
def test_what_goes_together_is_accepted(api, spec):
    apply(api, a_manifest("source", **spec), "--dry-run=server")


@pytest.mark.parametrize(("spec", "sentence"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_what_does_not_is_refused_with_a_sentence(api, spec, sentence):
    assert_refused(api, a_manifest("source", **spec), sentence)
