"""The real API server's word on `spec.rollout`: what it takes, and what it says to a rollout that cannot work."""

from collections.abc import Iterator
from typing import Any

import pytest

from e2e.cluster.access import Access, CommandError
from tests.api.manifests import NAMESPACE, a_manifest, apply, assert_refused, stored

pytestmark = pytest.mark.apiserver


@pytest.fixture(autouse=True)
def nothing_is_left(api: Access) -> Iterator[None]:
    """Other tests expect an empty namespace."""
    yield
    api.kubectl("delete", "infsvc", "--all", "-n", NAMESPACE)


FULL = {"setWeight": 100}
GOLDEN = "configmap://chat-golden/prompts.jsonl"
GATES = {"smoke": [{"prompt": "2+2=", "mustMatch": "4"}]}


def canary(*steps: dict[str, Any], **rollout: Any) -> dict[str, Any]:
    return {"rollout": {"strategy": "Canary", "canary": {"steps": list(steps)}, **rollout}}


def analysis(**metric: Any) -> dict[str, Any]:
    fields = canary(FULL)
    fields["rollout"]["canary"]["analysis"] = {"metrics": [metric]}
    return fields


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("a canary without steps", {"rollout": {"strategy": "Canary"}}, "strategy Canary needs canary"),
    ("steps without the strategy", {"rollout": {"canary": {"steps": [FULL]}}}, "no other strategy has it"),
    ("no step at all", canary(), "spec.rollout.canary.steps"),
    ("an empty step", canary({}, FULL), "exactly one of"),
    ("a step that is two", canary({"setWeight": 5, "pauseSeconds": 5}, FULL), "exactly one of"),
    ("a last step that is not all", canary({"setWeight": 50}), "the last step must be setWeight: 100"),
    ("a last step that is a pause", canary(FULL, {"pauseSeconds": 5}), "the last step must be setWeight: 100"),
    ("a weight that falls", canary({"setWeight": 50}, {"setWeight": 20}, FULL), "setWeight must grow"),
    ("a weight twice", canary({"setWeight": 50}, {"setWeight": 50}, FULL), "setWeight must grow"),
    ("a mirror after a weight", canary({"setWeight": 5}, {"mirrorPercent": 5}, FULL), "before the first setWeight"),
    ("an analysis of nothing", canary({"analyze": {}}, FULL), "analyze needs a setWeight before it"),
    ("too many steps", canary(*[{"pauseSeconds": 1}] * 20, FULL), "must have at most 20 items"),
    (
        "a canary without surge",
        canary(FULL, rollingUpdate={"maxSurge": 0, "maxUnavailable": 1}),
        "maxSurge of at least 1",
    ),
    ("errors without a limit", analysis(type="ErrorRate"), "ErrorRate needs max"),
    ("latency without a limit", analysis(type="TTFTP95"), "need maxRegressionPercent"),
    ("a limit in percent", analysis(type="ErrorRate", max="5"), "is a share of the requests"),
    ("a metric that nobody measures", analysis(type="GPUUtilization", max="0.5"), "supported values"),
    ("blue-green for one GPU more", {"replicas": 3, "rollout": {"strategy": "BlueGreen"}}, "a second full set"),
    (
        "blue-green below maxReplicas",
        {
            "autoscaling": {"maxReplicas": 4},
            "rollout": {"strategy": "BlueGreen", "rollingUpdate": {"maxSurge": 3}},
        },
        "a second full set",
    ),
    (
        "a quantized canary without a gate",
        {"runtime": {"quantization": "fp8"}} | canary(FULL),
        "a quantized revision is promoted only with a gate result",
    ),
    (
        "golden prompts of another scheme",
        {"rollout": {"gates": {"golden": {"uri": "https://example.com/golden.jsonl"}}}},
        "spec.rollout.gates.golden.uri",
    ),
    (
        "a drop that is no share",
        {"rollout": {"gates": {"golden": {"uri": GOLDEN, "maxDropPercent": "101"}}}},
        "at most 100",
    ),
    (
        "a disagreement that is no share",
        {"rollout": {"gates": {"golden": {"uri": GOLDEN, "maxDisagreementPercent": "5%"}}}},
        "maxDisagreementPercent",
    ),
    (
        "an upgrade window without its policy",
        {"runtime": {"upgradeWindow": {"schedule": "0 2 * * 6"}}},
        "upgradePolicy Window needs upgradeWindow",
    ),
    ("the policy without a window", {"runtime": {"upgradePolicy": "Window"}}, "needs upgradeWindow with its schedule"),
    (
        "a window that is no cron expression",
        {"runtime": {"upgradePolicy": "Window", "upgradeWindow": {"schedule": "at night"}}},
        "spec.runtime.upgradeWindow.schedule",
    ),
    (
        "upgrades of an image of the user's own",
        {"runtime": {"upgradePolicy": "Auto", "image": "mine:1"}},
        "runtime.image must be empty",
    ),
    (
        "a deadline before a replica counts as warm",
        {"rollout": {"progressDeadlineSeconds": 60, "rollingUpdate": {"minReadySeconds": 60}}},
        "progressDeadlineSeconds must be above rollingUpdate.minReadySeconds",
    ),
    ("a smoke test without a prompt", canary(FULL, gates={"smoke": [{"mustMatch": "4"}]}), "prompt"),
]


