"""A spec with a ServiceAccount, image or PriorityClass that is not allowed: nothing is created, and status says why.

Issue 26, item 8: the list of accounts was a rule of the chart's copy of the CustomResourceDefinitions.
Issue 23, item 4 (review/shipping.md 21): images and priority classes had no list.
"""

from dataclasses import replace
from typing import Any

import pytest

from slipway_api.conditions import find_condition
from slipway_operator.core.actions import CreatePod
from slipway_operator.core.observed import Observed
from slipway_operator.core.pod_rules import is_below
from slipway_operator.core.service.plan import plan as plan_service
from slipway_operator.core.service.status.problems import find_start_obstacle
from slipway_operator.core.warm_pool.plan import plan as plan_pool
from tests.builders import DEFAULTS, T0, APod, a_pod, a_service, minutes, promised, revision_of
from tests.builders import seen as seen_service
from tests.operator.core.simulated_cluster import SimulatedCluster
from tests.operator.core.warm_pool.pools import a_pool, a_waiting_pod
from tests.operator.core.warm_pool.pools import seen as seen_pool


def named(account: str | None) -> dict[str, Any]:
    return {"template": {"spec": {"serviceAccountName": account}}} if account else {}


def allowing(*accounts: str) -> dict[str, Any]:
    return {"defaults": replace(DEFAULTS, service_accounts=accounts)}


def observe(account: str | None, *pods: APod, allowed: tuple[str, ...]) -> Observed:
    service = promised(a_service(replicas=2, **named(account)), 2)
    return replace(seen_service(service, *pods), **allowing(*allowed))


def stalled(made: Any) -> tuple[str, str]:
    condition = find_condition(made.status.conditions, "Stalled")
    return (condition.reason, condition.message) if condition else ("", "")


@pytest.mark.parametrize(
    ("account", "allowed", "expected"),
    [
        (None, (), ""),
        ("models", ("models", "hub"), ""),
        (
            "admin",
            (),
            "admin is not allowed; allowed: none. Remove the field, or add admin to allowedServiceAccountNames",
        ),
        (
            "admin",
            ("models", "hub"),
            "admin is not allowed; allowed: models, hub. Name an allowed account, or add admin",
        ),
    ],
)
def test_only_an_allowed_account_gets_pods_of_a_service_and_of_a_pool(account, allowed, expected):
    pool = replace(seen_pool(a_pool(**named(account)), a_waiting_pod(0)), **allowing(*allowed))
    for made in (plan_service(observe(account, allowed=allowed), T0), plan_pool(pool, T0)):
        assert any(isinstance(action, CreatePod) for action in made.actions) == (not expected)
        assert stalled(made)[0] == ("InvalidSpec" if expected else "")
        assert expected in stalled(made)[1]
        reports = [event.message for event in made.events if event.reason.value == "InvalidSpec"]
        assert reports == ([stalled(made)[1]] if expected else []), "one event with the sentence of the condition"


def test_replicas_of_a_service_whose_account_left_the_list_serve_on_and_it_is_reported_once():
    service = promised(a_service(replicas=2, **named("models")), 2)
    pods = (a_pod(service=service).ready(), a_pod(service=service).slot(1).loading())
    before = seen_service(service, *pods)

    first = plan_service(replace(before, **allowing("hub")), T0)
    again = before.service.model_copy(update={"status": first.status})
    second = plan_service(replace(seen_service(again, *pods), **allowing("hub")), T0 + minutes(1))

    assert first.actions == second.actions == ()
    assert (first.status.replicas, first.status.ready_replicas) == (2, 1)
    assert find_condition(first.status.conditions, "RouteReady").status.value == "True"
    assert [len(made.events) for made in (first, second)] == [1, 0]


def test_a_pool_whose_account_left_the_list_keeps_its_waiting_pods():
    pool = a_pool(**named("models"))
    waiting = a_waiting_pod(0).of_shape(**named("models")).booted()

    made = plan_pool(replace(seen_pool(pool, waiting), **allowing()), T0)

    assert made.actions == ()
    assert made.status.ready == 1


class World(SimulatedCluster):
    """A cluster whose installation allows some accounts."""

    allowed: tuple[str, ...] = ("models",)

    def observed(self) -> Observed:
        observed = super().observed()
        return replace(observed, defaults=replace(observed.defaults, service_accounts=self.allowed))

    def accounts_of_new_pods(self) -> set[str | None]:
        return {manifest["spec"].get("serviceAccountName") for manifest in self.manifests.values()}


def test_no_replica_of_an_earlier_revision_is_rebuilt_with_an_account_that_left_the_list():
    service = a_service(replicas=3, finalizers=(), rollout={"strategy": "RollingUpdate"}, **named("models"))
    world = World(service, load_seconds=5)
    world.reconcile()
    world.run(20)
    assert world.accounts_of_new_pods() == {"models"}

    world.manifests.clear()
    world.allowed = ()
    world.service = world.service.model_copy(
        update={"spec": a_service(replicas=3, rollout={"strategy": "RollingUpdate"}).spec}
    )
    world.fail(min(world.pods))
    world.run(300)

    assert world.accounts_of_new_pods() == {None}
    assert world.service.status.ready_replicas == 3


