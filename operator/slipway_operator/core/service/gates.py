"""Decides whether a new revision has passed its smoke tests, which it must before it gets any traffic. Pure.

A ready replica of the new revision is asked each prompt with temperature 0; the executor calls it and keeps the result
in memory until the next pass. A wrong answer fails the revision at once, because the same prompt gets the same answer.
No answer is asked for again, and fails it after MOST_ERRORS times. That they are passed stands in status.canary.gate.
Results hold no text of prompts or answers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from slipway_api.rollout_spec import Gates
from slipway_operator.core.actions import AskSmokeTests, SmokeResult
from slipway_operator.core.health import Member

GATE_PASSED: Final = "Passed"
MOST_ERRORS: Final = 5
ASK_AGAIN: Final = timedelta(seconds=5)


@dataclass(frozen=True, slots=True, kw_only=True)
class GateState:
    """How far the gates are."""

    is_passed: bool = False
    has_just_passed: bool = False
    failed_because: str = ""
    actions: tuple[AskSmokeTests, ...] = ()
    again_at: datetime | None = None


def check_gates(
    gates: Gates | None,
    members: Sequence[Member],
    *,
    revision: str,
    model: str,
    was_passed: bool,
    results: Mapping[str, SmokeResult],
    now: datetime,
) -> GateState:
    """Decide by the results so far, and ask for those that are missing. `members` are those of the new revision."""
    if gates is None or not gates.smoke or was_passed:
        return GateState(is_passed=True)
    known = [results[one.replica.uid] for one in members if one.replica.uid in results]
    if any(one.is_passed for one in known):
        return GateState(is_passed=True, has_just_passed=True)
    wrong = next((one for one in known if one.wrong), None)
    if wrong:
        return GateState(failed_because=f"smoke test {wrong.wrong} of {len(gates.smoke)}: the answer does not match")
    silent = max(known, key=lambda one: one.errors, default=None)
    if silent and silent.errors >= MOST_ERRORS:
        return GateState(failed_because=f"the smoke tests got no answer {silent.errors} times: {silent.error}")
    ready = [one for one in members if one.is_ready and one.replica.pod_ip]
    if not ready:
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
        reason=f"revision {revision} has to pass {len(gates.smoke)} smoke tests before it gets traffic",
    )
    return GateState(actions=(ask,), again_at=now + ASK_AGAIN)
