"""`/v1/files` and `/v1/batches`, as OpenAI's clients use them. A tenant sees its own files and batches only."""

import asyncio
import json
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from aiohttp import BodyPartReader, web

from slipway_api.words import count
from slipway_gateway.batch.limits import BatchLimits
from slipway_gateway.batch.room import Rooms, Upload
from slipway_gateway.batch.store import ENDED, BatchStore, Folder, Record, new_id
from slipway_gateway.batch.worker import BatchWorker
from slipway_gateway.errors import Refusal, bad_request, body_too_slow, calls_full, too_large, unknown_path
from slipway_gateway.front_door import ask_for_body, defer_continue
from slipway_gateway.tenancy import Tenancy

ENDPOINTS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
WINDOW_SECONDS: Final = 24 * 3600
UPLOAD_SECONDS: Final = 600.0
PIECE_BYTES: Final = 1 << 16
FORM_BYTES: Final = 1 << 16  # of a form beside its file
FILES_LISTED: Final = 1_000  # at most, in one list
BATCHES_LISTED: Final = 100
MAX_ERRORS: Final = 20  # of one input file, that are told

Call = Callable[[web.Request, Folder], Awaitable[web.StreamResponse]]


class BatchApi:
    """The handlers."""

    def __init__(self, store: BatchStore, worker: BatchWorker, tenancy: Tenancy, limits: BatchLimits) -> None:
        self._store = store
        self._worker = worker
        self._tenancy = tenancy
        self._limits = limits
        self._rooms = Rooms(limits)
        self._calls: Counter[str] = Counter()  # open ones, by tenant
        self._creating: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by tenant

    def add_routes(self, app: web.Application) -> None:
        """Add the paths to the application for clients."""
        add = partial(app.router.add_route, expect_handler=defer_continue)
        add("POST", "/v1/files", self._with_folder(self._upload))
        add("GET", "/v1/files", self._with_folder(self._list_files))
        add("GET", "/v1/files/{id}", self._with_folder(self._get_file))
        add("DELETE", "/v1/files/{id}", self._with_folder(self._delete_file))
        add("GET", "/v1/files/{id}/content", self._with_folder(self._content))
        add("POST", "/v1/batches", self._with_folder(self._create))
        add("GET", "/v1/batches", self._with_folder(self._list_batches))
        add("GET", "/v1/batches/{id}", self._with_folder(self._get_batch))
        add("POST", "/v1/batches/{id}/cancel", self._with_folder(self._cancel))

    def _with_folder(self, call: Call) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            with self._tenancy.admit_query(request) as caller:
                tenant = caller.tenant.label
                if self._calls[tenant] >= self._limits.calls:
                    raise calls_full(self._calls[tenant], self._limits.calls)
                self._calls[tenant] += 1
                try:
                    await ask_for_body(request)
                    return await call(request, self._store.folder(tenant))
                finally:
                    self._calls[tenant] -= 1
                    if not self._calls[tenant]:
                        del self._calls[tenant]

        return handle

    # --- files ------------------------------------------------------------------------------------------------------

    async def _upload(self, request: web.Request, folder: Folder) -> web.StreamResponse:
        if not request.content_type.startswith("multipart/"):
            raise bad_request("A file is uploaded as multipart/form-data, with `purpose` and `file`.")
        if (request.content_length or 0) > self._limits.file_bytes + FORM_BYTES:
            raise too_large(self._limits.file_bytes)
        tenant = folder.path.name
        record: Record | None = None
        try:
            async with asyncio.timeout(UPLOAD_SECONDS), self._rooms.upload(tenant, folder) as room:
                record = await asyncio.to_thread(folder.create_file, "file", "batch", int(time.time()))
                await _read_form(request, record, folder.content(record["id"]), room)
                if (await asyncio.to_thread(folder.usage))[0] > self._limits.tenant_bytes:
                    raise too_large(self._limits.tenant_bytes)  # another gateway has written to the same volume
                saved = await asyncio.to_thread(folder.save_file, record)
            record = None
            return web.json_response(saved)
        except TimeoutError:
            raise body_too_slow() from None
        except ValueError as error:
            raise bad_request("The multipart body cannot be read.") from error
        finally:
            if record is not None:
                folder.delete_file(record["id"])

    async def _list_files(self, request: web.Request, folder: Folder) -> web.StreamResponse:
        return web.json_response(page(await asyncio.to_thread(folder.files), request.query, FILES_LISTED))

    async def _get_file(self, request: web.Request, folder: Folder) -> web.StreamResponse:
        return web.json_response(await _known(folder.file, request))

    async def _delete_file(self, request: web.Request, folder: Folder) -> web.StreamResponse:
        record = await _known(folder.file, request)
        for batch in await asyncio.to_thread(folder.batches):
            used = (batch["input_file_id"], batch["output_file_id"], batch["error_file_id"])
            if batch["status"] not in ENDED and record["id"] in used:
                raise bad_request(f"The file is used by {batch['id']}, which has not ended.")
        await asyncio.to_thread(folder.delete_file, record["id"])
        return web.json_response({"id": record["id"], "object": "file", "deleted": True})

    async def _content(self, request: web.Request, folder: Folder) -> web.StreamResponse:
        record = await _known(folder.file, request)
        return web.FileResponse(folder.content(record["id"]), headers={"Content-Type": "application/octet-stream"})

    # --- batches ----------------------------------------------------------------------------------------------------

    async def _create(self, request: web.Request, folder: Folder) -> web.StreamResponse:
        asked = await _json(request)
        endpoint, input_file = asked.get("endpoint"), asked.get("input_file_id")
        if endpoint not in ENDPOINTS:
            raise bad_request(f"`endpoint` must be one of {', '.join(ENDPOINTS)}.", param="endpoint")
        if asked.get("completion_window") != "24h":
            raise bad_request("`completion_window` must be 24h.", param="completion_window")
        metadata = asked.get("metadata")
        if metadata is not None and not (isinstance(metadata, dict) and len(json.dumps(metadata)) <= 16384):
            raise bad_request("`metadata` must be a small object.", param="metadata")
        if not isinstance(input_file, str) or await asyncio.to_thread(folder.file, input_file) is None:
            raise bad_request("`input_file_id` names no file.", param="input_file_id")
        async with self._creating[folder.path.name]:  # or two of them would find the same place free
            return await self._create_one(folder, endpoint, input_file, metadata)

    async def _create_one(
        self, folder: Folder, endpoint: str, input_file: str, metadata: dict[str, Any] | None
    ) -> web.StreamResponse:
        still_open = [one for one in await asyncio.to_thread(folder.batches) if one["status"] not in ENDED]
        if len(still_open) >= self._limits.open_batches:
            raise Refusal(429, "RateLimitError", f"{len(still_open)} batches have not ended yet.", retry_after=60)
        total, faults = await asyncio.to_thread(
            check_input, folder.content(input_file), endpoint, self._limits.requests
        )
        now = int(time.time())
        record = {
            "id": new_id("batch_"), "object": "batch", "endpoint": endpoint, "input_file_id": input_file,
            "completion_window": "24h", "status": "failed" if faults else "validating",
            "errors": {"object": "list", "data": faults} if faults else None,
            "output_file_id": None, "error_file_id": None, "created_at": now, "in_progress_at": None,
            "expires_at": now + WINDOW_SECONDS, "finalizing_at": None, "completed_at": None,
            "failed_at": now if faults else None, "expired_at": None, "cancelling_at": None, "cancelled_at": None,
            "request_counts": {"total": total, "completed": 0, "failed": 0}, "metadata": metadata,
        }  # fmt: skip
        await asyncio.to_thread(folder.save_batch, record)
        self._worker.wake()
        return web.json_response(record)

    async def _list_batches(self, request: web.Request, folder: Folder) -> web.StreamResponse:
        return web.json_response(page(await asyncio.to_thread(folder.batches), request.query, BATCHES_LISTED))

    async def _get_batch(self, request: web.Request, folder: Folder) -> web.StreamResponse:
        record = await _known(folder.batch, request)
        return web.json_response(_as_cancelling(folder, record))

    async def _cancel(self, request: web.Request, folder: Folder) -> web.StreamResponse:
        record = await _known(folder.batch, request)
        if record["status"] not in ENDED:
            await asyncio.to_thread(folder.ask_to_cancel, record["id"])
            self._worker.wake()
        return web.json_response(_as_cancelling(folder, record))


