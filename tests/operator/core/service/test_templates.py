"""Services that inherit from ServiceTemplates, in the simulated cluster: its laws hold at every step."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipway_api import names
from slipway_api.inference_service import InferenceService
from slipway_operator.core.templates import StoredTemplate
from tests.builders import a_service
from tests.operator.core.simulated_cluster import SimulatedCluster

pytestmark = pytest.mark.capability("OP-15")

GOLD = {
    "resources": {"gpu": {"count": 0}, "requests": {"cpu": "2"}},
    "drain": {"timeoutSeconds": 60},
    "rollout": {"strategy": "RollingUpdate", "rollingUpdate": {"maxSurge": 2}},
}
MORE_CPU = {**GOLD, "resources": {"gpu": {"count": 0}, "requests": {"cpu": "4"}}}
CANARY = {"strategy": "Canary", "canary": {"steps": [{"setWeight": 50}, {"pauseSeconds": 60}, {"setWeight": 100}]}}


def a_three_line_service(*references: str, **spec: Any) -> InferenceService:
    return a_service(baseRefs=[{"name": one} for one in references or ("gold",)], **spec)


def put(world: SimulatedCluster, name: str, spec: dict[str, Any]) -> None:
    before = world.templates.get(name)
    world.templates[name] = StoredTemplate(spec, before.generation + 1 if before is not None else 1)


def a_world(service: InferenceService, **templates: dict[str, Any]) -> SimulatedCluster:
    world = SimulatedCluster(service, load_seconds=2)
    for name, spec in templates.items():
        put(world, name, spec)
    world.reconcile()
    return world.run(20)


def edit(world: SimulatedCluster, service: InferenceService) -> None:
    """The user applies another manifest; status and identity stay."""
    assert world.service is not None
    metadata = world.service.metadata.model_copy(update={"generation": world.service.metadata.generation + 1})
    world.service = world.service.model_copy(update={"spec": service.spec, "metadata": metadata})


def cpus(world: SimulatedCluster) -> set[str]:
    return {
        world.manifests[name]["spec"]["containers"][0]["resources"].get("requests", {}).get("cpu", "none")
        for name in world.pods
    }


def status(world: SimulatedCluster) -> Any:
    assert world.service is not None
    return world.service.status


# --- what is inherited ------------------------------------------------------------------------------------------------


def test_a_three_line_service_inherits_resources_drain_and_rollout():
    world = a_world(a_three_line_service(), gold=GOLD)

    assert world.condition("Ready").reason == "Available"
    assert cpus(world) == {"2"}
    assert [(one.name, one.generation, one.blocks) for one in status(world).templates] == [
        ("gold", 1, ("resources", "rollout", "drain"))
    ]
    assert status(world).inherited["drain"] == {
        "timeoutSeconds": 60,
        "endpointPropagationSeconds": 5,
        "handover": True,
    }
    applied = [one.message for one in world.events if one.reason == "TemplateApplied"]
    assert applied == ["inherits resources, rollout, drain from ServiceTemplate gold (generation 1)"]
    assert world.service is not None
    assert world.service.spec.drain.timeout_seconds == 300, "the user's spec is not written"


def test_the_later_template_wins_and_the_service_wins_over_both():
    silver = {"resources": {"gpu": {"count": 0}, "requests": {"cpu": "8"}}, "slo": {"ttftP95Seconds": "1"}}
    world = a_world(a_three_line_service("gold", "silver", drain={"timeoutSeconds": 30}), gold=GOLD, silver=silver)

    assert cpus(world) == {"8"}
    assert [(one.name, one.blocks) for one in status(world).templates] == [
        ("gold", ("rollout",)),
        ("silver", ("resources", "slo")),
    ]
    assert "drain" not in status(world).inherited


def test_the_drain_limit_of_the_template_is_used():
    world = a_world(a_three_line_service(replicas=2), gold={**GOLD, "drain": {"timeoutSeconds": 30}})
    edit(world, a_three_line_service(replicas=1))
    world.load = lambda world: [setattr(pod, "running", 3) for pod in world.draining]  # requests that never end
    world.run(5)
    assert len(world.draining) == 1

    world.run(40)

    assert len(world.pods) == 1


# --- a template changes -----------------------------------------------------------------------------------------------


def test_a_changed_template_is_a_new_revision_that_rolls_out_by_the_strategy_of_the_service():
    world = a_world(a_three_line_service(replicas=2, rollout=CANARY), gold=GOLD)
    old = status(world).current_revision

    put(world, "gold", MORE_CPU)
    world.run(30)

    new = status(world).update_revision
    assert new != old
    assert status(world).current_revision == old, "the canary pauses"
    assert status(world).templates[0].generation == 2
    world.run(200)
    assert status(world).current_revision == new
    assert cpus(world) == {"4"}


@pytest.mark.parametrize(
    "change",
    [{"description": "another"}, {"drain": {"timeoutSeconds": 90}}, {"rollout": CANARY}, {"slo": {"windowDays": 7}}],
)
def test_a_change_that_concerns_no_pod_replaces_none(change):
    world = a_world(a_three_line_service(), gold={**GOLD, "slo": {"ttftP95Seconds": "1"}})
    before, pods = status(world).update_revision, set(world.pods)

    put(world, "gold", {**GOLD, "slo": {"ttftP95Seconds": "1"}, **change})
    world.run(30)

    assert status(world).update_revision == before
    assert set(world.pods) == pods
    assert status(world).templates[0].generation == 2


def test_a_block_that_the_service_writes_itself_follows_no_template():
    own = {"gpu": {"count": 0}, "requests": {"cpu": "1"}}
    world = a_world(a_three_line_service(resources=own), gold=GOLD)
    before = status(world).update_revision

    put(world, "gold", MORE_CPU)
    world.run(30)

    assert status(world).update_revision == before
    assert cpus(world) == {"1"}


def test_the_first_template_of_a_running_service_replaces_only_what_differs():
    """Fields of a template that are equal to the service's defaults change no pod."""
    world = a_world(a_service(resources={"gpu": {"count": 0}}))
    before = status(world).update_revision

    edit(world, a_three_line_service())
    put(world, "gold", {"resources": {"gpu": {"count": 0}}, "drain": {"timeoutSeconds": 60}})
    world.run(30)

    assert status(world).update_revision == before


