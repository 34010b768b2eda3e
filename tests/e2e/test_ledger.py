"""The ledger of the stories finds each way in which a request can be lost, and each count that does not agree."""

from dataclasses import replace

import pytest

from bench.plan import LoadReport
from e2e.ledger import (
    GatewayCounts,
    GatewayRecord,
    PodLogs,
    Records,
    ReplicaCounts,
    ReplicaRecord,
    find_losses,
    parse_line,
)

REPORT = LoadReport(sent=3, finished=3, failed=0, retries_429=1)
GOOD = Records(
    requests=[
        GatewayRecord("a", 200, "stop"),
        GatewayRecord("b", 200, "length", handovers=1),
        GatewayRecord("c", 429, "refused"),
        GatewayRecord("d", 200, "length"),
    ],
    answers=[
        ReplicaRecord("pod-0", "a", "stop"),
        ReplicaRecord("pod-0", "b", "handed_over"),
        ReplicaRecord("pod-1", "b", "length"),
        ReplicaRecord("pod-2", "d", "length"),  # a replica that is gone
        ReplicaRecord("pod-1", "smoke", "length"),  # asked by the operator
    ],
    gateways=GatewayCounts(answered=3),
    replicas={
        "pod-0": ReplicaCounts(admitted=2, finished=1, handed_over=1),
        "pod-1": ReplicaCounts(admitted=2, finished=2),
    },
)


def test_a_ledger_that_agrees_has_no_losses_although_one_answer_was_handed_over_and_one_request_refused():
    assert find_losses(REPORT, GOOD) == []
    assert GOOD.summarize(REPORT) == (
        "3 sent = 3 answered + 0 not; gateways: 3 answered; 3 replicas: 5 admitted = 4 finished, 1 handed_over"
    )


@pytest.mark.parametrize(
    ("report", "loss"),
    [
        (replace(REPORT, sent=4), "client: 4 sent, 3 finished"),
        (replace(REPORT, sent=4, failed=1, failures={"error event: BadGateway": 1}), "client: 1 lost: error event"),
        (replace(REPORT, retries_429=0), "gateways: 4 requests logged, 3 sent"),
        (replace(REPORT, finished=2, left=1), "gateways: 3 answers logged, 2 got by clients"),
    ],
)
def test_what_the_client_missed_is_a_loss(report, loss):
    assert any(one.startswith(loss) for one in find_losses(report, GOOD))


def test_a_refused_request_was_never_accepted():
    report = replace(REPORT, sent=4, failed=1, failures={"status 429": 1}, retries_429=0)

    assert find_losses(report, GOOD) == []


@pytest.mark.parametrize(
    ("changed", "loss"),
    [
        ({"gateways": GatewayCounts(answered=2)}, "gateways: 2 answers counted in the metrics, 3 got"),
        ({"gateways": GatewayCounts(answered=3, errors=1)}, "gateways: 1 errors counted"),
        ({"gateways": GatewayCounts(answered=3, open=1)}, "gateways: 1 requests still open"),
        ({"answers": GOOD.answers[:-2]}, "replicas: 0 whole answers for request d"),
        ({"answers": [*GOOD.answers, ReplicaRecord("pod-2", "a", "stop")]}, "replicas: 2 whole answers for request a"),
        ({"requests": [*GOOD.requests[:3], GatewayRecord("d", 200, "error")]}, "gateways: 2 answers logged, 3 got"),
        ({"replicas": {"pod-0": ReplicaCounts(admitted=3, finished=1, handed_over=1)}}, "pod-0: 3 admitted, 0 open"),
        (
            {"replicas": {"pod-0": ReplicaCounts(admitted=2, finished=1, handed_over=1, open=1)}},
            "pod-0: 2 admitted, 1 open",
        ),
        ({"replicas": {"pod-0": ReplicaCounts(admitted=2, finished=2)}}, "pod-0: counted"),
    ],
)
def test_a_count_that_does_not_agree_is_a_loss(changed, loss):
    assert any(one.startswith(loss) for one in find_losses(REPORT, replace(GOOD, **changed)))


def request_line(request_id):
    return f'2026-01-01T00:00:00Z stderr F {{"request_id": "{request_id}", "message": "request"}}\n'


def test_only_lines_about_requests_are_read():
    assert parse_line(request_line("a").encode().strip()) == {"request_id": "a", "message": "request"}
    compact = b'2026-01-01T00:00:00Z stderr F {"part":"gateway","message":"request","request_id":"a"}'
    assert parse_line(compact) == {"part": "gateway", "message": "request", "request_id": "a"}
    assert parse_line(b'2026-01-01T00:00:00Z stderr F {"message": "draining"}') is None
    assert parse_line(b'2026-01-01T00:00:00Z stderr F {"message": "refused", "request_id": "a"}') is None
    assert parse_line(b"") is None


def test_logs_are_followed_from_now_on_through_rotation_and_after_their_pod_has_gone(tmp_path):
    def folder(pod):
        made = tmp_path / "node-a-pods" / f"default_{pod}_uid" / "server"
        made.mkdir(parents=True)
        return made

    old = folder("old") / "0.log"
    old.write_text(request_line("before"))
    logs = PodLogs(tmp_path)
    try:
        with old.open("a") as file:
            file.write(request_line("a") + request_line("b")[:30])
            file.flush()
            assert [line["request_id"] for _, line in logs.lines("default")] == ["a"]
            file.write(request_line("b")[30:])
        old.rename(old.with_name("0.log.rotated"))
        old.write_text(request_line("c"))
        new = folder("new") / "0.log"
        new.write_text("")
        logs.lines("default")
        with new.open("a") as file:
            new.unlink()
            new.parent.rmdir()
            file.write(request_line("d"))
        found = [(pod, line["request_id"]) for pod, line in logs.lines("default")]
    finally:
        logs.close()

    assert sorted(found) == [("new", "d"), ("old", "a"), ("old", "b"), ("old", "c")]