@pytest.mark.capability("EV-1", "PF-22")
@pytest.mark.parametrize(("spec", "sentence"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_a_rollout_that_cannot_work_is_refused_with_one_sentence(api, spec, sentence):
    assert_refused(api, a_manifest("bad-rollout", **spec), sentence)


@pytest.mark.capability("EV-1")
def test_every_field_of_a_canary_is_kept_and_the_defaults_are_filled_in(api):
    steps = [
        {"mirrorPercent": 10},
        {"pauseSeconds": 60},
        *({"setWeight": weight} for weight in (1, 5, 10, 20, 30, 40, 50, 60, 70)),
        *[{"pauseSeconds": 300}, {"analyze": {}}] * 4,
        FULL,
    ]
    apply(api, a_manifest("canary", replicas=3, **canary(*steps, gates=GATES, paused=True)))

    rollout = stored(api, "canary")["spec"]["rollout"]

    assert rollout["canary"]["steps"] == steps
    assert rollout["gates"] == GATES
    analysis = rollout["canary"]["analysis"]
    assert (analysis["intervalSeconds"], analysis["minRequests"], analysis["failureLimit"]) == (30, 100, 2)
    assert [metric["type"] for metric in analysis["metrics"]] == ["ErrorRate", "TTFTP95", "ITLP95"]


@pytest.mark.capability("EV-5")
@pytest.mark.parametrize(
    "spec",
    [
        {"rollout": {"strategy": "Recreate"}},
        {"rollout": {"strategy": "BlueGreen"}},
        {"replicas": 3, "rollout": {"strategy": "BlueGreen", "rollingUpdate": {"maxSurge": 3}}},
        {"autoscaling": {"maxReplicas": 4}, "rollout": {"strategy": "BlueGreen", "rollingUpdate": {"maxSurge": 4}}},
        {"runtime": {"quantization": "fp8"}, **canary(FULL, gates=GATES)},
        {"runtime": {"quantization": "fp8"}, **canary(FULL, gates={"golden": {"uri": GOLDEN}})},
    ],
    ids=["recreate", "one replica", "three", "autoscaled", "quantized with a gate", "quantized with golden prompts"],
)
def test_the_other_strategies_are_taken(api, spec):
    apply(api, a_manifest("strategy", **spec))
    assert stored(api, "strategy")["spec"]["rollout"]["strategy"] == spec["rollout"]["strategy"]


@pytest.mark.capability("EV-1")
def test_a_canary_cannot_change_the_served_name_and_another_strategy_can(api):
    manifest = a_manifest("renamed", **canary(FULL))
    apply(api, manifest)
    manifest["spec"]["model"] = manifest["spec"]["model"] | {"servedName": "other"}
    with pytest.raises(CommandError) as refused:
        apply(api, manifest)
    assert "cannot change model.servedName" in refused.value.stderr
    manifest["spec"]["rollout"] = {"strategy": "RollingUpdate"}
    apply(api, manifest)
    assert stored(api, "renamed")["spec"]["model"]["servedName"] == "other"


@pytest.mark.capability("QZ-2")
def test_golden_prompts_and_upgrade_windows_get_their_defaults(api):
    window = {"schedule": "0 2 * * 6", "timeZone": "Europe/Berlin"}
    runtime = {"upgradePolicy": "Window", "upgradeWindow": window}
    apply(api, a_manifest("defaults", runtime=runtime, rollout={"gates": {"golden": {"uri": GOLDEN}}}))

    spec = stored(api, "defaults")["spec"]

    golden = spec["rollout"]["gates"]["golden"]
    assert (golden["maxDropPercent"], golden["maxDisagreementPercent"]) == ("2.0", "5.0")
    assert spec["runtime"]["upgradeWindow"] == window | {"durationSeconds": 3600}

    apply(api, a_manifest("plain"))
    plain = stored(api, "plain")["spec"]["runtime"]
    assert plain["upgradePolicy"] == "OnSpecChange"
    assert "upgradeWindow" not in plain
