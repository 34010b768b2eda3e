"""Values as people write them: in a file, where helm reads every number as a float, and for every part of a pod."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.cluster import build
from slipway_gateway.settings import GatewaySettings
from slipway_operator.core.installation import PlacementDefaults
from slipway_operator.settings import OperatorSettings
from tests.chart.lint import CHART, NAMESPACE, Helm, parsed

pytestmark = pytest.mark.apiserver  # they need helm, which comes with the local cluster's binary

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
DIGEST = f"sha256:{'a' * 64}"
TENANTS = ("gateway.tenants.configMap=tenants", "gateway.tenants.keysSecret=keys")
# Branches of templates that a number is rendered in.
ENABLED = {
    "watchNamespaces": [],
    "gateway": {
        "service": {"type": "NodePort"},
        "tenants": {"configMap": "tenants", "keysSecret": "keys"},
        "batch": {"existingClaim": "files"},
        "tracing": {"otlpEndpoint": "http://collector:4318"},
    },
    "ingress": {"enabled": True, "hosts": ["llm.example.com"], "controller": "nginx"},
}


@pytest.fixture(scope="module")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    return Helm(build.ensure() / "bin", tmp_path_factory.mktemp("helm"))


def render(helm: Helm, values: dict[str, Any], folder: Path) -> str:
    file = folder / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    return helm.run("template", "slipway", str(CHART), "--namespace", NAMESPACE, "--values", str(file))


def manifests(text: str) -> dict[tuple[str, str], Any]:
    return {(one["kind"], one["metadata"]["name"]): one for one in parsed(text)}


def numbers(schema: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Each numeric value of the schema that may be large."""
    kinds = schema.get("type", "")
    if {"integer", "number"} & set([kinds] if isinstance(kinds, str) else kinds) and schema.get("maximum") != 1:
        yield path, schema
    for name, inner in schema.get("properties", {}).items():
        yield from numbers(inner, (*path, name))


