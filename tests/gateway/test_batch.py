"""The batch API with the stock client: results, errors, restarts, tenants, bounds, and room for others."""

import asyncio
import json
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
import yaml
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from slipway_gateway.batch.api import check_input
from slipway_gateway.batch.limits import BatchLimits
from slipway_gateway.batch.store import BatchStore, finished_lines
from slipway_gateway.fleet import Fleet
from slipway_gateway.gateway import Gateway
from slipway_gateway.picker.endpoints import Endpoint, Service
from slipway_gateway.settings import GatewaySettings
from slipway_gateway.tenants import digest_of
from tests.gateway.doubles import MODEL, Runtime, a_caller, answer_whole, be_full, hang_up, until
from tests.gateway.test_tenancy import KEY as TENANT_KEY
from tests.gateway.test_tenancy import write_tenants

CHAT = "/v1/chat/completions"
KEY = f"team/{MODEL}"
RUNNING = ("validating", "in_progress", "cancelling")


def line(id: str, **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"question {id}"}]
    return {"custom_id": id, "method": "POST", "url": CHAT, "body": {"model": MODEL, "messages": messages} | body}


def jsonl(*lines: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in lines)


@asynccontextmanager
async def serving(directory: Path, runtime: Runtime, *, slots: int = 64, **settings: Any):
    fleet = Fleet()
    fleet.set_service(KEY, Service(KEY, MODEL, max_num_seqs=slots))
    fleet.set_endpoint("p0", Endpoint("p0", KEY, "r1", runtime.url))
    options = {"host": "127.0.0.1", "port": 0, "admin_port": 0, "batch_directory": directory} | settings
    async with Gateway(GatewaySettings(**options), fleet) as gateway:
        yield gateway