def check_input(path: Path, endpoint: str, most: int) -> tuple[int, list[dict[str, Any]]]:
    """How many requests the file has, and what is wrong with its lines."""
    total, faults = 0, list[dict[str, Any]]()
    ids: set[str] = set()
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            total += 1
            fault = _fault_of(line, endpoint, ids) if total <= most else f"more than {count(most, 'request')}"
            if fault:
                faults.append({"code": "invalid_request", "line": number, "message": fault, "param": None})
            if total > most or len(faults) >= MAX_ERRORS:
                break
    if not total:
        faults.append({"code": "empty_file", "line": None, "message": "the file has no requests", "param": None})
    return total, faults


def _fault_of(line: bytes, endpoint: str, ids: set[str]) -> str:
    try:
        request = json.loads(line)
    except (ValueError, RecursionError):
        return "not JSON"
    if not isinstance(request, dict) or not isinstance(id := request.get("custom_id"), str) or not 0 < len(id) <= 512:
        return "`custom_id` must be a text of 1 to 512 characters"
    if id in ids:
        return "another request has the same `custom_id`"
    ids.add(id)
    if request.get("method") != "POST" or request.get("url") != endpoint:
        return f"`method` must be POST and `url` {endpoint}"
    if not isinstance(body := request.get("body"), dict) or not isinstance(body.get("model"), str):
        return "`body` must be an object with a `model`"
    return "answers of a batch are not streamed" if body.get("stream") else ""


