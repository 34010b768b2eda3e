"""The list of conditions and events in the documentation is what the operator says: nothing less, nothing more.

Each scenario is the shortest way to some of them; together they say every one.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from slipway_api.autoscaling import Limit
from slipway_api.conditions import Condition, EventReason, Reason
from slipway_api.crd import engine_manifest
from slipway_api.inference_service import InferenceService
from slipway_api.model_names import NameConflict
from slipway_api.slo import SLOPeriod, SLOStatus
from slipway_api.vocabulary import CONDITIONS, EVENTS, LIMITS
from slipway_operator.controller.internal_error import internal_error_status
from slipway_operator.controller.reconciler import restoration
from slipway_operator.core.observed import Capacity, FailedAdapter, Failure, GatewayCount, GPUSupply
from slipway_operator.core.pulls import PullPod, PullsSeen
from slipway_operator.core.service.model.pulls import pull_digest
from slipway_operator.core.service.plan import Plan, plan
from slipway_operator.core.templates import StoredTemplate
from slipway_operator.core.warm_pool.shape import shape_of_service, write_shape
from slipway_operator.core.warm_pool.supply import WarmPod, WarmSupply
from tests.builders import (
    DEFAULTS,
    T0,
    APod,
    a_pod,
    a_service,
    an_attached_adapter,
    edited,
    minutes,
    promised,
    revision_of,
    seen,
)
from tests.operator.core.scaling.gateways import Gateways
from tests.operator.core.service.rollouts import a_world as a_canary_world
from tests.operator.core.service.rollouts import annotate, roll
from tests.operator.core.simulated_cluster import SimulatedCluster
from tests.operator.core.simulated_traffic import Behaviour

Said = tuple[set[tuple[str, str, str]], set[str]]  # (type, status, reason) of conditions, and reasons of events

QUOTA = 'pods "chat" is forbidden: exceeded quota: gpus'


def passes(service: InferenceService, *states: tuple[APod, ...], **facts: Any) -> list[Plan]:
    """One pass a minute for each state of the pods, each with the status of the one before."""
    plans = []
    for number, pods in enumerate(states):
        plans.append(plan(seen(service, *pods, **facts), T0 + minutes(number)))
        service = service.model_copy(update={"status": plans[-1].status})
    return plans


def said(conditions: Iterable[Condition]) -> set[tuple[str, str, str]]:
    return {(one.type, one.status.value, one.reason) for one in conditions}


def said_in(plans: Iterable[Plan]) -> Said:
    plans = list(plans)
    conditions = set[tuple[str, str, str]]().union(*(said(made.status.conditions) for made in plans))
    return conditions, {event.reason.value for made in plans for event in made.events}


def starting(phase: str, service: InferenceService) -> APod:
    pod = a_pod(service=service).loading().says()
    return pod.but(sample=replace(pod.replica.sample, starting=phase))


def mounting(service: InferenceService, sentence: str) -> APod:
    return a_pod(service=service).loading().but(is_creating=True, mount_failure=sentence)


def one(**spec: Any) -> InferenceService:
    service = a_service(**spec)
    return promised(service, 1 if service.fixed_replicas is None else service.fixed_replicas)


def refused(reason: str, message: str) -> tuple[Failure, ...]:
    return (Failure(action="CreatePod chat", reason=reason, message=message, at=T0),)


def serving_and_failing() -> Said:
    service = one()
    pod = a_pod(service=service)
    return said_in(passes(service, (pod.ready(),), (pod.loading(),)))


def below_desired() -> Said:
    service = one(replicas=2)
    return said_in(passes(service, (a_pod(service=service).ready(),)))


def first_start() -> Said:
    service = one(uri="hf://org/model")
    states = [(starting("Loading", service),), (starting("Downloading", service),)]
    waiting = a_pod(service=service).unschedulable()
    tainted = waiting.but(unschedulable="0/2 nodes are available: 2 node(s) had untolerated taint.")
    small = replace(seen(service, waiting), gpu_supply=GPUSupply(nodes=0, largest=0, largest_of_product=0))
    more = [*passes(service, (waiting,)), *passes(service, (tainted,)), plan(small, T0)]
    return said_in([*passes(service, *states), *more, *passes(service, (mounting(service, "Multi-Attach error"),))])


def stalled() -> Said:
    service = one(uri="hf://org/model")
    gated = one(uri="hf://org/model", model={"credentialsSecretRef": {"name": "hf"}})
    slow = one(rollout={"progressDeadlineSeconds": 60})
    pod = a_pod(service=service)
    crashing = pod.crashing(restarts=3)
    no_secret = a_pod(service=gated).but(
        waiting_reason="CreateContainerConfigError", waiting_message='secret "hf" not found'
    )
    loading = a_pod(service=slow).loading()
    return said_in(
        [
            *passes(service, (), fault="spec.runtime.dtype is not valid"),
            *passes(service, (crashing.but(termination_message="DoesNotFit: too small"),)),
            *passes(service, (pod.cannot_pull(),)),
            *passes(service, (mounting(service, 'secret "keys" not found'),)),
            *passes(service, (crashing.but(termination_message="ModelNotFound: no such repository"),)),
            *passes(service, (crashing.but(termination_message="HubUnreachable: no answer"),)),
            *passes(gated, (no_secret,)),
            *passes(slow, (loading,), (loading,), (loading,)),
            *passes(service, (), failures=refused("Forbidden", QUOTA)),
            *passes(service, (), failures=refused("Forbidden", "admission webhook denied the request")),
            *passes(service, (), failures=refused("NameConflict", "there is a Service chat of another owner")),
            *passes(service, (crashing,)),
        ]
    )


def refusing_the_operators_token() -> Said:
    service = one(autoscaling={"maxReplicas": 2})
    return said_in(passes(service, (a_pod(service=service).ready().but(refuses_token=True),)))


def with_invalid_logits() -> Said:
    service = one()
    says = a_pod(service=service).ready().says()
    assert says.replica.sample is not None
    return said_in(passes(service, (says.but(sample=replace(says.replica.sample, invalid_logits=3)),)))


def likely_to_be_regretted() -> Said:
    return said_in(passes(a_service(uri="hf://org/model"), ()))


def a_warm_pool() -> Said:
    service = one(warmPool={"name": "pool"})
    pod = WarmPod(
        name="pool-warm-0",
        uid="uid-of-pool-warm-0",
        shape=write_shape(shape_of_service(service, revision_of(service))),
        starting="NoModel",
        sampled_at=T0,
    )
    full = replace(seen(service), warm=WarmSupply(pool="pool", pool_uid="uid-of-pool", pods=(pod,)))
    empty = replace(seen(service), warm=WarmSupply(pool="pool", pool_uid="uid-of-pool"))
    required = one(warmPool={"name": "pool", "policy": "Require"})
    missing = replace(seen(required), warm=WarmSupply(pool="pool"))
    return said_in([plan(full, T0), plan(empty, T0), plan(missing, T0)])


def one_name_for_two_services() -> Said:
    service = promised(a_service(created_at=T0), 1)
    older, elsewhere = NameConflict("chat", key="demo/code"), NameConflict("chat", key="team/code")
    pod = a_pod(service=service).slot(0).ready()
    observed = seen(service, pod, name_conflict=elsewhere)
    with_tenants = replace(observed, defaults=replace(observed.defaults, has_tenants=True))
    nobody = replace(observed, gateways=GatewayCount(answering=0, running=0, namespace="s", selector="a=b"))
    nobody = replace(nobody, name_conflict=None)
    relying = promised(a_service(created_at=T0, routing={"fallback": {"service": "small"}}), 1)
    alone = replace(seen(relying, a_pod(service=relying).slot(0).ready()), lacks_fallback=True)
    said = [plan(one, T0) for one in (observed, with_tenants, nobody, alone)]
    return said_in([*passes(service, (), name_conflict=older), *said])


def life_of_a_fixed_fleet() -> Said:
    world = watched(a_service(replicas=2, drain={"timeoutSeconds": 30, "endpointPropagationSeconds": 1}))
    world.run(60)
    world.fail(next(iter(world.pods)))
    world.run(60)
    world.service = edited(world.service, runtime={"maxModelLen": 100})
    world.run(200)
    for pod in world.pods.values():
        pod.answers, pod.running = False, 9
    world.service = edited(world.service, replicas=3)
    world.run(60)
    world.service = edited(world.service, replicas=0)
    world.run(100)
    return world.told, set(world.event_reasons())


def life_of_an_autoscaled_fleet() -> Said:
    world = watched(a_service(autoscaling={"maxReplicas": 2}))
    world.run(60)
    load(world, waiting=9)
    world.run(60)
    first, *_ = world.pods.values()
    first.answers = False
    load(world, waiting=0)
    world.run(60)
    for pod in world.pods.values():
        pod.answers = False
    world.run(60)
    return world.told, set(world.event_reasons())


def autoscaled_without_capacity() -> Said:
    world = watched(a_service(autoscaling={"maxReplicas": 5}), gpus=1)
    world.run(60)
    load(world, waiting=9)
    world.run(60)
    return world.told, set(world.event_reasons())


def scaled_by_others() -> Said:
    world = watched(a_service(replicas=1, autoscaling={"mode": "External", "maxReplicas": 5}))
    world.run(60)
    return world.told, set(world.event_reasons())


def not_deciding() -> Said:
    advised = watched(a_service(replicas=1, autoscaling={"mode": "Advisory", "maxReplicas": 5}))
    load(advised, waiting=9)
    advised.run(120)
    paused = watched(a_service(autoscaling={"mode": "Paused", "maxReplicas": 5}))
    return advised.told | paused.told, set(advised.event_reasons())


def limited_by_a_budget() -> Said:
    world = watched(a_service(autoscaling={"maxReplicas": 5}, budget={"maxGPUs": 1}))
    load(world, waiting=9)
    world.run(60)
    return world.told, set(world.event_reasons())


def scaled_to_zero_and_activated_in_vain() -> Said:
    zero = {"minReplicas": 0, "maxReplicas": 2, "scaleToZero": {"idleSeconds": 60}}
    world = watched(a_service(autoscaling=zero))
    gateways = Gateways(patience=10, most=1).attach(world)
    world.run(150)
    gateways.send(world, 2)
    world.run(60)
    return world.told, set(world.event_reasons())


def disrupted_and_suspended() -> Said:
    world = watched(a_service(availability={"maxNodeDrainBlockSeconds": 30}), nodes=2, gpus=1)
    world.run(60)
    world.crash_loop(next(iter(world.pods)), restarts=1, termination_message="GPUFault: GPU is lost")
    world.run(60)
    (pod,) = world.pods.values()
    world.edit_label(pod.replica.name)
    world.run(2)
    world.cordon(pod.replica.node)
    world.run(60)
    world.service = edited(world.service, suspend=True)
    world.run(60)
    world.service = edited(world.service, suspend=False)
    world.run(60)
    world.ask_for_deletion()
    world.reconcile()
    return world.told, set(world.event_reasons())


def life_of_a_canary() -> Said:
    world = a_canary_world(rate=0.1)
    roll(world)
    world.run(100)
    world.traffic.rate = 40
    world.run(200)
    _, third = roll(world, maxModelLen=99)
    world.traffic.behaviours[third] = Behaviour(errors=0.5)
    world.run(200)
    return world.told, set(world.event_reasons())


def life_of_a_blue_green_rollout() -> Said:
    rollout = {
        "strategy": "BlueGreen",
        "rollingUpdate": {"maxSurge": 4},
        "gates": {"smoke": [{"prompt": "2+2=", "mustMatch": "4"}]},
    }
    world = a_canary_world(rollout=rollout)
    roll(world)
    world.run(100)
    _, third = roll(world, maxModelLen=99)
    annotate(world, abort=third)
    world.run(20)
    return world.told, set(world.event_reasons())


def without_its_stable_revision() -> Said:
    world = a_canary_world(rate=0.1)
    old, _ = roll(world)
    world.revisions = {name: one for name, one in world.revisions.items() if one.hash != old}
    world.run(5)
    world.pods.clear()
    world.run(5)
    return world.told, set(world.event_reasons())


def by_a_fault_of_the_operator() -> Said:
    status, _ = internal_error_status({}, OverflowError("date value out of range"), generation=1, now=T0)
    return said(Condition.model_validate(one) for one in status["conditions"]), {EventReason.INTERNAL_ERROR}


def edited_children() -> Said:
    return set(), {restoration("Service chat had been deleted, and is created again").reason.value}


def life_of_an_error_budget() -> Said:
    slo = {"objectivePercent": "99", "ttftP95Seconds": "1.0"}
    rich = a_canary_world(rate=20.0, replicas=2, slo=slo)
    period = SLOPeriod(start_time=rich.now, requests=1_000_000, streams=1_000_000)
    status = rich.service.status.model_copy(update={"slo": SLOStatus(recorded_time=rich.now, periods=(period,))})
    rich.service = rich.service.model_copy(update={"status": status})
    (revision,) = [one.hash for one in rich.service.status.revisions]
    rich.run(120)
    rich.traffic.behaviours[revision] = Behaviour(ttft=3.0)
    rich.run(80)
    rich.traffic.behaviours[revision] = Behaviour(errors=0.5)
    rich.run(200)
    poor = a_canary_world(rate=20.0, replicas=2, slo=slo)
    poor.traffic.behaviours[revision] = Behaviour(errors=0.5)
    poor.run(120)
    return rich.told | poor.told, set(rich.event_reasons()) | set(poor.event_reasons())


def with_adapters() -> Said:
    service = one()
    pod = a_pod(service=service)
    attached = an_attached_adapter("sailor")
    states = [(replace(attached, is_ready=is_ready),) for is_ready in (False, True)]
    plans = [plan(replace(seen(service, pod.ready()), adapters=adapters), T0) for adapters in states]
    static = one(runtime={"args": ["--adapter", "sql=file:///models/sql"]})
    says = a_pod(service=static).ready().says()
    assert says.replica.sample is not None
    failed = (FailedAdapter("sql", "SourceNotFound", "it does not exist"),)
    capacity = Capacity(max_sequences=1, kv_blocks=9, bytes_per_token=9, failed_adapters=failed)
    return said_in([*plans, *passes(static, (says.but(sample=replace(says.replica.sample, capacity=capacity)),))])


def with_a_cache() -> Said:
    node_cache = {"cache": {"policy": "Node"}}
    pulled = one(uri="hf://org/model", model={"cache": {"policy": "Shared", "claimName": "models"}}, prePull={})
    digest = pull_digest(pulled, revision_of(pulled), DEFAULTS)
    pod = PullPod(name="p", uid="u", owner_uid=pulled.metadata.uid, digest=digest, node="", created_at=T0)
    states = [(), (replace(pod, exit_code=1),), (replace(pod, phase="Succeeded"),)]
    plans = [plan(replace(seen(pulled), pulls=PullsSeen(pods=pods)), T0) for pods in states]
    return said_in([*plans, *passes(one(uri="hf://org/model", model=node_cache), ())])


def watched(service: InferenceService, **cluster: Any) -> SimulatedCluster:
    world = SimulatedCluster(service, **cluster)
    world.reconcile()
    return world


def load(world: SimulatedCluster, *, waiting: int) -> None:
    def each(world: SimulatedCluster) -> None:
        for pod in world.ready:
            pod.waiting = waiting

    world.load = each


def with_a_foreign_engine() -> Said:
    engine = {"engine": "vllm"}
    world = watched(a_service(runtime=engine, model={"warmPrompts": [{"prompt": "x"}]}))
    world.run(5)
    world.engines["vllm"] = engine_manifest("vllm")["spec"]
    world.run(60)
    return world.told, set(world.event_reasons())


def with_a_template() -> Said:
    world = watched(a_service(baseRefs=[{"name": "gold"}]))
    world.run(5)
    world.templates["gold"] = StoredTemplate({"drain": {"timeoutSeconds": 60}})
    world.run(60)
    return world.told, set(world.event_reasons())


def with_internal_tls() -> Said:
    world = watched(a_service(runtime={"engine": "vllm"}))
    world.internal_tls = True
    vllm = engine_manifest("vllm")["spec"]
    world.engines["vllm"] = {key: value for key, value in vllm.items() if key != "tls"}
    world.run(10)
    service = one()
    fault = "Secret team/slipway-internal-tls: the certificate is not PEM"
    conditions, events = said_in([plan(replace(seen(service), certificate_fault=fault), T0)])
    return world.told | conditions, set(world.event_reasons()) | events


SCENARIOS: list[Callable[[], Said]] = [
    serving_and_failing,
    below_desired,
    first_start,
    stalled,
    refusing_the_operators_token,
    with_invalid_logits,
    likely_to_be_regretted,
    one_name_for_two_services,
    a_warm_pool,
    life_of_a_fixed_fleet,
    life_of_an_autoscaled_fleet,
    autoscaled_without_capacity,
    scaled_by_others,
    not_deciding,
    limited_by_a_budget,
    scaled_to_zero_and_activated_in_vain,
    disrupted_and_suspended,
    life_of_a_canary,
    life_of_a_blue_green_rollout,
    without_its_stable_revision,
    by_a_fault_of_the_operator,
    edited_children,
    life_of_an_error_budget,
    with_adapters,
    with_a_cache,
    with_a_foreign_engine,
    with_a_template,
    with_internal_tls,
]


@pytest.fixture(scope="module")
def everything_said() -> Said:
    results = [scenario() for scenario in SCENARIOS]
    return set().union(*(conditions for conditions, _ in results)), set().union(*(events for _, events in results))


@pytest.mark.capability("OP-6")
def test_the_conditions_that_the_operator_sets_are_those_that_are_documented(everything_said):
    documented = {(row.type.value, row.status.value, row.reason.value) for row in CONDITIONS}

    assert everything_said[0] - documented == set(), "said, and not documented"
    assert documented - everything_said[0] == set(), "documented, and never said"


@pytest.mark.capability("OP-6")
def test_the_events_that_the_operator_posts_are_those_that_are_documented(everything_said):
    documented = {reason.value for reason in EVENTS}

    assert everything_said[1] - documented == set(), "posted, and not documented"
    assert documented - everything_said[1] == set(), "documented, and never posted"


def test_every_reason_has_its_meaning():
    assert {row.reason for row in CONDITIONS} == set(Reason)
    assert set(EVENTS) == set(EventReason)
    assert set(LIMITS) == set(Limit)
