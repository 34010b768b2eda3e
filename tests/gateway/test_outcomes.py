"""Which revision an outcome counts for, and how the time between tokens is measured."""

import pytest

from slipway_api.gateway_api import OUTCOME_BUCKETS
from slipway_gateway.health import AttemptFailure
from slipway_gateway.outcomes import Outcomes

LOST, MOVED, SHED = AttemptFailure.LOST, AttemptFailure.MOVED, AttemptFailure.SHED


def counts(outcomes: Outcomes) -> dict[str, tuple[int, int]]:
    return {one.revision: (one.requests, one.errors) for one in outcomes.report().revisions}


@pytest.mark.parametrize(
    ("is_error", "failed", "expected"),
    [
        (False, [], {"new": (1, 0)}),
        (True, [], {"new": (1, 1)}),
        (False, [("old", LOST)], {"new": (1, 0), "old": (1, 1)}),
        (False, [("old", LOST), ("old", LOST)], {"new": (1, 0), "old": (1, 1)}),
        (False, [("new", LOST)], {"new": (1, 0)}),
        (True, [("new", LOST)], {"new": (1, 1)}),
        (False, [("old", MOVED), ("old", SHED)], {"new": (1, 0)}),
    ],
)
@pytest.mark.capability("EV-1")
def test_a_failed_attempt_is_an_error_of_its_revision_unless_that_revision_answered_in_the_end(
    is_error, failed, expected
):
    outcomes = Outcomes("boot")
    outcomes.record("ns/chat", "new", is_error=is_error, failed=failed)

    assert counts(outcomes) == expected


def test_events_that_arrive_together_share_the_time_since_the_last_ones():
    now = [10.0]
    outcomes = Outcomes("boot", clock=lambda: now[0])
    pace = outcomes.pace("ns/chat", "r1", first_at=10.0)
    now[0] = 10.015
    pace.add(1)
    now[0] = 10.315  # the client did not read for a while: ten tokens of 30 ms
    pace.add(10)
    [revision] = outcomes.report().revisions

    filled = {OUTCOME_BUCKETS[index]: count for index, count in enumerate(revision.itl) if count}
    assert filled == {0.02: 1, 0.03: 10} or filled == {0.02: 1, 0.04: 10}, "0.3 / 10 may be rounded either way"


def test_a_time_above_all_buckets_counts_in_the_last_one():
    outcomes = Outcomes("boot")
    outcomes.record("ns/chat", "r1", is_error=False, ttft_seconds=10_000)
    [revision] = outcomes.report().revisions

    assert (len(revision.ttft), revision.ttft[-1]) == (len(OUTCOME_BUCKETS) + 1, 1)


def test_revisions_that_are_gone_are_forgotten():
    outcomes = Outcomes("boot")
    outcomes.record("ns/chat", "old", is_error=False)
    outcomes.record("ns/chat", "new", is_error=False)

    assert [one.revision for one in outcomes.report(lambda _, revision: revision == "new").revisions] == ["new"]
