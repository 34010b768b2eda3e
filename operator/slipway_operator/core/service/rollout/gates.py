"""Decides whether a new revision has passed its gates, which it must before it gets any traffic. Pure.

A ready replica of the new revision is asked each prompt with temperature 0: first those of the smoke tests, then the
golden prompts, beside a ready replica of the stable revision. The executor calls it and keeps the result in memory
until the next pass. A wrong answer fails the revision at once, because the same prompt gets the same answer. No answer
is asked for again, and fails it after MOST_ERRORS times. That they are passed stands in status.canary.gate. Results
hold no text of prompts or answers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from slipway_api.rollout_spec import Gates, GoldenGate
from slipway_api.words import count
from slipway_operator.core.actions import AskSmokeTests, GoldenTest, SmokeResult
from slipway_operator.core.health import Member

GATE_PASSED: Final = "Passed"
MOST_ERRORS: Final = 5
ASK_AGAIN: Final = timedelta(seconds=5)


@dataclass(frozen=True, slots=True, kw_only=True)
class GateState:
    """How far the gates are."""

    is_passed: bool = False
    has_just_passed: bool = False
    verdict: str = ""
    """What the golden prompts gave, where they have just passed."""
    failed_because: str = ""
    actions: tuple[AskSmokeTests, ...] = ()
    again_at: datetime | None = None


def is_gated(gates: Gates | None) -> bool:
    """Whether there is any test to pass."""
    return gates is not None and (bool(gates.smoke) or gates.golden is not None)


def describe_gates(gates: Gates | None) -> str:
    """The tests in words."""
    smoke = [f"{len(gates.smoke)} smoke tests"] if gates and gates.smoke else []
    golden = [f"the golden prompts of {gates.golden.uri}"] if gates and gates.golden else []
    return " and ".join(smoke + golden)


def check_gates(
    gates: Gates | None,
    members: Sequence[Member],
    *,
    stable_members: Sequence[Member] = (),
    revision: str,
    model: str,
    stable_model: str = "",
    was_passed: bool,
    results: Mapping[str, SmokeResult],
    now: datetime,
) -> GateState:
    """Decide by the results so far, and ask for those that are missing. `members` are those of the new revision."""
    if gates is None or not is_gated(gates) or was_passed:
        return GateState(is_passed=True)
    known = [results[one.replica.uid] for one in members if one.replica.uid in results]
    passed = next((one for one in known if one.is_passed), None)
    if passed:
        return GateState(is_passed=True, has_just_passed=True, verdict=passed.golden)
    worse = next((one for one in known if one.golden), None)
    if worse:
        return GateState(failed_because=worse.golden)
    wrong = next((one for one in known if one.wrong), None)
    if wrong:
        return GateState(failed_because=f"smoke test {wrong.wrong} of {len(gates.smoke)}: the answer does not match")
    silent = max(known, key=lambda one: one.errors, default=None)
    if silent and silent.errors >= MOST_ERRORS:
        tests = f"golden prompts of {gates.golden.uri}" if silent.is_golden and gates.golden else "smoke tests"
        return GateState(failed_because=f"the {tests} got no answer {count(silent.errors, 'time')}: {silent.error}")
    ready = [one for one in members if one.is_ready and one.replica.pod_ip]
    # A stable replica that is unready for a moment is waited for: without it, disagreement would not be measured.
    if not ready or (gates.golden and _will_be_ready(stable_members)):
        return GateState()
    chosen = min(ready, key=lambda one: (one.replica.slot, one.replica.attempt)).replica
    before = results.get(chosen.uid)
    if before and now < before.at + ASK_AGAIN:
        return GateState(again_at=before.at + ASK_AGAIN)
    ask = AskSmokeTests(
        name=chosen.name,
        uid=chosen.uid,
        model=model,
        tests=tuple((test.prompt, test.must_match) for test in gates.smoke),
        errors=before.errors if before else 0,
        reason=f"revision {revision} has to pass {describe_gates(gates)} before it gets traffic",
        golden=_golden_test(gates.golden, stable_members, stable_model) if gates.golden else None,
    )
    return GateState(actions=(ask,), again_at=now + ASK_AGAIN)


def _will_be_ready(members: Sequence[Member]) -> bool:
    """Whether none of the replicas is ready, and one of them is about to be."""
    hopeful = [one for one in members if one.is_live and not one.stage.is_broken]
    return bool(hopeful) and not any(one.is_ready and one.replica.pod_ip for one in hopeful)


def _golden_test(golden: GoldenGate, stable_members: Sequence[Member], model: str) -> GoldenTest:
    config_map, _, key = golden.uri.removeprefix("configmap://").partition("/")
    ready = [one.replica for one in stable_members if one.is_ready and one.replica.pod_ip]
    beside = min(ready, key=lambda one: (one.slot, one.attempt), default=None)
    return GoldenTest(
        uri=golden.uri,
        config_map=config_map,
        key=key,
        max_drop=float(golden.max_drop_percent),
        max_disagreement=float(golden.max_disagreement_percent),
        beside=beside.name if beside else "",
        beside_uid=beside.uid if beside else "",
        beside_model=model,
    )