def a_client(gateway: Gateway, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{gateway.port}/v1", api_key=key, max_retries=0)


async def submit(client: openai.AsyncOpenAI, *lines: dict[str, Any]) -> Any:
    file = await client.files.create(file=("in.jsonl", jsonl(*lines)), purpose="batch")
    return await client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")


async def ended(client: openai.AsyncOpenAI, batch: Any) -> Any:
    while (now := await client.batches.retrieve(batch.id)).status in RUNNING:  # noqa: ASYNC110  as users do
        await asyncio.sleep(0.05)
    return now


async def results(client: openai.AsyncOpenAI, id: str) -> dict[str, Any]:
    lines = [json.loads(one) for one in (await client.files.content(id)).text.splitlines()]
    assert len({one["custom_id"] for one in lines}) == len(lines), "one answer for each request"
    return {one["custom_id"]: one["response"] for one in lines}


@pytest.mark.capability("API-13", "API-1")
async def test_the_stock_client_gets_an_answer_for_each_request_and_errors_apart(tmp_path):
    async def refuse_some(runtime: Runtime, request: web.Request) -> web.StreamResponse:
        if runtime.bodies[-1].get("temperature") == 9:
            return web.json_response({"error": {"message": "too hot"}}, status=400)
        return await answer_whole(runtime, request)

    async with Runtime(refuse_some) as runtime, serving(tmp_path, runtime) as gateway:
        client = a_client(gateway)
        batch = await submit(client, *(line(f"q{n}") for n in range(20)), line("hot", temperature=9))
        done = await ended(client, batch)
        answers, errors = await results(client, done.output_file_id), await results(client, done.error_file_id)
        priorities = {int(headers["x-slipway-priority"]) for headers in runtime.headers}

        assert (done.status, done.request_counts.completed, done.request_counts.failed) == ("completed", 20, 1)
        assert set(answers) == {f"q{n}" for n in range(20)}
        assert answers["q0"]["body"]["choices"][0]["message"]["content"] == "Once upon a time."
        assert (errors["hot"]["status_code"], errors["hot"]["body"]["error"]["message"]) == (400, "too hot")
        assert priorities == {-100}, "below everything that somebody waits for"
        assert [one.id for one in (await client.batches.list()).data] == [batch.id]
        assert {one.purpose for one in (await client.files.list()).data} == {"batch", "batch_output"}
        assert (await client.files.delete(done.output_file_id)).deleted


@pytest.mark.capability("API-13")
async def test_after_a_restart_only_what_has_no_answer_is_asked_again(tmp_path):
    async with Runtime(answer_whole) as runtime:
        runtime.hold()
        async with serving(tmp_path, runtime, batch_concurrency=2) as gateway:
            client = a_client(gateway)
            batch = await submit(client, *(line(f"q{n}") for n in range(8)))
            runtime.allow(3)
            await until(lambda: sum(p.read_bytes().count(b"\n") for p in tmp_path.glob("*/files/*.jsonl")) >= 8 + 3)
            await until(lambda: runtime.requests == 5)  # three answered, two on their way
        [output] = [p for p in tmp_path.glob("*/files/*.jsonl") if b"response" in p.read_bytes()]
        before = {one["custom_id"] for one in finished_lines(output)}
        with output.open("ab") as file:
            file.write(b'{"custom_id": "q7", "resp')  # the process was killed within a line
        asked = runtime.requests
        runtime.allow(1000)
        async with serving(tmp_path, runtime) as gateway:
            client = a_client(gateway)
            done = await ended(client, batch)
            answers = await results(client, done.output_file_id)

    assert len(before) == 3
    assert runtime.requests - asked == 5, "not those that were answered"
    assert (done.status, len(answers), done.request_counts.completed) == ("completed", 8, 8)


@pytest.mark.capability("API-13")
async def test_two_gateways_on_one_volume_never_run_a_batch_twice(tmp_path):
    async with Runtime(answer_whole) as runtime:
        runtime.hold()
        async with serving(tmp_path, runtime) as one, serving(tmp_path, runtime) as other:
            batch = await submit(a_client(one), *(line(f"q{n}") for n in range(6)))
            await until(lambda: runtime.requests == 6)
            other.batches.wake()
            await asyncio.sleep(0.3)
            runtime.allow(1000)
            done = await ended(a_client(other), batch)
            assert len(await results(a_client(other), done.output_file_id)) == 6, "each gateway shows every result"
    assert runtime.requests == 6


@pytest.mark.capability("API-13")
async def test_a_batch_fills_only_the_slots_that_interactive_requests_leave_free(tmp_path):
    async with Runtime() as runtime:
        runtime.hold()
        async with serving(tmp_path, runtime, slots=3) as gateway, a_caller(gateway) as caller:
            asking = [asyncio.create_task(caller.chat(stream=True, user="me").__aenter__()) for _ in range(2)]
            await until(lambda: runtime.requests == 2)
            batch = await submit(a_client(gateway), *(line(f"q{n}") for n in range(5)))
            await until(lambda: runtime.requests == 3)
            await asyncio.sleep(0.5)
            assert runtime.requests == 3, "two of three slots are taken: one request of the batch at a time"

            endpoint = gateway.fleet.table.endpoint("p0")
            gateway.fleet.record_load(endpoint, "TEXT named_metrics.num_requests_waiting=9")
            runtime.allow(1)  # the batch's request is answered; those of other gateways wait
            await asyncio.sleep(0.5)
            assert runtime.requests <= 3
            gateway.fleet.record_load(endpoint, "TEXT named_metrics.num_requests_waiting=0")
            runtime.allow(10_000)
            for response in await asyncio.gather(*asking):
                assert (await response.read()).endswith(b"[DONE]\n\n")
            assert (await ended(a_client(gateway), batch)).request_counts.completed == 5


@pytest.mark.capability("API-13")
async def test_a_full_runtime_only_delays_a_batch(tmp_path):
    async def full_at_first(runtime: Runtime, request: web.Request) -> web.StreamResponse:
        if runtime.requests > 3:
            return await answer_whole(runtime, request)
        response = await be_full(runtime, request)
        response.headers["Retry-After"] = response.headers["retry-after-ms"] = "0"
        return response

    async with Runtime(full_at_first) as runtime, serving(tmp_path, runtime) as gateway:
        done = await ended(a_client(gateway), await submit(a_client(gateway), line("only")))
    assert (done.status, done.request_counts.completed, done.request_counts.failed) == ("completed", 1, 0)


@pytest.mark.capability("API-13")
async def test_a_cancelled_batch_ends_and_keeps_the_answers_that_it_has(tmp_path):
    async with Runtime(answer_whole) as runtime:
        runtime.hold()
        async with serving(tmp_path, runtime, batch_concurrency=1) as gateway:
            client = a_client(gateway)
            batch = await submit(client, *(line(f"q{n}") for n in range(4)))
            runtime.allow(1)
            await until(lambda: runtime.requests == 2)
            assert (await client.batches.cancel(batch.id)).status == "cancelling"
            done = await ended(client, batch)
            assert done.status == "cancelled"
            assert set(await results(client, done.output_file_id)) == {"q0"}
            await runtime.cancelled.wait()


@pytest.mark.capability("API-13", "SE-1", "MT-1")
async def test_a_tenant_has_its_own_files_and_its_limits_hold_for_batches(tmp_path):
    (tmp_path / "keys").mkdir()
    tenants = [{"name": name, "keys": [name], "models": [model]} for name, model in (("fox", MODEL), ("hen", "other"))]
    for tenant in tenants:
        (tmp_path / "keys" / str(tenant["name"])).write_text(digest_of(f"sk-{tenant['name']}"))
    (tmp_path / "tenants.yaml").write_text(yaml.safe_dump({"tenants": tenants}))
    settings = {"tenants_file": tmp_path / "tenants.yaml", "keys_directory": tmp_path / "keys"}
    async with Runtime(answer_whole) as runtime, serving(tmp_path / "batches", runtime, **settings) as gateway:
        fox, hen = a_client(gateway, "sk-fox"), a_client(gateway, "sk-hen")
        batch = await ended(fox, await submit(fox, line("q0")))
        for read in (
            hen.batches.retrieve(batch.id),
            hen.files.retrieve(batch.output_file_id),
            hen.files.content(batch.output_file_id),
            hen.files.delete(batch.input_file_id),
            hen.batches.cancel(batch.id),
        ):
            with pytest.raises(openai.NotFoundError):
                await read
        with pytest.raises(openai.AuthenticationError):
            await a_client(gateway, "sk-nobody").files.list()
        assert (await hen.batches.list()).data == []
        refused = await ended(hen, await submit(hen, line("q0")))
        errors = await results(hen, refused.error_file_id)

    assert batch.request_counts.completed == 1
    assert runtime.headers[0]["x-slipway-tenant"] == "fox"
    assert errors["q0"]["status_code"] == 404, "a model that the tenant may not use does not exist in a batch either"


@pytest.mark.capability("API-13", "BS-4")
async def test_what_a_tenant_may_keep_is_bounded(tmp_path):
    limits = {"batch_max_file_bytes": 2000, "batch_max_tenant_bytes": 3000, "batch_max_requests": 3}
    async with Runtime(answer_whole) as runtime, serving(tmp_path, runtime, **limits) as gateway:
        client = a_client(gateway)
        for size, fits in ((1900, True), (2100, False), (1200, False), (900, True)):
            uploading = client.files.create(file=("a.jsonl", b"x" * size), purpose="batch")
            if fits:
                await uploading
            else:
                with pytest.raises(openai.APIStatusError) as refused:
                    await uploading
                assert refused.value.status_code == 413
        files = (await client.files.list()).data
        for file in files:
            await client.files.delete(file.id)
        many = await submit(client, *(line(f"q{n}") for n in range(4)))
    assert sorted(file.bytes for file in files) == [900, 1900], "nothing is left of what was refused"
    assert (many.status, many.errors.data[-1].message) == ("failed", "more than 3 requests")


@pytest.mark.capability("API-13")
@pytest.mark.parametrize("path", ["/v1/files/../../etc/passwd", "/v1/files/file-x", "/v1/batches/batch_%2e%2e"])
async def test_ids_that_we_did_not_give_name_nothing(tmp_path, path):
    async with Runtime() as runtime, serving(tmp_path, runtime) as gateway, aiohttp.ClientSession() as session:
        response = await session.get(f"http://127.0.0.1:{gateway.port}{path}")
        assert response.status == 404


async def test_without_a_directory_there_is_no_batch_api(tmp_path):
    async with Runtime() as runtime, serving(tmp_path, runtime, batch_directory=None) as gateway:
        with pytest.raises(openai.NotFoundError):
            await a_client(gateway).files.list()


@pytest.mark.capability("API-13")
@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (b"", "no requests"),
        (b"nonsense\n", "not JSON"),
        (jsonl(line("a"), line("a")), "same `custom_id`"),
        (jsonl(line("a") | {"url": "/v1/embeddings"}), "`url`"),
        (jsonl(line("a", stream=True)), "not streamed"),
        (jsonl(line("a") | {"body": []}), "`body`"),
        (jsonl(line("")), "`custom_id`"),
    ],
)
def test_an_input_file_that_cannot_be_run_says_where_and_why(tmp_path, lines, message):
    (tmp_path / "in").write_bytes(jsonl(line("first")) * bool(lines) + lines)
    _, faults = check_input(tmp_path / "in", CHAT, 100)

    assert message in faults[0]["message"]
    assert faults[0]["line"] in (None, 2, 3)


