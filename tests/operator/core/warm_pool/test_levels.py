"""Pools whose pods have loaded a model: their pods, which services fit, and what follows from a change of the level."""

from dataclasses import replace
from typing import Any

import pytest

from slipway_api import names
from slipway_api.warm_pool import WarmPool
from slipway_api.warm_pool_conditions import PoolEvent
from slipway_operator.core.actions import ClaimPod, CreatePod, DeletePod, LoadModel
from slipway_operator.core.installation import NONROOT, PlacementDefaults
from slipway_operator.core.observed import Sample
from slipway_operator.core.service.plan import plan as plan_service
from slipway_operator.core.service.replicas.access import PortAccess
from slipway_operator.core.service.replicas.pod import model_spec
from slipway_operator.core.warm_pool.claim import load_request
from slipway_operator.core.warm_pool.plan import plan
from slipway_operator.core.warm_pool.pod import build_pool_pod
from slipway_operator.core.warm_pool.shape import differing_parts, shape_of_pool, shape_of_service, write_shape
from slipway_operator.core.warm_pool.supply import WarmPod, WarmSupply
from slipway_runtime.command_line import parse_arguments, serve_settings
from tests import builders
from tests.builders import IMAGE, T0, a_pod, a_service, promised, revision_of, seconds
from tests.operator.core.warm_pool.pools import a_pool, a_waiting_pod, seen

URI = "hf://org/name@rev"
ACCESS = PortAccess(nonce="nonce", admin_digests=("digest",))


def a_loaded_pool(level: str = "Loaded", *, model: Any = None, **spec: Any) -> WarmPool:
    return a_pool(level=level, models=[{"uri": URI} | (model or {})], **spec)


@pytest.mark.capability("AS-5")
@pytest.mark.parametrize(
    ("pool", "service", "differing"),
    [
        ({}, {}, ()),
        (
            {},
            {"model": {"servedName": "b", "samplingDefaults": {"maxTokens": 9}, "warmPrompts": [{"prompt": "x"}]}},
            (),
        ),
        ({}, {"drain": {"timeoutSeconds": 9}, "runtime": {"startupTimeoutSeconds": 60}}, ()),
        ({}, {"uri": "hf://org/other@rev"}, ("model",)),
        ({}, {"runtime": {"maxModelLen": 99}}, ("model",)),
        ({}, {"runtime": {"lora": {"maxAdapters": 2}}}, ("model",)),
        ({}, {"model": {"chatTemplate": "x"}}, ("model",)),
        ({"runtime": {"maxModelLen": 99, "kvCache": {"bytes": "1Mi"}}}, {}, ("model",)),
        ({"runtime": {"maxModelLen": 99}}, {"runtime": {"maxModelLen": 99}}, ()),
        ({"runtime": {"args": ["--no-overlap"]}}, {"runtime": {"args": ["--no-overlap"]}}, ()),
        ({"runtime": {"env": [{"name": "A", "value": "1"}]}}, {}, ("environment",)),
        ({"model": {"uri": "pvc://models/llama"}}, {"uri": "pvc://models/llama"}, ()),
        (
            {"model": {"credentialsSecretRef": {"name": "hf"}}},
            {"model": {"credentialsSecretRef": {"name": "hf"}}},
            (),
        ),
        ({"model": {"credentialsSecretRef": {"name": "hf"}}}, {}, ("secrets",)),
    ],
)
def test_a_pod_with_a_model_fits_services_that_run_it_with_the_same_parameters(pool, service, differing):
    annotation = write_shape(shape_of_pool(a_loaded_pool(**pool), IMAGE))
    wanted = a_service(**{"uri": URI} | service)

    assert differing_parts(annotation, shape_of_service(wanted, revision_of(wanted))) == differing


@pytest.mark.capability("AS-5")
@pytest.mark.parametrize("level", ["Loaded", "Sleeping"])
def test_the_command_line_of_a_pod_that_waits_takes_the_claim_of_a_service_that_fits(level):
    runtime = {"maxModelLen": 256, "kvCache": {"bytes": "16Mi"}, "lora": {"maxAdapters": 2}}
    pool, service = a_loaded_pool(level, runtime=runtime), a_service("chat", uri=URI, runtime=runtime)
    pod = build_pool_pod(
        pool, 0, shape_of_pool(pool, IMAGE), image=IMAGE, access=ACCESS, user=NONROOT, placement=PlacementDefaults()
    )
    (server,) = pod["spec"]["containers"]
    waiting = serve_settings(parse_arguments(server["args"]), {})
    request = load_request(service, revision_of(service), ["a" * 64])
    claimed = waiting.with_model(request)

    assert (waiting.standby, claimed.standby) == (level.lower(), "")
    assert (claimed.served_name, claimed.revision) == ("chat", revision_of(service).hash)
    changed = {
        "served_name": "pool",
        "revision": "",
        "standby": waiting.standby,
        "serving_token_digests": (),
        "gateway_token_digests": (),
        "drain_timeout": waiting.drain_timeout,
    }
    assert replace(claimed, **changed) == waiting, "all else is loaded already"
    assert model_spec(service, revision_of(service)).max_adapters == waiting.max_adapters == 2
    volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
    assert volumes == {"tmp", "run", "cache"}, "no list of adapters of a service that has the name of the pool"
    assert pod["metadata"]["labels"][names.LABEL_STATE] == names.STATE_WARM