def _as_cancelling(folder: Folder, record: Record) -> Record:
    """The record, if it has not ended, as its cancellation leaves it."""
    is_cancelling = record["status"] not in ENDED and folder.is_cancelled(record["id"])
    return record | {"status": "cancelling"} if is_cancelling else record


async def _known(look: Callable[[str], Record | None], request: web.Request) -> Record:
    """The record that the path names; 404 also for those of other tenants."""
    record = await asyncio.to_thread(look, request.match_info["id"])
    if record is None:
        raise unknown_path(request.path)
    return record


async def _json(request: web.Request) -> dict[str, Any]:
    body = await request.content.read(PIECE_BYTES)
    while piece := await request.content.read(PIECE_BYTES):
        body += piece
        if len(body) > PIECE_BYTES:
            raise too_large(PIECE_BYTES)
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise bad_request("The body is not a JSON object.")
    return found


async def _read_form(request: web.Request, record: Record, path: Path, room: Upload) -> None:
    """Write the part `file` of a form to the path, and its name into the record."""
    purpose, has_file = "", False
    async for part in await request.multipart():
        if not isinstance(part, BodyPartReader):
            raise bad_request("A part of the form is a form itself.")
        if part.name == "file" and not has_file:
            has_file = True
            record["filename"] = (part.filename or "file")[:256]
            await _write_part(part, path, room)
        else:
            text = await _read_field(part)
            purpose = text if part.name == "purpose" else purpose
    if not has_file or purpose != "batch":
        raise bad_request("An upload needs a `file`, and `purpose`: batch is the only one here.")


async def _read_field(part: BodyPartReader) -> str:
    text = b""
    while piece := await part.read_chunk(PIECE_BYTES):
        text += piece
        if len(text) > FORM_BYTES:
            raise too_large(FORM_BYTES)
    return text.decode(errors="replace")


async def _write_part(part: BodyPartReader, path: Path, room: Upload) -> None:
    with path.open("wb") as file:
        while piece := await part.read_chunk(PIECE_BYTES):
            room.take(len(piece))
            await asyncio.to_thread(file.write, piece)


def page(records: list[Record], query: Mapping[str, str], most: int) -> dict[str, Any]:
    """One page of a list, the newest first: `limit` records, at most `most`, that follow the id `after`."""
    try:
        limit = int(query.get("limit", most))
    except ValueError:
        limit = 0
    if not 1 <= limit <= most:
        raise bad_request(f"`limit` must be a number from 1 to {most}.", param="limit")
    start = 0
    if after := query.get("after"):
        start = next((at + 1 for at, one in enumerate(records) if one["id"] == after), -1)
        if start < 0:
            raise bad_request("`after` names nothing in this list.", param="after")
    found = records[start : start + limit]
    ends = {"first_id": found[0]["id"], "last_id": found[-1]["id"]} if found else {"first_id": None, "last_id": None}
    return {"object": "list", "data": found, "has_more": start + limit < len(records)} | ends
