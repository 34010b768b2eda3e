"""The fault matrix counts what clients saw: wrong texts, silent cuts, first attempts, and what retries have hidden."""

import asyncio
import contextlib
import json
from types import SimpleNamespace

import pytest
from aiohttp import web
from rich.console import Console

from e2e.chaos import hostile, neighbours
from e2e.chaos.__main__ import main
from e2e.chaos.client import CutSilently, Load, Lost, learn_references, read_text
from e2e.chaos.faults import FAULTS, SAMPLE, Fault
from e2e.chaos.matrix import Row, run_fault, run_matrix, sentence, table, wait_steady
from e2e.chaos.stage import Stage
from e2e.slipway import NotInTimeError

QUESTION = ("fixed", "Tell me a story.", 16)
FINISH = {"choices": [{"delta": {}, "finish_reason": "length"}]}


def event(body):
    return f"data: {json.dumps(body)}\n\n".encode()


def words(*texts):
    return b"".join(event({"choices": [{"delta": {"content": text}}]}) for text in texts)


COMPLETE = words("a ", "fox") + event(FINISH) + b"data: [DONE]\n\n"


class Server:
    """Answers each request with the next of `answers`, and the last one for ever."""

    def __init__(self, *answers):
        self.answers, self.asked = list(answers), 0

    async def handle(self, request):
        self.asked += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, int):
            return web.json_response({}, status=answer, headers={"retry-after-ms": "10"})
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(answer.removesuffix(b"<broken>"))
        if answer.endswith(b"<broken>"):
            request.transport.abort()
        return response