@pytest.mark.capability("API-13")
@given(st.lists(st.text(max_size=8), max_size=6), st.integers(0, 200))
def test_wherever_the_results_were_torn_every_whole_line_is_kept(tmp_path_factory, texts, cut):
    whole = b"".join(json.dumps({"custom_id": text}).encode() + b"\n" for text in texts)
    path = tmp_path_factory.mktemp("results") / "out.jsonl"
    path.write_bytes(whole[:cut])
    kept = [one["custom_id"] for one in finished_lines(path)]

    assert kept == texts[: len(kept)]
    assert path.read_bytes() == b"".join(json.dumps({"custom_id": text}).encode() + b"\n" for text in kept)
    assert len(kept) == whole[:cut].count(b"\n")


def test_a_batch_is_locked_by_one_process_at_a_time(tmp_path):
    folder = BatchStore(tmp_path).folder("fox")
    folder.save_batch({"id": "batch_" + "0" * 24})
    assert folder.lock("batch_" + "0" * 24) is not None
    assert folder.lock("batch_" + "0" * 24) is None


@pytest.mark.capability("API-13", "RD-3")
async def test_a_line_that_crashes_replicas_is_an_error_of_that_line_after_two(tmp_path):
    """review/control-plane.md 7: it was asked again, two replicas a second, for 24 hours."""

    async def crash_on_poison(runtime: Runtime, request: web.Request) -> web.StreamResponse:
        is_poison = runtime.bodies[-1].get("seed") == 666
        return await (hang_up if is_poison else answer_whole)(runtime, request)

    async with Runtime(crash_on_poison) as runtime, serving(tmp_path, runtime) as gateway:
        client = a_client(gateway)
        done = await ended(client, await submit(client, line("good"), line("poison", seed=666)))
        errors = await results(client, done.error_file_id)
        poisoned = sum(body.get("seed") == 666 for body in runtime.bodies)

    assert (done.status, done.request_counts.completed, done.request_counts.failed) == ("completed", 1, 1)
    assert errors["poison"]["status_code"] == 502
    assert poisoned <= 3, "two suspected crashes, of which one may have been an idle connection"