def test_a_template_pauses_the_rollouts_of_the_services_that_inherit_it():
    world = a_world(a_three_line_service(), gold=GOLD)
    old = status(world).current_revision

    put(world, "gold", {**MORE_CPU, "rollout": {**GOLD["rollout"], "paused": True}})
    world.run(60)

    assert status(world).current_revision == old
    assert cpus(world) == {"2"}
    assert "spec.rollout.paused" in world.condition("Reconciling").message


def test_an_annotation_pauses_one_service_that_inherits_its_rollout():
    world = a_world(a_three_line_service(), gold=GOLD)
    assert world.service is not None
    annotations = {names.ANNOTATION_PAUSE: "true"}
    world.service = world.service.model_copy(
        update={"metadata": world.service.metadata.model_copy(update={"annotations": annotations})}
    )

    put(world, "gold", MORE_CPU)
    world.run(60)

    assert cpus(world) == {"2"}
    assert "the annotation slipway.dev/pause" in world.condition("Reconciling").message


# --- a template is missing, or cannot be applied ----------------------------------------------------------------------


def test_a_missing_template_is_stalled_with_its_remedy_and_starts_nothing():
    world = a_world(a_three_line_service("gold", "glod"), gold=GOLD)

    stalled = world.condition("Stalled")
    assert stalled.reason == "TemplateNotFound"
    assert "there is no ServiceTemplate glod (there is gold): correct spec.baseRefs, or create" in stalled.message
    assert world.condition("Ready").reason == "TemplateNotFound"
    assert world.pods == {}

    put(world, "glod", {})
    world.run(20)
    assert world.condition("Ready").reason == "Available"
    assert world.condition("Stalled") is None


def test_a_deleted_template_stops_nothing_and_lost_replicas_are_rebuilt_with_what_it_had():
    world = a_world(a_three_line_service(replicas=2), gold=GOLD)
    recorded, pods = status(world).inherited, set(world.pods)

    del world.templates["gold"]
    world.run(20)

    assert set(world.pods) == pods
    stalled = world.condition("Stalled")
    assert stalled.reason == "TemplateNotFound"
    assert "runs on" in stalled.message
    assert world.condition("Ready").status.value == "True"
    world.restart_operator()
    world.end(min(pods))
    edit(world, a_three_line_service(replicas=3))
    world.run(60)
    assert len(world.ready) == 3, "it scales"
    assert cpus(world) == {"2"}
    assert status(world).inherited == recorded

    put(world, "gold", GOLD)
    world.run(20)
    assert world.condition("Stalled") is None
    assert cpus(world) == {"2"}


