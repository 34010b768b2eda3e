"""The gateway reads from an InferenceService: who may wait for a replica, quantities, the routing strategy."""

import msgspec
import pytest

from slipway_api.inference_service import RoutingStrategy
from slipway_gateway.kinds import InferenceService
from slipway_gateway.picker.endpoints import WaitLimits
from slipway_gateway.watch import bytes_of, service_of
from tests.gateway.objects import a_service_object


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ((), ""),
        ((("Stalled", "True", "QuotaExceeded"), ("RouteReady", "False", "CannotStart")), "QuotaExceeded"),
        ((("Stalled", "True", "QuotaExceeded"),), "QuotaExceeded"),
        ((("Stalled", "True", "ImagePullFailed"), ("RouteReady", "False", "NoReadyReplicas")), ""),  # the stable starts
        ((("Stalled", "True", "Refused"), ("RouteReady", "True", "Routed")), ""),
        ((("Stalled", "False", "QuotaExceeded"), ("RouteReady", "False", "CannotStart")), ""),
    ],
)
@pytest.mark.capability("RG-7", "OP-18")
def test_requests_wait_unless_the_operator_says_that_no_replica_can_start(conditions, expected):
    """review/shipping.md 33."""
    written = [{"type": type, "status": status, "reason": reason} for type, status, reason in conditions]
    body = a_service_object()
    body["status"] = body.get("status", {}) | {"conditions": written}

    assert service_of(msgspec.convert(body, InferenceService)).stalled == expected


@pytest.mark.capability("RG-7", "AS-9")
def test_the_limits_of_waiting_are_read_from_the_spec_with_the_defaults_of_the_kind():
    body = a_service_object() | {"spec": {"autoscaling": {"maxReplicas": 4, "scaleToZero": {"idleSeconds": 60}}}}
    service = service_of(msgspec.convert(body, InferenceService))
    assert service.activation == WaitLimits(1000, 256 << 20, 600)

    activation = {"maxQueuedRequests": 5, "maxQueuedBytes": "1M", "maxWaitSeconds": 7}
    body["spec"]["autoscaling"]["scaleToZero"]["activation"] = activation
    assert service_of(msgspec.convert(body, InferenceService)).activation == WaitLimits(5, 1_000_000, 7)
    body["spec"]["autoscaling"]["mode"] = "Paused"
    assert service_of(msgspec.convert(body, InferenceService)).activation is None
    assert service_of(msgspec.convert(a_service_object(), InferenceService)).activation is None


@pytest.mark.parametrize(
    ("quantity", "expected"), [("256Mi", 256 << 20), ("1G", 10**9), ("5k", 5000), ("7", 7), (12, 12), ("2Gi", 2 << 30)]
)
def test_a_quantity_of_bytes_is_a_number(quantity, expected):
    assert bytes_of(quantity) == expected


@pytest.mark.capability("RG-4")
@pytest.mark.parametrize(
    ("routing", "expected"),
    [
        ({}, RoutingStrategy.PREFIX_CACHE),
        ({"strategy": "LeastLoad"}, RoutingStrategy.LEAST_LOAD),
        ({"strategy": "RoundRobin", "directAccess": "Open"}, RoutingStrategy.ROUND_ROBIN),
        ({"strategy": "OfALaterVersion"}, RoutingStrategy.PREFIX_CACHE),
    ],
)
def test_the_strategy_is_that_of_the_spec_and_an_unknown_one_stops_nothing(routing, expected):
    body = a_service_object(r1=100)
    body["spec"]["routing"] = routing

    assert service_of(msgspec.convert(body, InferenceService)).strategy is expected


INHERITED = {
    "drain": {"handover": False},
    "autoscaling": {"maxReplicas": 4, "scaleToZero": {"activation": {"maxQueuedRequests": 5}}},
    "slo": {"ttftP95Seconds": "0.5"},
    "rollout": {"strategy": "Canary"},
}


def inheriting(spec: dict[str, object], status: dict[str, object], generation: int = 2) -> InferenceService:
    body = a_service_object(stable=100, update=0)
    body["metadata"]["generation"] = generation
    body["spec"] |= {"baseRefs": [{"name": "gold"}], **spec}
    body["status"] |= {"currentRevision": "stable", "updateRevision": "update", "observedGeneration": 2, **status}
    return msgspec.convert(body, InferenceService)


@pytest.mark.capability("OP-15")
def test_blocks_that_a_service_leaves_to_templates_are_read_from_its_status():
    service = service_of(inheriting({}, {"inherited": INHERITED}))

    assert not service.handover
    assert service.activation == WaitLimits(5, 256 << 20, 600)
    assert service.latency_limits.ttft_seconds == 0.5
    assert service.withheld == {"update"}, "the first step of the inherited canary is not reached yet"


@pytest.mark.capability("OP-15")
def test_a_block_of_the_service_wins_over_the_inherited_one():
    own = {"drain": {}, "slo": {}, "rollout": {}, "autoscaling": {"maxReplicas": 1}}
    service = service_of(inheriting(own, {"inherited": INHERITED}))

    assert service.handover
    assert service.activation is None
    assert service.latency_limits.ttft_seconds is None
    assert service.withheld == frozenset()


@pytest.mark.capability("OP-15")
def test_until_the_operator_has_seen_a_changed_spec_a_new_revision_gets_no_request_by_chance():
    """The service has just left its rollout to a template, which may ask for a canary."""
    blocks = {name: block for name, block in INHERITED.items() if name != "rollout"}

    assert service_of(inheriting({}, {"inherited": blocks}, generation=3)).withheld == {"update"}
    assert service_of(inheriting({}, {"inherited": blocks}, generation=2)).withheld == frozenset()
