"""internalTLS of the chart: what it renders, and that its rights suffice to keep certificates and for nothing more."""

import base64
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from slipway_api.internal_tls import REPLICAS_SECRET, VOLUME, gateways_name, replicas_name
from slipway_api.trust import Trust
from slipway_kube import auth
from slipway_kube.client import Client
from slipway_kube.errors import Forbidden
from slipway_kube.resources import SECRETS
from slipway_kube.writer import Writer
from slipway_operator.authority import Pair, certificate_of
from slipway_operator.certificates import LOOK_SECONDS, Certificates, Place
from slipway_operator.metrics import OperatorMetrics
from tests.chart.rights import apply_rights, kubeconfig_of
from tests.chart.test_chart import of_kind, render

pytestmark = [pytest.mark.apiserver, pytest.mark.capability("SE-10")]

SYSTEM, TEAM = "system-of-internal-tls", "team-of-internal-tls"
ON = "internalTLS.enabled=true"


class Leader:
    """A fence that is always passed."""

    def is_leader(self) -> bool:
        return True

    def seconds_left(self) -> float:
        return 60.0


def gateway_of(manifests: list[dict]) -> dict:
    return of_kind(manifests, "Deployment")["slipway-gateway"]["spec"]["template"]["spec"]


def secret_rights(manifests: list[dict]) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    rules = [
        rule
        for kind in ("ClusterRole", "Role")
        for name, role in of_kind(manifests, kind).items()
        if name.startswith("slipway-operator") and not name.endswith("-keys")
        for rule in role["rules"]
        if "secrets" in rule.get("resources", ())
    ]
    return sorted((tuple(rule.get("resourceNames", ())), tuple(rule["verbs"])) for rule in rules)


def test_one_value_turns_it_on_and_without_it_nothing_is_granted(apiserver):
    off, on = render(apiserver), render(apiserver, ON)

    assert secret_rights(off) == []
    assert secret_rights(on) == [
        ((), ("create",)),
        ((), ("create",)),
        (("slipway-internal-ca", "slipway-gateway-internal-tls"), ("get", "patch")),
        ((REPLICAS_SECRET,), ("get", "patch")),
    ]
    for manifests, scheme in ((off, None), (on, "HTTPS")):
        (container,) = gateway_of(manifests)["containers"]
        probes = [container[name]["httpGet"].get("scheme") for name in ("startupProbe", "livenessProbe")]
        assert [*probes, container["readinessProbe"]["httpGet"].get("scheme")] == [scheme] * 3
        volumes = {one["name"]: one for one in gateway_of(manifests)["volumes"]}
        assert volumes["internal-ca"]["configMap"] == {"name": "slipway-internal-ca", "optional": True}
        assert (VOLUME in volumes) == (scheme is not None)


@pytest.fixture
def rights(apiserver, tmp_path: Path):
    apply_rights(apiserver, "operator", SYSTEM, ON)
    apiserver.kubectl("create", "namespace", TEAM)
    kubeconfig_of(apiserver, "slipway-operator", SYSTEM, tmp_path)
    yield apiserver
    apiserver.kubectl("delete", "namespace", SYSTEM, TEAM, "--wait=false")


async def test_with_the_charts_rights_certificates_are_made_and_renewed_and_no_other_secret_is_read(rights, tmp_path):
    now = [datetime.now(UTC)]
    began = now[0]

    def stored() -> dict[str, bytes]:
        found = json.loads(rights.kubectl("get", "secret", REPLICAS_SECRET, "-n", TEAM, "-o", "json"))
        assert found["type"] == "kubernetes.io/tls"
        return {key: base64.b64decode(text) for key, text in found["data"].items()}

    async with Client(auth.load(str(tmp_path / "kubeconfig"))) as client:
        trust = Trust()
        operator = Certificates(
            client,
            Writer(client, Leader()),
            trust,
            Place(installation="slipway", namespace=SYSTEM),
            OperatorMetrics(),
            namespaces=lambda: {TEAM},
            on_fault=lambda _namespace: None,
            now=lambda: now[0],
            monotonic=lambda: (now[0] - began).total_seconds() + LOOK_SECONDS,
            is_enabled=True,
        )
        await operator.look()
        assert operator.faults() == []
        first = stored()
        assert certificate_of(Pair(first["tls.crt"], first["tls.key"])).names[0] == replicas_name(TEAM)
        gateways = json.loads(
            rights.kubectl("get", "secret", "slipway-gateway-internal-tls", "-n", SYSTEM, "-o", "json")
        )["data"]
        pair = Pair(base64.b64decode(gateways["tls.crt"]), base64.b64decode(gateways["tls.key"]))
        assert certificate_of(pair).names == (gateways_name(SYSTEM),)

        now[0] += timedelta(days=20)
        await operator.look()
        assert operator.faults() == []
        assert stored()["tls.crt"] != first["tls.crt"]

        now[0] += timedelta(days=240)
        await operator.look()
        bundle = rights.kubectl(
            "get", "configmap", "slipway-internal-ca", "-n", SYSTEM, "-o", r"jsonpath={.data.ca\.crt}"
        )
        assert bundle.count("BEGIN CERTIFICATE") == 2, "an heir is trusted before it signs"
        assert stored()["ca.crt"].decode() == bundle

        rights.kubectl("create", "secret", "generic", "of-somebody-else", "-n", TEAM, "--from-literal=a=b")
        with pytest.raises(Forbidden):
            await client.get(SECRETS.path(TEAM, "of-somebody-else"))
        with pytest.raises(Forbidden):
            await client.get(SECRETS.path(TEAM))
        with pytest.raises(Forbidden):
            await client.merge_patch(SECRETS.path(TEAM, "of-somebody-else"), {"data": {}})