def merged(values: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for name in path[:-1]:
        values = values.setdefault(name, {})
    values[path[-1]] = value


def test_every_number_of_a_values_file_is_rendered_in_full(helm, tmp_path):
    """review/operator-users.md 7: 1000000 became 1e+06, and the gateway did not start."""
    values: dict[str, Any] = json.loads(json.dumps(ENABLED))
    expected = {}
    for index, (path, schema) in enumerate(numbers(SCHEMA)):
        number = min(int(schema.get("maximum", 1 << 40)), 1_000_000 + index)
        merged(values, path, number)
        expected[".".join(path)] = number

    text = render(helm, values, tmp_path)

    assert len(expected) >= 12
    assert "e+0" not in text
    assert [name for name, number in expected.items() if str(number) not in text] == []


def test_every_setting_of_the_gateway_can_be_set_through_the_chart(helm, tmp_path):
    """review/shipping.md 16: 27 of 51 could not."""
    others = {"pod_name": "POD_NAME", "key_directory": "SLIPWAY_GATEWAY_KEY_DIR"}
    variables = [others.get(name, f"SLIPWAY_{name.upper()}") for name in GatewaySettings.model_fields]
    extra = [{"name": name, "value": f"of the user, {name}"} for name in variables]

    deployment = manifests(render(helm, {"gateway": {"extraEnv": extra}}, tmp_path))["Deployment", "slipway-gateway"]

    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    names = [one["name"] for one in container["env"]]
    assert len(names) == len(set(names)), "server-side apply refuses a name twice"
    assert [one for one in extra if one not in container["env"]] == []


@pytest.mark.parametrize("part", ["operator", "gateway"])
def test_what_platform_teams_ask_for_reaches_the_pods(helm, part, tmp_path):
    """review/operator-users.md 13."""
    volume = {"name": "ca", "configMap": {"name": "ca"}}
    mount = {"name": "ca", "mountPath": "/etc/ca"}
    spread = {"maxSkew": 2, "topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "DoNotSchedule"}
    values = {
        "commonLabels": {"team": "platform"},
        part: {
            "podLabels": {"sidecar.istio.io/inject": "false"},
            "serviceAccount": {"annotations": {"eks.amazonaws.com/role-arn": "arn"}},
            "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
            "envFrom": [{"secretRef": {"name": "more"}}],
            "extraVolumes": [volume],
            "extraVolumeMounts": [mount],
            "affinity": {"nodeAffinity": {}},
            "topologySpreadConstraints": [spread],
            "strategy": {"type": "Recreate"},
        },
    }

    found = manifests(render(helm, values, tmp_path))

    deployment = found["Deployment", f"slipway-{part}"]
    template = deployment["spec"]["template"]
    pod = template["spec"]
    (container,) = pod["containers"]
    assert template["metadata"]["labels"]["sidecar.istio.io/inject"] == "false"
    assert "sidecar.istio.io/inject" not in deployment["spec"]["selector"]["matchLabels"]
    assert found["ServiceAccount", f"slipway-{part}"]["metadata"]["annotations"] == {
        "eks.amazonaws.com/role-arn": "arn"
    }
    assert {"name": "HTTPS_PROXY", "value": "http://proxy:3128"} in container["env"]
    assert container["envFrom"] == [{"secretRef": {"name": "more"}}]
    assert volume in pod["volumes"]
    assert mount in container["volumeMounts"]
    assert pod["affinity"] == {"nodeAffinity": {}}
    assert pod["topologySpreadConstraints"] == [spread]
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}
    ours = [one for one in found.values() if "app.kubernetes.io/part-of" in one["metadata"].get("labels", {})]
    assert ours
    assert {one["metadata"]["labels"]["team"] for one in ours} == {"platform"}


def test_the_service_of_the_gateway_takes_the_options_of_a_service(helm, tmp_path):
    options = {
        "ipFamilyPolicy": "RequireDualStack",
        "ipFamilies": ["IPv6", "IPv4"],
        "externalTrafficPolicy": "Local",
        "loadBalancerClass": "internal",
        "loadBalancerSourceRanges": ["10.0.0.0/8"],
    }
    values = {"gateway": {"service": {"type": "LoadBalancer", "nodePort": 31000, "labels": {"a": "b"}, **options}}}

    service = manifests(render(helm, values, tmp_path))["Service", "slipway-gateway"]

    assert {name: service["spec"][name] for name in options} == options
    assert service["spec"]["ports"][0]["nodePort"] == 31000
    assert service["metadata"]["labels"]["a"] == "b"


def images_of(found: dict[tuple[str, str], Any]) -> set[str]:
    pods = [found["Deployment", f"slipway-{part}"]["spec"]["template"]["spec"] for part in ("operator", "gateway")]
    environment = {one["name"]: one.get("value") for one in pods[0]["containers"][0]["env"]}
    return {pod["containers"][0]["image"] for pod in pods} | {environment["SLIPWAY_RUNTIME_IMAGE"]}


@pytest.mark.parametrize(
    ("values", "prefix"),
    [
        ({}, "slipway/"),
        ({"image": {"registry": "ghcr.io/owner"}}, "ghcr.io/owner/slipway/"),
        ({"image": {"registry": "ghcr.io"}, "global": {"imageRegistry": "mirror:5000/"}}, "mirror:5000/slipway/"),
    ],
)
def test_one_value_names_the_registry_of_all_images(helm, values, prefix, tmp_path):
    found = images_of(manifests(render(helm, values, tmp_path)))

    assert {image.rpartition(":")[0] for image in found} == {
        f"{prefix}{part}" for part in ("operator", "gateway", "runtime")
    }


def test_an_image_can_be_pinned_by_digest(helm, tmp_path):
    values = {part: {"image": {"digest": DIGEST}} for part in ("operator", "gateway", "runtime")}

    assert images_of(manifests(render(helm, values, tmp_path))) == {
        f"slipway/{part}@{DIGEST}" for part in ("operator", "gateway", "runtime")
    }


def test_pull_secrets_of_a_chart_around_are_used_too(helm, tmp_path):
    values = {
        "imagePullSecrets": [{"name": "ours"}],
        "global": {"imagePullSecrets": ["theirs", {"name": "others"}, "ours"]},
    }

    found = manifests(render(helm, values, tmp_path))

    for part in ("operator", "gateway"):
        secrets = found["Deployment", f"slipway-{part}"]["spec"]["template"]["spec"]["imagePullSecrets"]
        assert secrets == [{"name": "ours"}, {"name": "theirs"}, {"name": "others"}]


def test_defaults_for_replicas_reach_the_operator(helm, tmp_path):
    """review/operator-users.md 13: pull secrets and tolerations reached operator and gateway only."""
    taint = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 1_000_000}
    values = {
        "global": {"imagePullSecrets": ["around", {"name": "registry"}]},
        "runtime": {
            "imagePullSecrets": [{"name": "registry"}],
            "nodeSelector": {"pool": "gpu"},
            "tolerations": [taint],
        },
    }
    deployment = manifests(render(helm, values, tmp_path))["Deployment", "slipway-operator"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    variables = {one["name"]: one["value"] for one in container["env"] if "value" in one}

    assert OperatorSettings.model_validate(variables).placement == PlacementDefaults(
        image_pull_secrets=("registry", "around"), node_selector={"pool": "gpu"}, tolerations=(taint,)
    )


@pytest.mark.parametrize(
    "values",
    [
        {"global": {"imagePullSecrets": [{"secret": "registry"}]}},
        {"global": {"imageRegistry": ["ghcr.io"]}},
        {"runtime": {"tolerations": [{"keys": "nvidia.com/gpu"}]}},
        {"runtime": {"nodeSelector": {"pool": 1}}},
    ],
)
def test_a_wrong_default_for_replicas_is_refused_when_the_chart_is_rendered(helm, values, tmp_path):
    with pytest.raises(SystemExit, match="don't meet the specifications of the schema"):
        render(helm, values, tmp_path)


def notes(helm: Helm, *settings: str) -> str:
    """NOTES.txt as `helm install` prints it."""
    sets = [part for setting in settings for part in ("--set", setting)]
    arguments = ["install", "slipway", str(CHART), "--namespace", NAMESPACE, "--dry-run=client", *sets]
    return helm.run(*arguments).partition("\nNOTES:\n")[2]


def test_the_notes_print_a_command_that_fits_tls_and_tenants(helm):
    """review/shipping.md 18."""
    plain, closed = notes(helm), notes(helm, "gateway.tls.secretName=c", *TENANTS)

    assert "curl -N http://127.0.0.1:8000/" in plain
    assert "Authorization" not in plain
    assert "curl -N --insecure https://127.0.0.1:8000/" in closed
    assert '-H "Authorization: Bearer $API_KEY" \\\n' in closed


def test_the_list_of_service_accounts_reaches_the_operator_also_without_the_charts_definitions(helm, tmp_path):
    """Issue 26, item 8; review/shipping.md 17: with crds.install=false the list had no effect."""
    for install in (True, False):
        values = {"allowedServiceAccountNames": ["models", "hub"], "crds": {"install": install}}
        found = manifests(render(helm, values, tmp_path))
        containers = found["Deployment", "slipway-operator"]["spec"]["template"]["spec"]["containers"]
        env = {one["name"]: one.get("value", "") for one in containers[0]["env"]}
        assert env["SLIPWAY_ALLOWED_SERVICE_ACCOUNTS"] == "models,hub"


def test_the_lists_of_images_and_priority_classes_reach_the_operator(helm, tmp_path):
    values = {"allowedImages": ["registry.example.com/a/", "quay.io"], "allowedPriorityClassNames": ["batch"]}
    found = manifests(render(helm, values, tmp_path))
    containers = found["Deployment", "slipway-operator"]["spec"]["template"]["spec"]["containers"]
    env = {one["name"]: one.get("value", "") for one in containers[0]["env"]}
    assert env["SLIPWAY_ALLOWED_IMAGES"] == "registry.example.com/a/,quay.io"
    assert env["SLIPWAY_ALLOWED_PRIORITY_CLASSES"] == "batch"


def test_the_definitions_do_not_depend_on_the_values(helm, tmp_path):
    """Issue 26, item 8."""
    found = manifests(render(helm, {"allowedServiceAccountNames": ["models"]}, tmp_path))

    rendered = [one for (kind, _), one in sorted(found.items()) if kind == "CustomResourceDefinition"]
    files = sorted((CHART.parents[1] / "crds").iterdir())
    assert rendered == [definition for path in files for definition in parsed(path.read_text())]


@pytest.mark.capability("OB-4", "OB-11")
def test_each_dashboard_is_a_config_map_that_grafanas_sidecar_finds(helm, tmp_path):
    found = manifests(render(helm, {"monitoring": {"dashboard": True}}, tmp_path))

    files = sorted((CHART / "files" / "dashboards").glob("*.json"))
    assert len(files) == 4
    for path in files:
        config_map = found["ConfigMap", f"slipway-dashboard-{path.stem}"]
        assert config_map["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert json.loads(config_map["data"][f"slipway-{path.stem}.json"]) == json.loads(path.read_text())
    assert "ConfigMap" not in {kind for kind, name in manifests(render(helm, {}, tmp_path)) if "dashboard" in name}
