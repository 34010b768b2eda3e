"""Which revision an outcome counts for, and how the time between tokens is measured."""

import pytest

from slipway_api.gateway_api import OUTCOME_BUCKETS
from slipway_gateway.access_log import AccessLog
from slipway_gateway.fleet import Fleet
from slipway_gateway.health import AttemptFailure
from slipway_gateway.metrics import Metrics
from slipway_gateway.outcomes import Outcomes
from slipway_gateway.picker.endpoints import LatencyLimits
from slipway_gateway.request_state import RequestState

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


def services(outcomes: Outcomes) -> dict[str, tuple[int, int, int, int]]:
    return {one.service: (one.requests, one.errors, one.good, one.output_tokens) for one in outcomes.report().services}


@pytest.mark.capability("OB-9")
def test_requests_of_a_service_are_counted_as_its_clients_saw_them():
    outcomes = Outcomes("boot")
    outcomes.record_service("ns/chat", counts=True, is_good=True, ttft_seconds=0.3, output_tokens=10)
    outcomes.record_service("ns/chat", counts=True, is_good=False, ttft_seconds=7.0, output_tokens=10)
    outcomes.record_service("ns/chat", counts=True, is_error=True, is_good=True)
    outcomes.record_service("ns/chat", counts=False, output_tokens=4)  # its client left

    assert services(outcomes) == {"ns/chat": (3, 1, 1, 24)}
    [service] = outcomes.report().services
    assert sum(service.ttft) == 2
    assert outcomes.report(is_service=lambda _service: False).services == ()


def test_a_copy_for_a_mirrored_revision_counts_for_the_revision_only():
    now = [10.0]
    outcomes = Outcomes("boot", clock=lambda: now[0])
    copy = outcomes.pace("ns/chat", "new", first_at=10.0)
    ours = outcomes.client_pace("ns/chat", "old", first_at=10.0)
    now[0] = 10.5
    copy.add(5)
    ours.add(5)

    report = outcomes.report()
    assert [sum(one.itl) for one in report.revisions] == [5, 5]
    assert [sum(one.itl) for one in report.services] == [5]
    assert ours.mean_seconds == pytest.approx(0.1)


LIMITS = LatencyLimits(ttft_seconds=1.0, itl_seconds=0.1)


def a_record(*, status=200, finish="stop", ttft=0.5, itl=None, stream=True) -> RequestState:
    record = RequestState(request_id="r", path="/v1/chat/completions", latency_limits=LIMITS)
    record.status, record.finish, record.arrived, record.first_byte = status, finish, 100.0, 100.0 + ttft
    if stream:
        now = [0.0]
        record.pace = Outcomes("boot", clock=lambda: now[0]).pace("ns/chat", "r1", first_at=0.0)
        if itl is not None:
            now[0] = 10 * itl
            record.pace.add(10)
    return record


@pytest.mark.capability("OB-9")
@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (a_record(), True),
        (a_record(ttft=1.5), False),
        (a_record(itl=0.05), True),
        (a_record(itl=0.15), False),
        (a_record(status=503), False),
        (a_record(finish="error"), False),
        (a_record(ttft=9.0, stream=False), True),
    ],
    ids=["fast", "slow first token", "fast tokens", "slow tokens", "refused", "broken off", "not streamed"],
)
def test_a_request_is_good_without_an_error_and_within_the_limits_of_the_slo(record, expected):
    assert record.is_good is expected


@pytest.mark.parametrize(
    ("status", "expected"), [(200, True), (503, True), (500, True), (499, False), (429, False), (404, False)]
)
def test_what_the_client_did_counts_neither_as_good_nor_as_bad(status, expected):
    assert a_record(status=status).counts_for_service is expected


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([], 499),
        ([b'data: {"a": 1}\n\n'], 499),
        ([b'data: {"a": 1}\n\n', b"data: [DONE]\n\n"], 200),
        ([b"event: message_stop\ndata: {}\n\n"], 200),
    ],
    ids=["nothing was sent", "the end was not sent", "[DONE]", "Anthropic's end"],
)
@pytest.mark.capability("OB-7")
def test_a_client_that_closes_after_the_last_event_has_not_left_before_the_end(pieces, expected):
    record = RequestState(request_id="one", path="/v1/chat/completions", status=200)
    for piece in pieces:
        record.add_forwarded(piece)

    record.set_cancelled()

    assert record.status == expected
    assert record.finish == ("cancelled" if expected == 499 else "")


@pytest.mark.capability("RG-1")
@pytest.mark.parametrize("is_pinned", [False, True])
def test_requests_that_pin_a_revision_do_not_decide_its_canary_and_count_for_the_service(is_pinned):
    """review/control-plane.md 18: 60 pinned requests were all that the analysis saw."""
    outcomes = Outcomes("boot")
    record = a_record()
    record.service, record.revision, record.outcomes, record.is_pinned = "ns/chat", "r2", outcomes, is_pinned
    record.pace, record.stream, record.forwarded, record.status = None, True, 0.0, 200
    record.add_forwarded(b"data: 1\n\n")
    record.add_forwarded(b"data: 2\n\n")
    AccessLog(Metrics(Fleet(), open_to_anyone=True)).write(record)
    report = outcomes.report()

    assert [(one.revision, one.requests, sum(one.itl)) for one in report.revisions if one.requests or one.itl] == (
        [] if is_pinned else [("r2", 1, 1)]
    )
    assert [(one.requests, sum(one.itl)) for one in report.services] == [(1, 1)]