@pytest.mark.capability("API-13")
async def test_an_answer_that_takes_too_long_is_an_error_of_its_line_and_not_computed_again(tmp_path):
    """review/control-plane.md 7"""
    async with Runtime().hold() as runtime, serving(tmp_path, runtime, request_seconds=0.3) as gateway:
        client = a_client(gateway)
        done = await ended(client, await submit(client, line("long")))
        errors = await results(client, done.error_file_id)

    assert errors["long"]["status_code"] == 504
    assert runtime.requests == 1


@pytest.mark.capability("API-13")
async def test_an_answer_that_is_not_json_is_an_error_of_its_line(tmp_path):
    async def mumble(runtime: Runtime, request: web.Request) -> web.StreamResponse:
        return web.Response(text="mumble")

    async with Runtime(mumble) as runtime, serving(tmp_path, runtime) as gateway:
        client = a_client(gateway)
        done = await ended(client, await submit(client, line("one")))
        errors = await results(client, done.error_file_id)

    assert done.request_counts.failed == 1
    assert errors["one"]["body"]["error"]["message"] == "The answer is not JSON."


@pytest.mark.capability("API-13", "BS-4", "SE-9")
async def test_what_a_tenant_may_keep_holds_for_uploads_at_the_same_time(tmp_path):
    """review/control-plane.md 12: 20 uploads of 1 MiB at once, within a limit of 2 MiB, were all accepted."""
    size = 20_000
    limits = {"batch_max_tenant_bytes": 3 * size, "batch_max_file_bytes": size}
    async with Runtime() as runtime, serving(tmp_path, runtime, **limits) as gateway:
        client = a_client(gateway)
        uploads = [client.files.create(file=("a.jsonl", b"x" * size), purpose="batch") for _ in range(12)]
        answers = await asyncio.gather(*uploads, return_exceptions=True)
        kept = [one for one in answers if not isinstance(one, Exception)]

    assert 1 <= len(kept) <= 3
    assert {one.status_code for one in answers if isinstance(one, openai.APIStatusError)} == {413}
    on_disk = [path.stat().st_size for path in tmp_path.glob("*/files/*.jsonl")]
    assert on_disk == [size] * len(kept), "nothing is left of what was refused"