@contextlib.asynccontextmanager
async def serving(*answers):
    app, server = web.Application(), Server(*answers)
    app.router.add_post("/v1/chat/completions", server.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.port = runner.addresses[0][1]
    server.url = f"http://127.0.0.1:{server.port}/v1"
    try:
        yield server
    finally:
        await runner.cleanup()


async def counts_of(*answers, text="a fox", sent=2):
    """What one user counts, who asks until `sent` requests have begun."""
    async with serving(*answers) as server:
        load = Load(server.url, {QUESTION: text}, users=1, seed=0)
        while load.counts.sent < sent:  # noqa: ASYNC110  the load has a thread of its own
            await asyncio.sleep(0.01)
        return await asyncio.to_thread(load.stop)


def test_a_complete_stream_is_its_text():
    assert read_text(b": a comment\n\n" + COMPLETE) == "a fox"


@pytest.mark.parametrize("body", [b"", words("a "), words("a ") + b"data: [DONE]\n\n", words("a ") + event(FINISH)])
def test_a_stream_without_its_end_is_cut_silently(body):
    with pytest.raises(CutSilently):
        read_text(body)


def test_an_error_event_is_a_visible_failure():
    with pytest.raises(Lost, match="error event: BadGateway"):
        read_text(words("a ") + event({"error": {"type": "BadGateway"}}))


async def test_finished_streams_are_counted():
    counts = await counts_of(COMPLETE)

    assert (counts.finished, counts.failed, counts.failed_first, counts.wrong, counts.cut) == (counts.sent, 0, 0, 0, 0)


async def test_another_text_is_wrong():
    counts = await counts_of(COMPLETE, text="a bear")

    assert (counts.finished, counts.wrong) == (0, counts.sent)


async def test_a_silent_cut_is_counted():
    counts = await counts_of(words("a "), COMPLETE)

    assert (counts.cut, counts.failed, counts.finished) == (1, 0, counts.sent - 1)


async def test_a_retry_hides_a_failure_from_the_user_and_not_from_the_counts():
    counts = await counts_of(503, 429, COMPLETE)

    assert (counts.failed_first, counts.failed, counts.finished) == (1, 0, counts.sent)
    assert counts.reasons == {"status 503": 1, "status 429": 1}


@pytest.mark.parametrize(("answer", "reason"), [(404, "status 404"), (words("a ") + b"<broken>", "in the stream")])
async def test_what_the_stock_client_does_not_retry_is_lost(answer, reason):
    counts = await counts_of(answer, COMPLETE)

    assert (counts.failed_first, counts.failed, counts.finished) == (1, 1, counts.sent - 1)
    assert any(told.startswith(reason) for told in counts.reasons)


async def test_references_that_differ_are_refused():
    async with serving(COMPLETE, words("a bear") + event(FINISH) + b"data: [DONE]\n\n") as server:
        with pytest.raises(AssertionError, match="differ"):
            await learn_references(server.url, ["fixed"])


def test_a_row_fails_the_matrix_for_what_a_client_cannot_see_and_for_what_a_retry_does_not_hide():
    good, wrong, cut, double = Row("a"), Row("b"), Row("c"), Row("d", violations=["double slot x-0"])
    good.counts.failed_first = 3
    wrong.counts.wrong = cut.counts.cut = 1

    assert [row.is_bad for row in (good, wrong, cut, double, Row("e", error="not in time"))] == [False] + [True] * 4
    assert "3 failed first attempts" in sentence(good)


@pytest.mark.capability("RD-12", "RD-9")
@pytest.mark.parametrize(("failed", "seconds", "message"), [(1, 1.0, "1 requests lost"), (0, 15.1, "after 15.1 s")])
def test_a_lost_request_and_a_late_first_byte_fail_the_rows_whose_fault_excuses_neither(failed, seconds, message):
    row = Row("a")
    row.counts.failed, row.counts.first_byte_seconds = failed, seconds

    assert row.is_bad
    assert message in sentence(row)
    row.may_lose = row.may_wait = True
    assert not row.is_bad


@pytest.mark.capability("RD-12")
def test_only_faults_of_gateways_their_nodes_or_all_replicas_may_lose_a_request():
    allowed = {"gateway", "gateways", "node", "all"}

    assert all(allowed & set(fault.name.replace(",", "").split()) for fault in FAULTS if fault.may_lose)
    assert {fault.name for fault in FAULTS if fault.may_wait} < {fault.name for fault in FAULTS if fault.may_lose}


@pytest.mark.capability("RD-12")
def test_a_calm_tenant_that_waits_longer_or_fails_beside_a_hostile_one_makes_the_row_bad(monkeypatch):
    @contextlib.contextmanager
    def hostile_tenant(port, model, key):
        yield {"quota 429": 7}

    stage = Stage(None, SimpleNamespace(access=SimpleNamespace(port=lambda name: 0)))
    monkeypatch.setattr(hostile, "hostile_tenant", hostile_tenant)
    for windows, complaint in (
        ([(0, 0.2), (0, 0.5)], ""),
        ([(0, 0.2), (1, 0.2)], "lost 1 first attempts"),
        ([(0, 0.2), (0, 9.0)], "p99 is 9.00 s"),
    ):
        left = iter(windows)
        monkeypatch.setattr(neighbours, "measure", lambda counts, left=left: next(left))
        with pytest.raises(AssertionError, match=complaint) if complaint else contextlib.nullcontext():
            neighbours.be_hostile(stage)
    assert "'quota 429': 7" in stage.notes[0]


async def test_the_table_names_the_failures_of_first_attempts_of_retries_and_of_broken_streams():
    row = Row("replica killed", await counts_of(503, words("a ") + event({"error": {"type": "BadGateway"}}), COMPLETE))
    console = Console(width=300)
    with console.capture() as printed:
        console.print(table([row]))

    assert (row.counts.failed_first, row.counts.failed) == (1, 1), "its retry ended with an error event"
    assert "1 × status 503; 1 × error event: BadGateway" in printed.get()


def test_a_load_that_does_not_run_is_told(monkeypatch):
    monkeypatch.setattr("e2e.chaos.matrix.WARM_SECONDS", 0.0)
    with pytest.raises(AssertionError, match="does not run"):
        wait_steady(Row("a").counts)


def test_there_are_at_least_28_faults_each_with_a_name_of_its_own():
    names = [fault.name for fault in FAULTS]

    assert len(names) == len(set(names)) >= 28
    assert set(SAMPLE) < set(names)


def test_every_fault_of_a_node_or_its_kubelet_is_prepared_as_one():
    of_nodes = {fault.name for fault in FAULTS if "node" in fault.name or "kubelet" in fault.name}

    assert {fault.name for fault in FAULTS if fault.on_node} == of_nodes
    assert len(of_nodes) == 8


async def test_connections_that_the_server_closes_are_seen():
    async with serving(404) as server:

        def misbehave():
            with hostile.connections(server.port, 2, b"nonsense\r\n\r\n") as refused:
                closed = hostile.wait_closed(refused, timeout=30)
            with hostile.header_dribblers(server.port, 2) as patient:
                return closed, hostile.count_open(patient)

        assert await asyncio.to_thread(misbehave) == (0, 2)


class FlickeringStage(Stage):
    """Looks settled for one look, then is not, then is."""

    def __init__(self, looks):
        self.looks, self.seen = list(looks), 0

    def _is_settled(self):
        self.seen += 1
        return self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]


