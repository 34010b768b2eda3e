"""A real OpenTelemetry collector (rotel) for tests, and a backend that decodes what it passes on."""

import asyncio
import gzip
import importlib.util
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from bench.servers import free_ports


class Backend:
    """What a collector exports to: it decodes spans from OTLP's protobuf."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.resources: dict[str, dict[str, Any]] = {}  # by service.name
        self.service_of: dict[bytes, str] = {}  # span id -> service.name
        self.raw = b""

    async def take(self, request: web.Request) -> web.Response:
        body = await request.read()
        if request.headers.get("Content-Encoding") == "gzip" and body[:2] == b"\x1f\x8b":
            body = gzip.decompress(body)
        self.raw += body
        for batch in ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = values(batch.resource.attributes)
            self.resources[resource["service.name"]] = resource
            for scope in batch.scope_spans:
                self.spans += scope.spans
                self.service_of |= dict.fromkeys((span.span_id for span in scope.spans), resource["service.name"])
        return web.Response(content_type="application/x-protobuf")

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]


def values(attributes: Any) -> dict[str, Any]:
    found = {}
    for one in attributes:
        kind = one.value.WhichOneof("value")
        value = getattr(one.value, kind)
        found[one.key] = [item.string_value for item in value.values] if kind == "array_value" else value
    return found


@asynccontextmanager
async def a_collector() -> AsyncIterator[tuple[str, Backend]]:
    """The URL of a running collector, and what it exports to."""
    found = importlib.util.find_spec("rotel")
    if found is None or found.origin is None:
        pytest.skip("no collector: the package rotel is not installed")
    backend = Backend()
    app = web.Application(client_max_size=1 << 24)
    app.router.add_post("/v1/traces", backend.take)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    grpc, http = free_ports(2)
    process = await asyncio.create_subprocess_exec(
        Path(found.origin).parent / "rotel-agent",
        *("start", "--otlp-grpc-endpoint", f"127.0.0.1:{grpc}", "--otlp-http-endpoint", f"127.0.0.1:{http}"),
        *("--exporter", "otlp", "--otlp-exporter-protocol", "http", "--traces-batch-timeout", "100ms"),
        *("--otlp-exporter-endpoint", f"http://127.0.0.1:{runner.addresses[0][1]}"),
        env={**os.environ, "ROTEL_TELEMETRY_ENABLED": "false"},
    )
    try:
        await listens(http, process)
        yield f"http://127.0.0.1:{http}", backend
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
        await runner.cleanup()


async def listens(port: int, process: asyncio.subprocess.Process) -> None:
    while True:
        assert process.returncode is None, "the collector has ended"
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.05)
        else:
            writer.close()
            return