def test_a_new_revision_waits_for_the_missing_template():
    world = a_world(a_three_line_service(), gold=GOLD)
    pods = set(world.pods)
    del world.templates["gold"]

    edit(world, a_three_line_service(runtime={"maxModelLen": 512}))
    world.run(60)

    assert set(world.pods) == pods
    assert world.condition("Stalled").reason == "TemplateNotFound"
    put(world, "gold", MORE_CPU)
    world.run(60)
    assert world.condition("Stalled") is None
    assert cpus(world) == {"4"}


UNFIT: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("GPUs", {}, {"resources": {"gpu": {"count": 2}}}, "resources.gpu.count must be 0 (CPU) or equal"),
    ("two scalers", {"replicas": 2}, {"autoscaling": {"maxReplicas": 3}}, "replicas must be absent where autoscaling"),
    ("gates", {"runtime": {"task": "embed"}}, {"rollout": {"gates": {"smoke": []}}}, "rollout.gates ask for text"),
]


@pytest.mark.parametrize(("what", "spec", "change", "sentence"), UNFIT, ids=[one[0] for one in UNFIT])
def test_a_template_that_does_not_fit_the_service_is_named_and_changes_nothing(what, spec, change, sentence):
    world = a_world(a_three_line_service(**spec), gold=GOLD)
    pods, recorded = set(world.pods), status(world).inherited
    assert pods

    put(world, "gold", {**GOLD, **change})
    world.run(60)

    stalled = world.condition("Stalled")
    assert stalled.reason == "InvalidSpec"
    assert sentence in stalled.message
    (block,) = change
    assert f"spec.{block} is from ServiceTemplate gold" in stalled.message
    assert f"set spec.{block} in the service" in stalled.message
    assert set(world.pods) == pods
    assert status(world).inherited == recorded
    assert world.condition("Ready").status.value == "True"


def test_a_template_that_this_version_cannot_read_is_named_and_changes_nothing():
    world = a_world(a_three_line_service(), gold=GOLD)
    pods = set(world.pods)

    put(world, "gold", {**GOLD, "drain": {"timeoutSeconds": "soon"}})
    world.run(30)

    assert set(world.pods) == pods
    assert "ServiceTemplate gold cannot be read: spec.drain.timeoutSeconds" in world.condition("Stalled").message


def test_an_inherited_canary_refuses_another_served_name():
    world = a_world(a_three_line_service(model={"servedName": "a"}), gold={**GOLD, "rollout": CANARY})
    pods = set(world.pods)

    edit(world, a_three_line_service(model={"servedName": "b"}))
    world.run(30)

    assert set(world.pods) == pods
    assert world.condition("Stalled").reason == "InvalidSpec"
    assert "strategy Canary cannot change model.servedName" in world.condition("Stalled").message
    edit(world, a_three_line_service(model={"servedName": "b"}, rollout={"strategy": "Recreate"}))
    world.run(60)
    assert world.condition("Stalled") is None
    assert status(world).served_name == "b"


def test_without_references_nothing_is_recorded_any_more():
    world = a_world(a_three_line_service(), gold=GOLD)

    edit(world, a_service(resources=GOLD["resources"]))
    world.run(30)

    assert status(world).templates == ()
    assert status(world).inherited is None


# --- any order of events ----------------------------------------------------------------------------------------------

CHANGES = st.one_of(
    st.tuples(st.just("put"), st.sampled_from(["gold", "silver"]), st.sampled_from([GOLD, MORE_CPU, {}, UNFIT[0][2]])),
    st.tuples(st.just("delete"), st.sampled_from(["gold", "silver"]), st.just({})),
    st.tuples(st.just("restart"), st.just(""), st.just({})),
    st.tuples(st.just("end a replica"), st.just(""), st.just({})),
)


@settings(max_examples=8, deadline=None)
@given(st.lists(st.tuples(CHANGES, st.integers(0, 15)), max_size=5))
def test_whatever_happens_to_templates_replicas_stay_and_the_service_ends_where_they_ask(changes):
    world = a_world(a_three_line_service("gold", "silver", replicas=2), gold=GOLD, silver={})
    for (what, name, spec), pause in changes:
        if what == "put":
            put(world, name, spec)
        elif what == "delete":
            world.templates.pop(name, None)
        elif what == "restart":
            world.restart_operator()
        elif world.pods:
            world.end(min(world.pods))
        world.run(pause)
        assert world.pods, "no change of a template takes a running service away"

    put(world, "gold", MORE_CPU)
    put(world, "silver", {})
    world.run(90)

    assert cpus(world) == {"4"}
    assert len(world.ready) == 2
    assert world.condition("Stalled") is None
    revisions = {pod.replica.revision for pod in world.pods.values()}
    assert revisions == {status(world).current_revision}