def test_a_service_that_looks_settled_for_a_moment_has_not_recovered(monkeypatch):
    monkeypatch.setattr("e2e.chaos.stage.STEADY_SECONDS", 0.3)
    stage = FlickeringStage([True, False, True])

    assert stage.wait_settled(timeout=30) > 0
    assert stage.seen > 3


def test_a_service_that_never_settles_is_told_in_time():
    with pytest.raises(NotInTimeError, match="settled"):
        FlickeringStage([False]).wait_settled(timeout=0.1)


async def test_a_fault_that_cannot_be_injected_is_a_bad_row_and_ends_no_other(monkeypatch):
    mended = []
    monkeypatch.setattr("e2e.checks.mend", lambda cluster, slipway: mended.append(True))

    class Broken(FlickeringStage):
        cluster = None

        def violations(self):
            return ["orphan pod-1"]

        def prepare(self):
            self.prepared = True

    def refuse(stage):
        raise RuntimeError("no such pod\nand more")

    async with serving(COMPLETE) as server:
        stage = Broken([True])
        stage.slipway = SimpleNamespace(base_url=server.url)
        row = await asyncio.to_thread(run_fault, stage, Fault("refused", refuse), {QUESTION: "a fox"}, 0)

    assert (row.error, row.violations, row.is_bad) == ("RuntimeError: no such pod", ["orphan pod-1"], True)
    assert (mended, stage.prepared) == ([True], True)
    assert row.counts.finished == row.counts.sent >= 8


class LopsidedStage(Stage):
    """All pods are on node-a; a deleted one comes back on a node that is not tainted."""

    def __init__(self):
        self.cluster = SimpleNamespace(nodes=("node-a", "node-b"))
        self.where = {"fixed": ("fixed-0", "fixed-1"), "gateway": ("gateway-0", "gateway-1"), "operator": ("op-0",)}
        self.nodes = {pod: "node-a" for pods in self.where.values() for pod in pods} | {"op-0": "node-b"}
        self.tainted, self.asked = set(), []

    def kubectl(self, *arguments):
        self.asked.append(" ".join(arguments))
        if arguments[0] == "taint":
            (self.tainted.discard if arguments[-1].endswith("-") else self.tainted.add)(arguments[2])
        else:
            self.nodes[arguments[-1]] = next(node for node in self.cluster.nodes if node not in self.tainted)

    def _nodes_of_pods(self):
        return {name: {pod: self.nodes[pod] for pod in pods} for name, pods in self.where.items()}

    def wait_settled(self, timeout=0.0):
        assert not self.tainted
        return 0.0


def test_before_a_fault_of_a_node_every_node_has_a_pod_of_each():
    stage = LopsidedStage()
    stage.where["operator"] = ("op-0", "op-1")
    stage.nodes["op-1"] = "node-b"

    stage.spread()

    assert all(set(pods.values()) == {"node-a", "node-b"} for pods in stage._nodes_of_pods().values())
    assert stage.tainted == set()
    assert [line for line in stage.asked if "cordon" in line] == [], "the operator empties a cordoned node"
    asked = len(stage.asked)
    stage.spread()
    assert len(stage.asked) == asked, "nothing is moved twice"


def test_a_fault_of_a_node_that_cannot_be_prepared_is_a_bad_row():
    class Refusing(Stage):
        def __init__(self):
            pass

        def spread(self):
            raise NotInTimeError("node-b has one pod of each")

    row = run_fault(Refusing(), Fault("node lost", lambda stage: None, on_node=True), {}, 0)

    assert row.is_bad
    assert row.error == "nothing was injected: NotInTimeError: node-b has one pod of each"


def test_faults_that_do_not_fit_into_the_time_are_bad_rows():
    rows = list(run_matrix(FlickeringStage([True]), FAULTS[:2], {}, until=0.0))

    assert [(row.fault, row.is_bad) for row in rows] == [(fault.name, True) for fault in FAULTS[:2]]


def test_an_interrupted_matrix_prints_what_it_has_and_fails(monkeypatch, capsys):
    def interrupted(faults, until):
        yield Row(faults[0].name)
        raise KeyboardInterrupt

    monkeypatch.setattr("e2e.chaos.__main__.run_on_new_cluster", interrupted)
    monkeypatch.setattr("e2e.cluster.preflight.require", lambda: None)
    monkeypatch.setattr("e2e.cluster.build.ensure", lambda: None)

    assert main(["--only", "etcd"]) == 1

    printed = capsys.readouterr().out
    assert "etcd away 20 s" in printed
    assert "interrupted" in printed
