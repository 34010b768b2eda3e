"""Pods that serve TLS, and what becomes of services whose engine answers in plain text."""

from dataclasses import replace

import pytest

from slipway_api import internal_tls, names
from slipway_operator.core.installation import NONROOT, PlacementDefaults
from slipway_operator.core.service.replicas.access import PortAccess
from slipway_operator.core.service.replicas.pod import build_pod
from slipway_operator.core.service.rollout.revision import resolve
from tests.builders import IMAGE, a_service
from tests.operator.core.service.test_engines import a_vllm_service, a_world

pytestmark = pytest.mark.capability("SE-10")

ACCESS = PortAccess(nonce="n", admin_digests=("aa",))


def pods(service) -> tuple[dict, dict]:
    """The same pod in plain text and with TLS."""
    revision = resolve(service, IMAGE, (), None)
    options = {"slot": 0, "attempt": 0, "user": NONROOT, "placement": PlacementDefaults()}
    return tuple(
        build_pod(service, revision, access=access, **options) for access in (ACCESS, replace(ACCESS, tls=True))
    )


def test_a_pod_with_tls_differs_by_its_certificate_flags_and_probes_alone():
    plain, secure = pods(a_service(runtime={"args": ["--seed", "7"]}))

    (before,), (server,) = plain["spec"]["containers"], secure["spec"]["containers"]
    volume = {"name": "internal-tls", "secret": {"secretName": "slipway-internal-tls", "defaultMode": 0o440}}
    assert secure["spec"]["volumes"] == [*plain["spec"]["volumes"], volume]
    mount = {"name": "internal-tls", "mountPath": "/etc/slipway/internal-tls", "readOnly": True}
    assert server["volumeMounts"] == [*before["volumeMounts"], mount]
    assert server["args"] == ["serve", "--tls-directory", "/etc/slipway/internal-tls", *before["args"][1:]]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert server[probe]["httpGet"] == before[probe]["httpGet"] | {"scheme": "HTTPS"}
    kept = {"args", "volumeMounts", "startupProbe", "readinessProbe", "livenessProbe"}
    assert {key: value for key, value in server.items() if key not in kept} == {
        key: value for key, value in before.items() if key not in kept
    }
    assert secure["metadata"] == plain["metadata"]


def test_a_template_cannot_take_the_place_of_the_certificate():
    theirs = {"volumes": [{"name": internal_tls.VOLUME, "emptyDir": {}}]}
    mounts = [{"name": internal_tls.VOLUME, "mountPath": internal_tls.DIRECTORY}]
    template = {"spec": {**theirs, "containers": [{"name": names.SERVER_CONTAINER, "volumeMounts": mounts}]}}
    _, secure = pods(a_service(template=template))

    found = [one for one in secure["spec"]["volumes"] if one["name"] == internal_tls.VOLUME]
    assert [one.get("secret", {}).get("secretName") for one in found] == [internal_tls.REPLICAS_SECRET]
    (server,) = secure["spec"]["containers"]
    assert [one["readOnly"] for one in server["volumeMounts"] if one["mountPath"] == internal_tls.DIRECTORY] == [True]


def test_an_engine_in_plain_text_gets_no_replica_while_tls_is_on_and_its_running_ones_stay():
    world = a_world(a_vllm_service(replicas=2))
    running = set(world.pods)
    assert len(running) == 2
    world.internal_tls = True
    world.run(120)
    assert set(world.pods) == running, "nothing can take their place"

    for name in running:
        world.end(name)
    world.run(60)
    stalled = world.condition("Stalled")
    assert (stalled.status, stalled.reason) == ("True", "EngineWithoutTLS")
    assert "Engine vllm answers in plain text" in stalled.message
    assert not {name for name, pod in world.pods.items() if pod.replica.deleted_at is None}

    world.internal_tls = False
    world.reconcile()  # the first pass of the operator that was started with the new value
    world.run(600)  # replicas that ended early are started again after a pause
    assert len(world.pods) == 2
