"""Pods that serve TLS, and what becomes of services whose engine answers in plain text."""

from dataclasses import replace
from datetime import timedelta

import pytest

from slipway_api import internal_tls, names
from slipway_operator.core.installation import NONROOT, PlacementDefaults
from slipway_operator.core.service.replicas.access import PortAccess
from slipway_operator.core.service.replicas.pod import build_pod
from slipway_operator.core.service.rollout.revision import resolve
from tests.builders import IMAGE, a_service
from tests.operator.core.service.test_engines import (
    ENGINES,
    VLLM,
    a_vllm_service,
    a_world,
    container,
    pinned,
    pod_of,
)

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


# --- other engines ----------------------------------------------------------------------------------------------------

PLAIN = {key: value for key, value in VLLM.items() if key != "tls"}
CANARY = {"strategy": "Canary", "canary": {"steps": [{"setWeight": 50}, {"pauseSeconds": 600}, {"setWeight": 100}]}}
FILES = "/etc/slipway/internal-tls"


def spoken(world) -> list[bool]:
    return [pod.replica.speaks_tls for pod in world.live]


def moving_world(service, engines=ENGINES):
    world = a_world(service, engines)
    world.was_cordoned = True  # a slot may have two replicas while one replaces the other
    return world


def test_an_engine_gets_the_certificate_by_its_flags_and_its_agent_the_folder_and_the_name():
    service = a_vllm_service(runtime={"args": ["--seed", "7"]})
    plain, secure = pod_of(service, pinned()), pod_of(service, pinned(), tls=True)
    server, agent = container(secure, "server"), container(secure, "slipway-agent")

    flags = ["--ssl-certfile", f"{FILES}/tls.crt", "--ssl-keyfile", f"{FILES}/tls.key", "--enable-ssl-refresh"]
    assert server["args"] == [*container(plain, "server")["args"][:-2], *flags, "--seed", "7"]
    assert not any("ssl" in one for one in container(plain, "server")["args"])
    values = {one["name"]: one.get("value") for one in agent["env"]}
    assert values["SLIPWAY_ENGINE_URL"] == "https://127.0.0.1:8000"
    assert values["SLIPWAY_TLS_DIRECTORY"] == FILES
    assert values["SLIPWAY_TLS_NAME"] == internal_tls.replicas_name("demo")
    assert agent["resources"]["limits"] == {"memory": "128Mi"}
    mount = {"name": "internal-tls", "mountPath": FILES, "readOnly": True}
    assert mount in server["volumeMounts"]
    assert mount in agent["volumeMounts"]
    probes = [server[probe]["httpGet"]["scheme"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")]
    assert probes == ["HTTPS"] * 3, "those of the agent's port and that of the engine's"


def test_files_of_tls_have_no_value_in_plain_text():
    entry = {"name": "CERTIFICATE", "text": "$(tls.certificate)"}
    engine = pinned({**VLLM, "env": [*VLLM["env"], entry]})

    def value(pod) -> str:
        return {one["name"]: one.get("value") for one in container(pod, "server")["env"]}.get("CERTIFICATE", "")

    assert value(pod_of(a_vllm_service(), engine, tls=True)) == f"{FILES}/tls.crt"
    assert value(pod_of(a_vllm_service(), engine)) == ""


def test_turning_it_on_and_off_replaces_the_replicas_of_an_engine_without_another_revision():
    world = moving_world(a_vllm_service(replicas=2))
    revision = world.service.status.current_revision
    assert spoken(world) == [False] * 2

    for enabled in (True, False):
        world.internal_tls = enabled
        world.reconcile()
        for _ in range(300):
            world.run(1)
            assert len(world.ready) >= 2, "no replica leaves before another one serves"
            if spoken(world) == [enabled] * 2:
                break
        assert spoken(world) == [enabled] * 2
        assert world.service.status.current_revision == revision


def test_an_engine_without_flags_gets_no_replica_while_tls_is_on_and_its_running_ones_stay():
    world = moving_world(a_vllm_service(replicas=2), {"vllm": PLAIN})
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
    assert "Engine vllm of this revision has no spec.tls" in stalled.message
    assert not {name for name, pod in world.pods.items() if pod.replica.deleted_at is None}

    world.internal_tls = False
    world.reconcile()  # the first pass of the operator that was started with the new value
    world.run(600)  # replicas that ended early are started again after a pause
    assert len(world.pods) == 2


def test_flags_that_are_added_to_the_engine_roll_out_and_no_replica_of_the_old_revision_is_created():
    world = moving_world(a_vllm_service(replicas=2, rollout=CANARY), {"vllm": PLAIN})
    old = world.service.status.current_revision
    world.internal_tls = True
    world.run(30)

    world.engines["vllm"] = VLLM
    world.run(60)
    assert world.service.status.current_revision == old, "the canary pauses"
    lost = next(pod.replica.name for pod in world.live if pod.replica.revision == old)
    world.end(lost)
    world.run(120)
    assert all(pod.replica.speaks_tls for pod in world.live if pod.replica.revision != old)
    assert not any(pod.replica.revision == old and pod.replica.speaks_tls for pod in world.live)
    world.run(900)
    assert world.service.status.current_revision != old
    assert spoken(world) == [True] * 2


def test_a_revision_without_flags_that_is_rolled_back_to_gets_no_replica_and_says_why():
    world = moving_world(a_vllm_service(replicas=2), {"vllm": PLAIN})
    old = world.service.status.current_revision
    world.engines["vllm"] = VLLM
    world.run(300)
    world.internal_tls = True
    world.reconcile()
    world.run(300)
    assert spoken(world) == [True] * 2

    metadata = world.service.metadata
    back = metadata.model_copy(update={"annotations": {**metadata.annotations, names.ANNOTATION_ROLLBACK_TO: old}})
    world.service = world.service.model_copy(update={"metadata": back})
    world.run(120)
    stalled = world.condition("Stalled")
    assert (stalled.status, stalled.reason) == ("True", "EngineWithoutTLS")
    assert not [pod for pod in world.live if pod.replica.revision == old]
    assert len(world.ready) == 2, "the others serve on"


def test_a_replica_whose_engine_missed_a_renewal_is_replaced_while_others_stay():
    world = moving_world(a_vllm_service(replicas=2))
    world.internal_tls = True
    world.reconcile()
    world.run(300)
    first, second = sorted(world.live, key=lambda pod: pod.replica.slot)
    first.outdated_certificate_ends = world.now + timedelta(days=9)

    for _ in range(120):
        world.run(1)
        assert len(world.ready) >= 2, "it leaves when another one serves"
    assert first not in world.live
    assert second in world.live
    assert len(world.live) == 2
    said = [one.message for one in world.events if "still serves the certificate that ends at" in one.message]
    assert said, world.event_reasons()
