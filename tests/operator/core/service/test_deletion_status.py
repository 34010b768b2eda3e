"""The status of a service that is being deleted names the objects that its deletion waits for."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from slipway_api import names
from slipway_api.conditions import find_condition
from slipway_operator.core.actions import Failure
from slipway_operator.core.service.plan import plan
from tests.builders import T0, a_pod, a_service, promised, seen
from tests.operator.core.simulated_cluster import SimulatedCluster


def deleted(*finalizers: str):
    service = promised(a_service(replicas=1, drain={"timeoutSeconds": 90}), 1)
    metadata = service.metadata.model_copy(
        update={"deletion_timestamp": datetime(2026, 1, 1, tzinfo=UTC), "finalizers": finalizers}
    )
    return service.model_copy(update={"metadata": metadata})


def shown(observed) -> dict[str, tuple[str, str, str]]:
    status = plan(observed, T0).status
    assert status is not None
    return {one.type: (one.status.value, one.reason, one.message) for one in status.conditions}


@pytest.mark.capability("OP-16")
def test_it_is_not_ready_and_says_that_replicas_finish_their_requests():
    """review/operator-users.md 15: READY was True and STATUS Available until the pods were gone."""
    service = deleted(names.FINALIZER)
    observed = seen(service, a_pod(service=service).slot(0).ready())
    conditions = shown(observed)

    (replica,) = observed.replicas
    message = f"Being deleted: waiting until {replica.name} finished their requests, at most 90 s (spec.drain)"
    states = {type: (status, reason) for type, (status, reason, _) in conditions.items()}
    for type in ("Ready", "WorkloadAvailable", "RouteReady"):
        assert states[type] == ("False", "Terminating")
    assert states["Reconciling"] == ("True", "Terminating")
    assert "Stalled" not in states
    assert conditions["Ready"][2] == message


def test_refused_tokens_refused_writes_and_finalizers_of_others_are_named():
    """review/shipping.md 4: a deletion hung for a key that was replaced, and only the log knew."""
    service = deleted(names.FINALIZER)
    pod = a_pod(service=service).slot(0).ready()
    failure = Failure(action="DrainPod chat-0", reason="Forbidden", message="no right", at=T0)
    observed = replace(seen(service, pod), failures=(failure,))
    observed = replace(observed, replicas=tuple(replace(one, refuses_token=True) for one in observed.replicas))

    refused = shown(observed)["Ready"][2]
    held = shown(seen(deleted("example.com/theirs")))["Ready"][2]

    assert "slipway-admin-master" in refused
    assert "the API server refuses DrainPod chat-0: no right" in refused
    assert held == "Being deleted: waiting for the owners of the finalizers example.com/theirs"


def test_a_long_drain_writes_its_status_once():
    world = SimulatedCluster(a_service(replicas=2, drain={"timeoutSeconds": 3600, "endpointPropagationSeconds": 1}))
    world.reconcile()
    world.run(60)
    for pod in world.pods.values():
        pod.running = 100_000
    world.ask_for_deletion()
    world.run(20)
    before = world.writes
    world.run(600)

    assert world.service is not None
    condition = find_condition(world.service.status.conditions, "Ready")
    assert (condition.status.value, condition.reason) == ("False", "Terminating")
    assert world.writes == before