def test_a_rollback_to_a_revision_with_such_an_account_says_why_nothing_starts():
    old = promised(a_service(replicas=1, **named("models")), 1)
    observed = replace(seen_service(old), **allowing())

    obstacle = find_start_obstacle(observed, revision_of(old))

    assert obstacle is not None
    assert obstacle[0] == "InvalidSpec"
    assert "serviceAccountName models is not allowed" in obstacle[1]


IMAGES = {"allowed_images": ("registry.example.com/models", "quay.io/")}
CLASSES = {"allowed_priority_classes": ("batch", "system-node-critical")}
OCI = {"model": {"uri": "oci://docker.io/team/weights:1#llama"}}
# spec of a service, what is allowed, the sentence; empty: it is allowed
SPECS: list[tuple[dict[str, Any], dict[str, tuple[str, ...]], str]] = [
    ({}, IMAGES, ""),  # the chart's image
    ({"runtime": {"image": "docker.io/a/b:1"}}, {}, ""),
    ({"runtime": {"image": "registry.example.com/models/own:1"}}, IMAGES, ""),
    (
        {"runtime": {"image": "registry.example.com/models-of-others/own:1"}},
        IMAGES,
        "spec.runtime.image names the image registry.example.com/models-of-others/own:1, which is not allowed; "
        "allowed: registry.example.com/models, quay.io/. Use an image below one of these, or add its registry or "
        "repository to allowedImages of the chart",
    ),
    (OCI, {}, ""),
    (OCI, IMAGES, "spec.model.uri names the image docker.io/team/weights:1, which is not allowed"),
    ({"availability": {"priorityClassName": "gold"}}, {}, ""),
    (
        {"availability": {"priorityClassName": "system-cluster-critical"}},
        {},
        "spec.availability.priorityClassName system-cluster-critical is not allowed; allowed: all but system-*. "
        "Name an allowed class, or add system-cluster-critical to allowedPriorityClassNames of the chart",
    ),
    ({"template": {"spec": {"priorityClassName": "system-node-critical"}}}, {}, "allowed: all but system-*"),
    ({"template": {"spec": {"priorityClassName": "system-node-critical"}}}, CLASSES, ""),
    ({"availability": {"priorityClassName": "gold"}}, CLASSES, "gold is not allowed; allowed: batch, system-node"),
    # The template's class is the one of the pods.
    (
        {"availability": {"priorityClassName": "gold"}, "template": {"spec": {"priorityClassName": "batch"}}},
        CLASSES,
        "",
    ),
]


@pytest.mark.capability("SE-3")
@pytest.mark.parametrize(("spec", "allowed", "expected"), SPECS)
def test_only_allowed_images_and_priority_classes_get_pods(spec, allowed, expected):
    observed = seen_service(promised(a_service(**spec), 1))
    made = plan_service(replace(observed, defaults=replace(DEFAULTS, **allowed)), T0)

    assert any(isinstance(action, CreatePod) for action in made.actions) == (not expected)
    assert stalled(made)[0] == ("InvalidSpec" if expected else "")
    assert expected in stalled(made)[1]


@pytest.mark.parametrize(
    ("spec", "allowed", "expected"),
    [
        ({}, CLASSES, ""),
        ({"image": "docker.io/a/b:1"}, IMAGES, "spec.image names the image docker.io/a/b:1"),
        ({"template": {"spec": {"priorityClassName": "system-node-critical"}}}, {}, "allowed: all but system-*"),
        (OCI | {"level": "Loaded", "models": [OCI["model"]]}, IMAGES, "spec.models[0].uri names the image docker.io"),
    ],
)
def test_pools_follow_the_same_lists(spec, allowed, expected):
    spec = {key: value for key, value in spec.items() if key != "model"}
    observed = seen_pool(a_pool(**spec))
    made = plan_pool(replace(observed, defaults=replace(DEFAULTS, **allowed)), T0)

    assert any(isinstance(action, CreatePod) for action in made.actions) == (not expected)
    assert expected in stalled(made)[1]
    assert bool(stalled(made)[0]) == bool(expected)


@pytest.mark.parametrize(
    ("image", "prefix", "expected"),
    [
        ("r.io/a/b:1", "r.io/a", True),
        ("r.io/a:1", "r.io/a", True),
        ("r.io/a@sha256:0", "r.io/a", True),
        ("r.io/a", "r.io/a", True),
        ("r.io/ab", "r.io/a", False),
        ("r.io.evil.example/a", "r.io", False),
        ("r.io/a", "r.io/", True),
        ("evil.example/r.io/a", "r.io/", False),
        ("a", "docker.io/library/", False),  # as written: a short name is not in a list of full ones
    ],
)
def test_a_prefix_ends_at_a_part_of_the_name(image, prefix, expected):
    assert is_below(image, prefix) is expected
