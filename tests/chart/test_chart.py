"""The chart installs on a real API server, asks for little, keeps its secret, and fits PodSecurity `restricted`."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import slipway_api
from e2e.cluster.access import Access, CommandError
from slipway_api.crd import (
    engine_crd,
    inference_service_crd,
    lora_adapter_crd,
    service_template_crd,
    warm_pool_crd,
)
from tests.chart.lint import parsed

pytestmark = pytest.mark.apiserver

CHART = Path(__file__).resolve().parents[2] / "charts" / "slipway"
NAMESPACE = "slipway-system"
ACCOUNT = f"system:serviceaccount:{NAMESPACE}:slipway-"

Manifest = dict[str, Any]


def render(access: Access, *settings: str) -> list[Manifest]:
    sets = [part for setting in settings for part in ("--set", setting)]
    text = access.helm("template", "slipway", CHART, "--namespace", NAMESPACE, *sets)
    return parsed(text)


def of_kind(manifests: list[Manifest], kind: str) -> dict[str, Manifest]:
    return {manifest["metadata"]["name"]: manifest for manifest in manifests if manifest["kind"] == kind}


def upgrade(access: Access, *settings: str) -> None:
    sets = [part for setting in settings for part in ("--set", setting)]
    # Other tests have applied the CRD to this API server before us, and not with helm.
    ours = ["--take-ownership", "--force-conflicts"]
    access.helm("upgrade", "--install", "slipway", CHART, "--namespace", NAMESPACE, "--create-namespace", *ours, *sets)


@pytest.fixture(scope="module")
def rendered(apiserver: Access) -> list[Manifest]:
    return render(apiserver)


@pytest.fixture(scope="module")
def installed(apiserver: Access) -> Iterator[Access]:
    upgrade(apiserver)
    yield apiserver
    upgrade(apiserver)  # the CRD stays behind: as everybody else applies it
    apiserver.helm("uninstall", "slipway", "--namespace", NAMESPACE, "--wait=hookOnly")


# Rendered


def test_helm_finds_nothing_to_complain_about(apiserver):
    assert "0 chart(s) failed" in apiserver.helm("lint", CHART, "--strict")


def test_chart_and_packages_are_one_version():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())

    assert chart["version"] == chart["appVersion"] == slipway_api.__version__


def test_a_misspelt_value_is_refused_by_name(apiserver):
    with pytest.raises(CommandError, match="'replica' not allowed"):
        render(apiserver, "operator.replica=3")


@pytest.mark.capability("SE-3")
@pytest.mark.parametrize("part", ["operator", "gateway"])
def test_pods_are_restricted(rendered, part):
    pod = of_kind(rendered, "Deployment")[f"slipway-{part}"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]

    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == 65532
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    assert [volume for volume in pod["volumes"] if "hostPath" in volume] == []
    assert pod["serviceAccountName"] == f"slipway-{part}"  # each its own


@pytest.mark.parametrize("part", ["operator", "gateway"])
def test_pods_are_probed_bounded_and_spread(rendered, part):
    pod = of_kind(rendered, "Deployment")[f"slipway-{part}"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]

    assert {"startupProbe", "livenessProbe", "readinessProbe"} <= container.keys()
    assert container["resources"]["requests"].keys() == {"cpu", "memory"}
    assert "memory" in container["resources"]["limits"]
    assert pod["topologySpreadConstraints"]
    assert of_kind(rendered, "PodDisruptionBudget")[f"slipway-{part}"]["spec"]["maxUnavailable"] == 1
    assert of_kind(rendered, "NetworkPolicy")[f"slipway-{part}"]["spec"]["policyTypes"] == ["Ingress"]


def test_both_parts_run_twice_unless_told_otherwise(apiserver, rendered):
    replicas = {name: one["spec"]["replicas"] for name, one in of_kind(rendered, "Deployment").items()}
    assert replicas == {"slipway-operator": 2, "slipway-gateway": 2}

    one = of_kind(render(apiserver, "gateway.replicas=1"), "Deployment")
    assert one["slipway-gateway"]["spec"]["replicas"] == 1


def rules_of(manifests: list[Manifest], part: str) -> list[Manifest]:
    roles = [*of_kind(manifests, "ClusterRole").values(), *of_kind(manifests, "Role").values()]
    return [rule for role in roles if role["metadata"]["name"].startswith(f"slipway-{part}") for rule in role["rules"]]


@pytest.mark.capability("SE-3")
@pytest.mark.parametrize("settings", [(), ("operator.replicaAccess=proxy",), ("watchNamespaces={a,b}",)])
def test_no_right_is_a_wildcard_and_none_reads_secrets(apiserver, settings):
    create_keys = {"apiGroups": [""], "resources": ["secrets"], "verbs": ["create"]}
    rules = [
        rule
        for part in ("operator", "gateway", "view", "edit")
        for rule in rules_of(render(apiserver, *settings), part)
        if rule != create_keys
    ]

    words = {word for rule in rules for key in ("apiGroups", "resources", "verbs") for word in rule[key]}
    assert "*" not in words
    assert words.isdisjoint({"secrets", "pods/exec", "pods/ephemeralcontainers", "escalate", "bind", "impersonate"})


@pytest.mark.capability("SE-3")
def test_pods_proxy_is_granted_only_to_an_operator_that_dials_through_the_api_server(apiserver, rendered):
    def resources(manifests):
        return {resource for rule in rules_of(manifests, "operator") for resource in rule["resources"]}

    assert "pods/proxy" not in resources(rendered)
    assert "pods/proxy" in resources(render(apiserver, "operator.replicaAccess=proxy"))


@pytest.mark.capability("SE-3")
def test_with_watched_namespaces_the_rights_end_there(apiserver):
    manifests = render(apiserver, "watchNamespaces={team-a,team-b}")
    granted = [
        (one["metadata"]["name"], one["metadata"]["namespace"])
        for one in manifests
        if one["kind"] == "Role" and not one["metadata"]["name"].endswith(("-lease", "-gateways", "-keys"))
    ]

    assert sorted(granted) == [
        *((f"slipway-{part}", namespace) for part in ("gateway", "operator") for namespace in ("team-a", "team-b")),
        ("slipway-operator-internal-tls", "slipway-system"),
    ]
    assert set(of_kind(manifests, "ClusterRole")) == {
        "slipway-operator-nodes",
        "slipway-operator-finalizers",
        "slipway-view",
        "slipway-edit",
        "slipway-templates",
    }
    # review/operator-users.md 2: the Role may be deleted before the services of its namespace.
    kinds, namespaces = of_kind(manifests, "ClusterRole")["slipway-operator-finalizers"]["rules"]
    assert (kinds["resources"], kinds["verbs"]) == (
        ["inferenceservices", "loraadapters"],
        ["get", "list", "watch", "patch"],
    )
    assert (namespaces["resourceNames"], namespaces["verbs"]) == (["team-a", "team-b"], ["get"])
    environment = of_kind(manifests, "Deployment")["slipway-operator"]["spec"]["template"]["spec"]["containers"][0][
        "env"
    ]
    assert {"name": "SLIPWAY_WATCH_NAMESPACES", "value": "team-a,team-b"} in environment


@pytest.mark.capability("SE-3")
def test_secrets_are_readable_only_in_namespaces_that_ask_for_it(apiserver, rendered):
    def readers(manifests):
        return [
            (one["kind"], one["metadata"]["namespace"], rule["verbs"])
            for one in manifests
            if one["kind"] in ("Role", "ClusterRole")
            for rule in one["rules"]
            if "secrets" in rule.get("resources", ())
        ]

    opted_in = render(apiserver, "adapterCredentials.namespaces={team-a}")

    create_keys = ("Role", NAMESPACE, ["create"])
    assert readers(rendered) == [create_keys]
    assert readers(opted_in) == [create_keys, ("Role", "team-a", ["get"])]
    assert readers(render(apiserver, "adminMaster.existingSecret=a", "gatewayKey.existingSecret=b")) == []
    binding = next(one for one in opted_in if one["kind"] == "RoleBinding" and "credentials" in one["metadata"]["name"])
    assert binding["metadata"]["name"] == "slipway-operator-adapter-credentials"
    assert binding["subjects"] == [
        {"kind": "ServiceAccount", "name": "slipway-operator", "namespace": "slipway-system"}
    ]


def test_the_chart_installs_the_very_crd_that_the_kinds_describe(apiserver, rendered):
    assert of_kind(rendered, "CustomResourceDefinition") == {
        "inferenceservices.slipway.dev": inference_service_crd(),
        "loraadapters.slipway.dev": lora_adapter_crd(),
        "warmpools.slipway.dev": warm_pool_crd(),
        "engines.slipway.dev": engine_crd(),
        "servicetemplates.slipway.dev": service_template_crd(),
    }
    assert of_kind(render(apiserver, "crds.install=false"), "CustomResourceDefinition") == {}


def test_the_operator_tells_users_the_address_of_the_gateway(apiserver):
    def gateway_url(*settings):
        pod = of_kind(render(apiserver, *settings), "Deployment")["slipway-operator"]["spec"]["template"]["spec"]
        return next(one["value"] for one in pod["containers"][0]["env"] if one["name"] == "SLIPWAY_GATEWAY_URL")

    assert gateway_url() == "http://slipway-gateway.slipway-system.svc.cluster.local:8000"
    assert gateway_url("gateway.url=https://llm.example.com") == "https://llm.example.com"


def pod_of(manifests: list[Manifest], part: str) -> Manifest:
    pod: Manifest = of_kind(manifests, "Deployment")[f"slipway-{part}"]["spec"]["template"]["spec"]
    return pod


def environment_of(manifests: list[Manifest], part: str) -> dict[str, str]:
    return {one["name"]: one.get("value", "") for one in pod_of(manifests, part)["containers"][0]["env"]}


def secrets_of(manifests: list[Manifest], part: str) -> set[str]:
    return {volume["secret"]["secretName"] for volume in pod_of(manifests, part)["volumes"] if "secret" in volume}


@pytest.mark.capability("SE-3")
def test_the_gateway_holds_a_key_of_its_own_and_never_the_admin_master(apiserver, rendered):
    """Security finding: a compromised gateway opened the admin port of every replica."""
    assert secrets_of(rendered, "gateway") == {"slipway-gateway-key"}
    assert secrets_of(rendered, "operator") == {"slipway-admin-master", "slipway-gateway-key"}
    assert "admin-master" not in json.dumps(pod_of(rendered, "gateway"))
    assert of_kind(rendered, "Secret") == {}

    own = render(apiserver, "gatewayKey.existingSecret=mine", "adminMaster.existingSecret=masters")
    assert secrets_of(own, "gateway") == {"mine"}
    assert secrets_of(own, "operator") == {"masters", "mine"}


@pytest.mark.capability("SE-3")
def test_the_gateway_may_do_no_more_than_its_watches(rendered):
    """Security finding: what the gateway may read was wider than what it reads."""
    rights = sorted((*rule["resources"], *rule["verbs"]) for rule in rules_of(rendered, "gateway"))

    assert rights == [
        ("inferenceservices", "loraadapters", "list", "watch"),
        ("namespaces", "list", "watch"),
        ("pods", "list", "watch"),
    ]


TENANTS = ("gateway.tenants.configMap=tenants", "gateway.tenants.keysSecret=api-keys")


@pytest.mark.capability("SE-1", "SE-3")
def test_with_tenants_the_gateway_reads_their_files_and_counts_its_own_replicas(apiserver, rendered):
    with_tenants = render(apiserver, *TENANTS)
    environment = environment_of(with_tenants, "gateway")
    mounts = {mount["name"]: mount for mount in pod_of(with_tenants, "gateway")["containers"][0]["volumeMounts"]}
    (role,) = [one for name, one in of_kind(with_tenants, "Role").items() if name == "slipway-gateway-peers"]

    assert environment["SLIPWAY_TENANTS_FILE"] == mounts["tenants"]["mountPath"] + "/tenants.yaml"
    assert environment["SLIPWAY_KEYS_DIRECTORY"] == mounts["api-keys"]["mountPath"]
    assert environment["SLIPWAY_GATEWAY_SERVICE"] in of_kind(with_tenants, "Service")
    assert secrets_of(with_tenants, "gateway") == {"slipway-gateway-key", "api-keys"}
    assert role["metadata"]["namespace"] == NAMESPACE
    assert role["rules"] == [
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]}
    ]
    assert "SLIPWAY_TENANTS_FILE" not in environment_of(rendered, "gateway")
    assert "slipway-gateway-peers" not in of_kind(rendered, "Role")


@pytest.mark.capability("SE-11")
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ((), "Open"),
        (TENANTS, "GatewayOnly"),
        ((*TENANTS, "routing.directAccessDefault=Open"), "Open"),
        (("routing.directAccessDefault=GatewayOnly",), "GatewayOnly"),
    ],
)
def test_with_tenants_new_services_are_closed_to_direct_callers(apiserver, settings, expected):
    """review/shipping.md 1"""
    assert environment_of(render(apiserver, *settings), "operator")["SLIPWAY_DIRECT_ACCESS"] == expected


def test_tenants_without_keys_are_refused(apiserver):
    with pytest.raises(CommandError, match="belong together"):
        render(apiserver, TENANTS[0])


@pytest.mark.capability("PL-8", "SE-4")
def test_with_a_certificate_the_gateway_speaks_tls_and_its_address_says_so(apiserver, rendered):
    secured = render(apiserver, "gateway.tls.secretName=cert")
    (port,) = of_kind(secured, "Service")["slipway-gateway"]["spec"]["ports"]
    (plain,) = of_kind(rendered, "Service")["slipway-gateway"]["spec"]["ports"]

    assert secrets_of(secured, "gateway") == {"slipway-gateway-key", "cert"}
    assert environment_of(secured, "gateway")["SLIPWAY_TLS_DIRECTORY"] == "/etc/slipway/tls"
    assert (port["name"], port["appProtocol"]) == ("https", "https")
    assert (plain["name"], plain["appProtocol"]) == ("http", "http")
    urls = {value for value in environment_of(secured, "operator").values() if "-gateway." in str(value)}
    assert urls == {"https://slipway-gateway.slipway-system.svc.cluster.local:8000"}


def test_the_operator_learns_which_namespaces_may_reach_replicas(apiserver, rendered):
    lists = ("networkPolicy.clientNamespaces={batch}", "networkPolicy.metricsNamespaces={a,b}")
    told = environment_of(render(apiserver, *lists), "operator")

    assert environment_of(rendered, "operator")["SLIPWAY_NETWORK_POLICY"] == "on"
    assert told["SLIPWAY_CLIENT_NAMESPACES"] == "batch"
    assert told["SLIPWAY_METRICS_NAMESPACES"] == "a,b"


def test_without_network_policies_the_operator_may_not_make_any(apiserver, rendered):
    def may_write_policies(manifests):
        return any("networkpolicies" in rule["resources"] for rule in rules_of(manifests, "operator"))

    off = render(apiserver, "networkPolicy.enabled=false")
    assert may_write_policies(rendered)
    assert not may_write_policies(off)
    assert environment_of(off, "operator")["SLIPWAY_NETWORK_POLICY"] == "off"
    assert of_kind(off, "NetworkPolicy") == {}


# Installed on the API server


@pytest.mark.capability("SE-3")
@pytest.mark.parametrize("part", ["operator", "gateway"])
def test_the_pods_are_admitted_where_podsecurity_restricted_is_enforced(installed, rendered, part):
    namespace = f"restricted-{part}"
    installed.kubectl("create", "namespace", namespace)
    installed.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    installed.kubectl("create", "serviceaccount", f"slipway-{part}", "-n", namespace)
    template = of_kind(rendered, "Deployment")[f"slipway-{part}"]["spec"]["template"]
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": part, "namespace": namespace},
        "spec": template["spec"],
    }

    answer = installed.kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(pod))

    assert "created (server dry run)" in answer


MAY = [
    ("operator", "watch", "inferenceservices.slipway.dev"),
    ("operator", "patch", "inferenceservices.slipway.dev/status"),
    ("operator", "update", "inferenceservices.slipway.dev/finalizers"),
    ("operator", "create", "pods"),
    ("operator", "delete", "pods"),
    ("operator", "list", "nodes"),
    ("operator", "patch", "poddisruptionbudgets.policy"),
    ("operator", "watch", "services"),
    ("operator", "watch", "poddisruptionbudgets.policy"),
    ("operator", "watch", "networkpolicies.networking.k8s.io"),
    ("operator", "delete", "services"),
    ("operator", "patch", "networkpolicies.networking.k8s.io"),
    ("operator", "create", "controllerrevisions.apps"),
    ("operator", "patch", "controllerrevisions.apps"),
    ("operator", "delete", "controllerrevisions.apps"),
    ("operator", "create", "events.events.k8s.io"),
    ("gateway", "watch", "pods"),
    ("gateway", "list", "inferenceservices.slipway.dev"),
]
MAY_NOT = [
    ("operator", "get", "secrets"),
    ("operator", "list", "configmaps"),
    ("operator", "update", "inferenceservices.slipway.dev"),
    ("operator", "create", "inferenceservices.slipway.dev"),
    ("operator", "create", "pods/exec"),
    ("operator", "patch", "nodes"),
    ("operator", "update", "leases.coordination.k8s.io"),
    ("operator", "create", "deployments.apps"),
    ("gateway", "get", "secrets"),
    ("gateway", "get", "pods"),
    ("gateway", "patch", "pods"),
    ("gateway", "patch", "inferenceservices.slipway.dev/status"),
    ("gateway", "list", "nodes"),
]


@pytest.mark.capability("SE-3")
@pytest.mark.parametrize(
    ("part", "verb", "resource", "answer"),
    [(*row, "yes") for row in MAY] + [(*row, "no") for row in MAY_NOT],
)
def test_the_api_server_grants_what_is_needed_and_no_more(installed, part, verb, resource, answer):
    resource, _, subresource = resource.partition("/")
    question = ["auth", "can-i", verb, resource, f"--as={ACCOUNT}{part}", "-n", "default"]
    if subresource:
        question.append(f"--subresource={subresource}")

    try:
        said = installed.kubectl(*question)
    except CommandError as refusal:  # kubectl says "no" with an exit code too
        said = refusal.stdout

    assert said.split()[0] == answer


def test_the_built_in_roles_reach_our_kind(rendered):
    roles = of_kind(rendered, "ClusterRole")
    reached_by = {
        name: {label.rpartition("-")[2] for label in roles[name]["metadata"]["labels"] if "aggregate-to" in label}
        for name in ("slipway-view", "slipway-edit")
    }

    assert reached_by == {"slipway-view": {"view", "edit", "admin"}, "slipway-edit": {"edit", "admin"}}
    assert {verb for rule in roles["slipway-view"]["rules"] for verb in rule["verbs"]} == {"get", "list", "watch"}


@pytest.mark.capability("OP-15")
def test_templates_are_read_by_operator_and_users_and_written_by_the_platform_team_alone(rendered):
    verbs = {
        name: {verb for rule in role["rules"] if "servicetemplates" in rule["resources"] for verb in rule["verbs"]}
        for name, role in of_kind(rendered, "ClusterRole").items()
    }
    reads = {"get", "list", "watch"}
    writers = {name for name, granted in verbs.items() if granted - reads}

    assert verbs["slipway-operator-nodes"] == verbs["slipway-view"] == reads
    assert writers == {"slipway-templates"}
    labels = of_kind(rendered, "ClusterRole")["slipway-templates"]["metadata"]["labels"]
    assert not any("aggregate-to" in label for label in labels), "a user of one namespace may not change all others"


@pytest.mark.capability("OP-17")
def test_two_installations_in_one_namespace_share_no_lease_and_no_gateways(apiserver):
    """review/operator-users.md 8."""

    def settings_of(name: str) -> tuple[str, str, list[str]]:
        manifests = render(apiserver, f"name={name}")
        container = of_kind(manifests, "Deployment")[f"{name}-operator"]["spec"]["template"]["spec"]["containers"][0]
        env = {one["name"]: one.get("value", "") for one in container["env"]}
        rules = of_kind(manifests, "Role")[f"{name}-operator-lease"]["rules"]
        labels = of_kind(manifests, "Deployment")[f"{name}-gateway"]["spec"]["template"]["metadata"]["labels"]
        selector = dict(part.split("=") for part in env["SLIPWAY_GATEWAY_SELECTOR"].split(","))
        assert selector.items() <= labels.items(), "it selects its own gateways"
        return env["SLIPWAY_LEASE_NAME"], env["SLIPWAY_GATEWAY_SELECTOR"], rules[1]["resourceNames"]

    lease, selector, allowed = settings_of("slipway")
    assert (lease, allowed) == ("slipway-operator", ["slipway-operator"]), "as in every earlier release"
    other_lease, other_selector, other_allowed = settings_of("slipway2")
    assert other_allowed == [other_lease] != [lease]
    assert other_selector != selector
