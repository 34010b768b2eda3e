"""Runs batches: sends their requests through this gateway's own pipeline, with a low priority, when there is room.

Requests go through a Unix socket of this process to the same handler that clients reach: routing, retries, tenants'
limits, accounting and logs are the same. A batch yields to interactive load in two ways: its requests have a priority
below every tenant's own, and it fills only the slots (`runtime.maxNumSeqs` of each ready replica) that are free.
"""

import asyncio
import json
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any, Final, Self

import aiohttp
import structlog
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy

from slipway_gateway.batch.limits import BatchLimits
from slipway_gateway.batch.store import BatchStore, Folder, Record, finished_lines, new_id
from slipway_gateway.fleet import Fleet
from slipway_gateway.tenancy import ATTEMPT_FAILURES, CALLER, Tenancy
from slipway_gateway.tenants import Caller

log = structlog.get_logger()

NO_HEADERS: Final = CIMultiDictProxy[str](CIMultiDict())
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

PRIORITY_BELOW: Final = 100  # the tenant's own priority, or 0 where that is higher
SAVED_EVERY: Final = 8  # answers, until the counts that the API shows are written
LOOK_SECONDS: Final = 2.0  # between two looks for batches, and for room
ROOM_SECONDS: Final = 0.2  # between two looks for a free slot
SEEN_SECONDS: Final = 0.005  # between two looks whether a request has reached a replica
FORGET_SECONDS: Final = 3600.0  # between two looks for batches to forget
RETRY_SECONDS: Final = 5.0  # where an answer does not say when
MAX_RETRY_SECONDS: Final = 60.0
# A later attempt may better these. Not 504: an answer that is longer than a request may take stays so.
RETRIED: Final = frozenset({429, 502, 503})
MAX_SUSPECTS: Final = 2  # replicas that were lost with one line, over all its attempts: the line may be the cause
MAX_ANSWER_BYTES: Final = 64 << 20
_BATCH: Final = "x-slipway-batch"  # of requests: the batch
_SUSPECTS: Final = "x-slipway-suspects"  # of answers: so many replicas were lost with the request