@pytest.mark.capability("AS-5")
def test_a_pod_with_the_model_is_claimed_before_one_without():
    service = promised(a_service(uri=URI, replicas=1, warmPool={"name": "pool"}), 1)
    shape = shape_of_service(service, revision_of(service))
    facts: dict[str, Any] = {"sampled_at": T0}
    booted = WarmPod(
        name="pool-warm-0", uid="u0", shape=write_shape(shape_of_pool(a_pool(), IMAGE)), starting="NoModel", **facts
    )
    loaded_shape = write_shape(shape_of_pool(a_loaded_pool(), IMAGE))
    loaded = WarmPod(name="pool-warm-1", uid="u1", shape=loaded_shape, starting="Standby", **facts)
    loading = replace(loaded, name="pool-warm-2", uid="u2", starting="Loading")
    assert differing_parts(loaded_shape, shape) == ()

    def claimed(*pods: WarmPod) -> list[str]:
        supply = WarmSupply(pool="pool", pool_uid="uid-of-pool", pods=pods)
        made = plan_service(replace(builders.seen(service), warm=supply), T0)
        return [action.name for action in made.actions if isinstance(action, ClaimPod)]

    assert claimed(booted, loaded, loading) == ["pool-warm-1"]
    assert claimed(booted, loading) == ["pool-warm-0"], "the model is still loading there"


@pytest.mark.capability("AS-5")
def test_a_claimed_pod_that_still_stands_by_is_asked_again():
    service = promised(a_service(uri=URI, replicas=1, warmPool={"name": "pool"}), 1)
    sample = Sample(at=T0, kv_usage=0, running=0, waiting=0, starting="Standby")
    pod = a_pod(service=service).loading().but(claimed_at=T0, started=False, sample=sample)
    made = plan_service(replace(builders.seen(service, pod), warm=WarmSupply(pool="pool")), T0 + seconds(1))

    (asked,) = (action for action in made.actions if isinstance(action, LoadModel))
    assert asked.request.served_name == "chat"


@pytest.mark.capability("AS-5")
@pytest.mark.parametrize(
    ("before", "after", "differing"),
    [
        ({}, {"level": "Loaded", "models": [{"uri": URI}]}, "model, level"),
        ({"level": "Loaded", "models": [{"uri": URI}]}, {}, "model, level"),
        ({"level": "Loaded", "models": [{"uri": URI}]}, {"level": "Sleeping", "models": [{"uri": URI}]}, "level"),
        (
            {"level": "Loaded", "models": [{"uri": URI}]},
            {"level": "Loaded", "models": [{"uri": "hf://org/name@next"}]},
            "model",
        ),
        ({"image": "old"}, {"image": "new"}, "image"),
    ],
)
def test_a_changed_level_model_or_image_replaces_waiting_pods_one_at_a_time(before, after, differing):
    refill = {"maxConcurrent": 1, "delaySeconds": 0}
    pods = [a_waiting_pod(number).of_shape(**before).booted() for number in range(2)]
    pool = a_pool(**after, refill=refill)
    made = plan(seen(pool, *pods), T0)

    deleted = [action.name for action in made.actions if isinstance(action, DeletePod)]
    assert deleted == ["pool-warm-0"]
    (event,) = (one for one in made.events if one.reason is PoolEvent.POD_RECYCLED)
    assert event.message == f"pool-warm-0 is replaced: the pool asks for other pods: {differing}"
    starting = a_waiting_pod(2).of_shape(**after)
    waits = plan(seen(pool, pods[1], starting), T0 + seconds(5))
    assert waits.actions == (), "the next one only when the new one can be claimed"
    fits = plan(seen(pool, *(pod.of_shape(**after) for pod in pods)), T0)
    assert not [action for action in fits.actions if isinstance(action, DeletePod | CreatePod)]
