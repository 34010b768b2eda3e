"""`/v1/files` and `/v1/batches`, as OpenAI's clients use them. A tenant sees its own files and batches only."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

from aiohttp import BodyPartReader, web

from slipway_gateway.batch.limits import BatchLimits
from slipway_gateway.batch.store import ENDED, BatchStore, Folder, Record, new_id
from slipway_gateway.batch.worker import BatchWorker
from slipway_gateway.errors import Refusal, bad_request, body_too_slow, too_large, unknown_path
from slipway_gateway.front_door import defer_continue
from slipway_gateway.tenancy import Tenancy

ENDPOINTS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
WINDOW_SECONDS: Final = 24 * 3600
UPLOAD_SECONDS: Final = 600.0
PIECE_BYTES: Final = 1 << 16
MAX_ERRORS: Final = 20  # of one input file, that are told

Call = Callable[[web.Request, Folder], Awaitable[web.StreamResponse]]


class BatchApi:
    """The handlers."""

    def __init__(self, store: BatchStore, worker: BatchWorker, tenancy: Tenancy, limits: BatchLimits) -> None:
        self._store = store
        self._worker = worker
        self._tenancy = tenancy
        self._limits = limits

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
            caller = self._tenancy.authenticate(request)
            return await call(request, self._store.folder(caller.tenant.label))

        return handle

    # --- files ------------------------------------------------------------------------------------------------------

    async def _upload(self, request: web.Request, folder: Folder) -> web.StreamResponse:
        if not request.content_type.startswith("multipart/"):
            raise bad_request("A file is uploaded as multipart/form-data, with `purpose` and `file`.")
        room = self._limits.tenant_bytes - await asyncio.to_thread(folder.used_bytes)
        limit = min(self._limits.file_bytes, max(0, room))
        record: Record | None = None
        purpose = ""
        try:
            async with asyncio.timeout(UPLOAD_SECONDS):
                async for part in await request.multipart():
                    if not isinstance(part, BodyPartReader):
                        continue
                    if part.name == "purpose":
                        purpose = (await part.read_chunk(64)).decode(errors="replace")
                    elif part.name == "file" and record is None:
                        name = (part.filename or "file")[:256]
                        record = await asyncio.to_thread(folder.create_file, name, "batch", int(time.time()))
                        await _write_part(part, folder.content(record["id"]), limit)
            if record is None or purpose != "batch":
                raise bad_request("An upload needs a `file`, and `purpose`: batch is the only one here.")
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
        return web.json_response({"object": "list", "data": await asyncio.to_thread(folder.files), "has_more": False})

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
        found = await asyncio.to_thread(folder.batches)
        return web.json_response({"object": "list", "data": found, "has_more": False})

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
            fault = _fault_of(line, endpoint, ids) if total <= most else f"more than {most} requests"
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


async def _write_part(part: BodyPartReader, path: Path, limit: int) -> None:
    size = 0
    with path.open("wb") as file:
        while piece := await part.read_chunk(PIECE_BYTES):
            size += len(piece)
            if size > limit:
                raise too_large(limit)
            await asyncio.to_thread(file.write, piece)