@pytest.mark.capability("API-13", "SE-9")
async def test_the_number_of_files_is_bounded_and_their_calls_too(tmp_path, monkeypatch):
    """review/control-plane.md 12"""
    monkeypatch.setattr(GatewaySettings, "batch_limits", BatchLimits(files=3, calls=2))
    async with Runtime() as runtime, serving(tmp_path, runtime) as gateway:
        client = a_client(gateway)
        for _ in range(3):
            await client.files.create(file=("a.jsonl", b""), purpose="batch")
        with pytest.raises(openai.BadRequestError, match="has 3 files; the limit is 3"):
            await client.files.create(file=("a.jsonl", b""), purpose="batch")
        answers = await asyncio.gather(*(client.files.list() for _ in range(20)), return_exceptions=True)
        assert any(isinstance(one, openai.RateLimitError) for one in answers)
        assert len((await client.files.list()).data) == 3


@pytest.mark.capability("API-13", "SE-9")
async def test_the_limit_of_open_batches_holds_for_batches_at_the_same_time(tmp_path, monkeypatch):
    """review/control-plane.md 12"""
    monkeypatch.setattr(GatewaySettings, "batch_limits", BatchLimits(open_batches=2))
    async with Runtime().hold() as runtime, serving(tmp_path, runtime) as gateway:
        client = a_client(gateway)
        file = await client.files.create(file=("in.jsonl", jsonl(line("q"))), purpose="batch")
        made = [client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h") for _ in range(8)]
        answers = await asyncio.gather(*made, return_exceptions=True)

    assert sum(not isinstance(one, Exception) for one in answers) == 2


@pytest.mark.capability("API-13", "MT-1")
async def test_the_requests_a_minute_of_a_tenant_hold_for_files_and_batches(tmp_path):
    """review/control-plane.md 12"""
    files = write_tenants(tmp_path, requestsPerMinute=3)
    async with Runtime() as runtime, serving(tmp_path / "batches", runtime, **files) as gateway:
        client = a_client(gateway, TENANT_KEY)
        for _ in range(3):
            await client.files.list()
        with pytest.raises(openai.RateLimitError, match="the limit is 3 requests a minute"):
            await client.batches.list()


@pytest.mark.capability("API-13")
async def test_lists_are_read_page_by_page_as_the_stock_client_does(tmp_path):
    """review/control-plane.md 12: `limit` and `after` were ignored."""
    async with Runtime() as runtime, serving(tmp_path, runtime) as gateway:
        client = a_client(gateway)
        made = {(await client.files.create(file=("a.jsonl", b""), purpose="batch")).id for _ in range(5)}
        first = await client.files.list(limit=2)
        found = [one.id async for one in client.files.list(limit=2)]
        with pytest.raises(openai.BadRequestError, match="`limit` must be a number from 1 to 1000"):
            await client.files.list(limit=0)
        with pytest.raises(openai.BadRequestError, match="`after` names nothing"):
            await client.files.list(after="file-nothing")

    assert len(first.data) == 2
    assert (len(found), set(found)) == (5, made)


def test_ended_batches_are_read_once_and_forgotten_after_a_time(tmp_path):
    """review/control-plane.md 12: all records of all tenants were read every two seconds."""
    store = BatchStore(tmp_path)
    folder = store.folder("fox")
    for number in range(10):
        ended = number < 9
        folder.save_batch(
            {"id": f"batch_{number:024x}", "status": "completed" if ended else "in_progress", "created_at": number}
            | ({"completed_at": number} if ended else {})
        )
    for _ in range(5):
        assert store.unfinished() == [("fox", f"batch_{9:024x}")]
    assert store.records_read == 10 + 4

    assert folder.forget_ended(before=3, most=4) == 5
    assert [record["created_at"] for record in folder.batches()] == [9, 8, 7, 6, 5]
