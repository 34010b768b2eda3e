"""Where a model comes from: an OCI image as a volume, and the hub, proxy and certificates of a private network."""

import pytest

from slipway_api import names
from slipway_api.conditions import find_condition
from slipway_operator.core.service.plan import plan
from tests.builders import T0, a_pod, a_service, promised, seen
from tests.operator.core.service.test_model_cache import pod_of, variables, volume

# --- images as volumes ------------------------------------------------------------------------------------------------


@pytest.mark.capability("PL-12")
def test_an_oci_model_is_an_image_volume_that_the_runtime_reads_as_files():
    service = a_service(uri="oci://registry.example:5000/team/llama:1@sha256:" + "a" * 64 + "#models/llama")

    spec = pod_of(service)
    found = volume(spec, "slipway-image")

    assert found is not None
    reference = "registry.example:5000/team/llama:1@sha256:" + "a" * 64
    assert found[0]["image"] == {"reference": reference, "pullPolicy": "IfNotPresent"}
    assert found[1] == {"name": "slipway-image", "mountPath": names.IMAGE_DIRECTORY, "readOnly": True}
    assert spec["containers"][0]["args"][1] == f"file://{names.IMAGE_DIRECTORY}/models/llama"


# --- private networks -------------------------------------------------------------------------------------------------


@pytest.mark.capability("PL-7")
def test_hub_proxy_and_certificates_reach_replicas_under_the_names_that_tools_read():
    network = {
        "hubEndpoint": "https://hub.example.internal",
        "proxy": "http://proxy.example.internal:3128",
        "noProxy": ".example.internal,10.0.0.0/8",
        "caBundleRef": {"name": "corporate-ca"},
    }
    spec = pod_of(a_service(uri="hf://org/model", model={"network": network}))

    found = volume(spec, "slipway-ca")
    assert found is not None
    assert found[0]["configMap"] == {"name": "corporate-ca", "items": [{"key": "ca.crt", "path": "ca.crt"}]}
    assert found[1]["mountPath"] == names.CA_DIRECTORY
    env = variables(spec)
    assert env["HF_ENDPOINT"] == "https://hub.example.internal"
    assert env["HTTPS_PROXY"] == env["HTTP_PROXY"] == "http://proxy.example.internal:3128"
    assert env["NO_PROXY"] == ".example.internal,10.0.0.0/8"
    assert env["SSL_CERT_FILE"] == env["AWS_CA_BUNDLE"] == f"{names.CA_DIRECTORY}/ca.crt"


def test_a_proxy_with_a_password_comes_from_a_secret_and_wins():
    secret = {"secretKeyRef": {"name": "proxy", "key": "url"}}
    service = a_service(
        uri="hf://org/model",
        model={"network": {"proxy": "http://proxy:3128"}},
        runtime={"env": [{"name": "HTTPS_PROXY", "valueFrom": secret}]},
    )

    (chosen,) = [one for one in pod_of(service)["containers"][0]["env"] if one["name"] == "HTTPS_PROXY"]

    assert chosen == {"name": "HTTPS_PROXY", "valueFrom": secret}


@pytest.mark.capability("PL-12")
@pytest.mark.parametrize(
    ("image", "field"),
    [("registry.example/team/llama:1", "spec.model.uri"), ("slipway/runtime:1", "spec.runtime.image")],
)
def test_an_image_that_cannot_be_pulled_is_named_with_the_field_that_asks_for_it(image: str, field: str):
    service = promised(a_service(uri="oci://registry.example/team/llama:1"), 1)
    waiting = a_pod(service=service).cannot_pull().but(waiting_message=f'Back-off pulling image "{image}": not found')

    made = plan(seen(service, waiting), T0)

    stalled = find_condition(made.status.conditions, "Stalled")
    assert stalled is not None
    assert stalled.reason == "ImagePullFailed"
    assert f"check {field}" in stalled.message