class BatchWorker:
    """Runs the batches of a store, some requests at a time."""

    def __init__(
        self,
        store: BatchStore,
        fleet: Fleet,
        tenancy: Tenancy,
        handlers: Mapping[str, Handler],
        *,
        concurrency: int,
        limits: BatchLimits | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`handlers` by path; `concurrency`: requests at once, of all batches."""
        self._store = store
        self._fleet = fleet
        self._tenancy = tenancy
        self._handlers = handlers
        self._places = asyncio.Semaphore(concurrency)
        self._concurrency = concurrency
        self._clock = clock
        self._limits = limits or BatchLimits()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._wake = asyncio.Event()
        self._stack = AsyncExitStack()
        self._callers: dict[str, Caller] = {}  # by the id of a running batch
        self._granting: dict[str, asyncio.Lock] = {}  # by service: a slot was granted and is not taken yet
        self._grants: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="slipway-batch-"))
            socket = str(Path(folder) / "socket")
            app = web.Application(client_max_size=1 << 30)
            for path, handler in self._handlers.items():
                app.router.add_post(path, self._as_tenant(handler))
            runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.UnixSite(runner, socket).start()
            connector = aiohttp.UnixConnector(socket, limit=0)
            timeout = aiohttp.ClientTimeout(total=None)
            self._session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector, timeout=timeout))
            looking = asyncio.create_task(self._look(), name="batches")
            self._looking = looking
            stack.push_async_callback(self.stop)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._stack.aclose()

    def wake(self) -> None:
        """A batch was created or cancelled: look now."""
        self._wake.set()

    def _as_tenant(self, handler: Handler) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            request[CALLER] = self._callers[request.headers[_BATCH]]
            response = await handler(request)
            suspects = sum(failure.may_be_the_requests_fault for failure in request.get(ATTEMPT_FAILURES, ()))
            if suspects and not response.prepared:
                response.headers[_SUSPECTS] = str(suspects)
            return response

        return handle

    async def stop(self) -> None:
        """Stop where we are: what has no answer yet is asked again after the next start, or by another gateway."""
        tasks = [self._looking, *self._running.values(), *self._grants]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _look(self) -> None:
        """Run what has not ended, and what another gateway has left behind."""
        forgotten_at = float("-inf")
        while True:
            try:
                if self._clock() - forgotten_at >= FORGET_SECONDS:
                    forgotten_at = self._clock()
                    await asyncio.to_thread(self._forget)
                for tenant, id in await asyncio.to_thread(self._store.unfinished):
                    if id not in self._running:
                        task = asyncio.create_task(self._run_locked(tenant, id), name=id)
                        self._running[id] = task
                        task.add_done_callback(lambda _, id=id: self._running.pop(id, None))  # type: ignore[misc]
            except OSError as error:
                log.error("the batches cannot be read", error=error.strerror)
            self._wake.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._wake.wait()

    def _forget(self) -> None:
        """Forget the batches that ended long ago."""
        for folder in self._store.folders():
            folder.forget_ended(self._clock() - self._limits.kept_seconds, self._limits.kept_batches)

    async def _run_locked(self, tenant: str, id: str) -> None:
        folder = self._store.folder(tenant)
        lock = await asyncio.to_thread(folder.lock, id)
        if lock is None:
            return
        try:
            record = await asyncio.to_thread(folder.batch, id)
            caller = self._tenancy.caller_of(tenant)
            if record is None or caller is None:
                return  # the files of tenants may be unreadable now, or the tenant gone: looked at again later
            lowest = max(-1000, min(caller.tenant.priority, 0) - PRIORITY_BELOW)
            self._callers[id] = Caller(caller.tenant.model_copy(update={"priority": lowest}), f"batch {id}")
            await self._run(folder, record)
        except OSError as error:
            log.error("a batch cannot continue", batch=id, error=error.strerror)
        finally:
            self._callers.pop(id, None)
            os.close(lock)

    async def _run(self, folder: Folder, record: Record) -> None:
        """Answer what has no answer yet, and end the batch."""
        for kind in ("output", "error"):
            if not record[f"{kind}_file_id"]:
                made = await asyncio.to_thread(
                    folder.create_file, f"{record['id']}_{kind}.jsonl", "batch_output", self._now()
                )
                record[f"{kind}_file_id"] = made["id"]
                await asyncio.to_thread(folder.save_file, made)
        output, errors = (folder.content(record[f"{kind}_file_id"]) for kind in ("output", "error"))
        record |= {"status": "in_progress", "in_progress_at": record["in_progress_at"] or self._now()}
        done = await asyncio.to_thread(
            lambda: {one["custom_id"] for path in (output, errors) for one in finished_lines(path)}
        )
        await asyncio.to_thread(self._count, folder, record)
        ended = ""
        places = asyncio.Semaphore(self._concurrency)
        tasks: set[asyncio.Task[None]] = set()
        try:
            with folder.content(record["input_file_id"]).open("rb") as lines:
                for line in lines:
                    if not line.strip():
                        continue
                    request = json.loads(line)
                    if request["custom_id"] in done:
                        continue
                    if ended := await self._next_place(places, folder, record):
                        break
                    task = asyncio.create_task(self._answer(folder, record, request, output, errors))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                    task.add_done_callback(lambda _: places.release())
            while tasks and not ended:
                await asyncio.wait(tasks, timeout=LOOK_SECONDS)
                ended = self._reason_to_end(folder, record)
        finally:
            for task in tuple(tasks):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        ended = ended or "completed"
        record |= {"status": ended, f"{ended}_at": self._now()}
        await asyncio.to_thread(self._count, folder, record)
        log.info("batch ended", batch=record["id"], status=ended, **record["request_counts"])

    async def _next_place(self, places: asyncio.Semaphore, folder: Folder, record: Record) -> str:
        """Wait until one more request of the batch may be asked; or why it ends instead."""
        while not (ended := self._reason_to_end(folder, record)):
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await places.acquire()
                return ""
        return ended

    def _reason_to_end(self, folder: Folder, record: Record) -> str:
        """Why the batch ends before its last request; empty: it goes on."""
        if folder.is_cancelled(record["id"]):
            return "cancelled"
        return "expired" if self._clock() >= record["expires_at"] else ""

    async def _answer(self, folder: Folder, record: Record, request: Record, output: Path, errors: Path) -> None:
        """Ask until there is an answer that no later attempt would better."""
        body = json.dumps(request["body"]).encode()
        headers = {"content-type": "application/json", _BATCH: record["id"]}
        suspects = 0
        while True:
            async with self._places:
                await self._room(str(request["body"].get("model", "")), self._callers[record["id"]])
                try:
                    async with self._session.post(
                        f"http://gateway{record['endpoint']}", data=body, headers=headers
                    ) as response:
                        answer = await _read(response)
                        status, found = response.status, response.headers
                        suspects += int(found.get(_SUSPECTS, 0))
                except aiohttp.ClientError:
                    status, found, answer = 502, NO_HEADERS, _error("The answer broke off.")
                    suspects += 1
            if status not in RETRIED or suspects >= MAX_SUSPECTS:
                break
            await asyncio.sleep(min(_seconds(found.get("Retry-After")), MAX_RETRY_SECONDS))
        status, answer_body = _line_result(status, answer)
        line = {
            "id": new_id("batch_req_"),
            "custom_id": request["custom_id"],
            "response": {"status_code": status, "request_id": found.get("x-request-id", ""), "body": answer_body},
            "error": None,
        }
        await asyncio.to_thread(_append, output if status < 400 else errors, line)
        record["request_counts"]["completed" if status < 400 else "failed"] += 1
        if not record["request_counts"]["completed"] % SAVED_EVERY:
            await asyncio.to_thread(folder.save_batch, record)

    async def _room(self, model: str, caller: Caller) -> None:
        """Wait for a free slot at the replicas that would answer. Where none is ready, one request may wake it."""
        while (route := self._fleet.table.resolve(model, may_use=caller.tenant.may_use)) is not None:
            service = route.service
            slots = len(self._fleet.table.route(service.key).endpoints) * service.max_num_seqs
            taken = self._taken(service.key)
            granting = self._granting.setdefault(service.key, asyncio.Lock())
            if taken < max(1, slots) and not self._fleet.foreign_waiting(service.key) and not granting.locked():
                # The next one is granted when this one is seen at a replica: else all would find the same slot free.
                await granting.acquire()
                self._grants.add(task := asyncio.create_task(self._release(granting, service.key, taken)))
                task.add_done_callback(self._grants.discard)
                return
            await asyncio.sleep(SEEN_SECONDS if granting.locked() else ROOM_SECONDS)

    async def _release(self, granting: asyncio.Lock, service: str, taken: int) -> None:
        try:
            until = asyncio.get_running_loop().time() + ROOM_SECONDS
            # A lease has no event of its own, and this looks a few times for each request of a batch.
            while self._taken(service) <= taken and asyncio.get_running_loop().time() < until:  # noqa: ASYNC110  see above
                await asyncio.sleep(SEEN_SECONDS)
        finally:
            granting.release()

    def _taken(self, service: str) -> int:
        """Slots of the service's replicas that are taken, as far as this gateway knows."""
        if service not in self._fleet.table.services:
            return 0
        return sum(self._fleet.load(one).requests for one in self._fleet.table.route(service).endpoints)

    def _count(self, folder: Folder, record: Record) -> None:
        """Count the answers that are in the results files, and write the record and the files' sizes."""
        for kind, name in (("output", "completed"), ("error", "failed")):
            id = record[f"{kind}_file_id"]
            with folder.content(id).open("rb") as lines:
                record["request_counts"][name] = sum(1 for _ in lines)
            if (made := folder.file(id)) is not None:
                folder.save_file(made)
        folder.save_batch(record)

    def _now(self) -> int:
        return int(self._clock())


async def _read(response: aiohttp.ClientResponse) -> bytes | None:
    """The whole answer; None: it is larger than a line may be."""
    pieces, size = [], 0
    async for piece in response.content.iter_any():
        size += len(piece)
        if size > MAX_ANSWER_BYTES:
            return None
        pieces.append(piece)
    return b"".join(pieces)


def _line_result(status: int, answer: bytes | None) -> tuple[int, Any]:
    """The status and the body of a line's result: an answer that cannot be kept is an error of this line alone."""
    if answer is None:
        return 502, json.loads(_error(f"The answer is larger than {MAX_ANSWER_BYTES >> 20} MiB."))
    try:
        return status, json.loads(answer or b"{}")
    except (ValueError, RecursionError):
        return max(status, 502), json.loads(_error("The answer is not JSON."))


def _error(message: str) -> bytes:
    return json.dumps({"error": {"message": message, "type": "BadGatewayError", "param": None, "code": 502}}).encode()


def _append(path: Path, line: Record) -> None:
    with path.open("ab") as file:
        file.write(json.dumps(line).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _seconds(text: Any) -> float:
    try:
        return max(0.1, float(text))
    except (TypeError, ValueError):
        return RETRY_SECONDS
