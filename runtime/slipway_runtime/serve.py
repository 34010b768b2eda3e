"""The `serve` process: opens the ports, loads the model, serves requests, and drains on SIGTERM.

    ports open → model loads (/health and /ready answer from the start) → ready
    SIGTERM → drain: no new requests; running ones finish, or end with an error event at the deadline → exit 0
    DELETE /model after a drain → the engine process ends → the same command line is executed anew in this process

Exit 1: the model cannot be served, or the engine died; the last log line has the reason, which is also the
container's termination message.
"""

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import prometheus_client
import structlog
import uvloop
from jinja2 import TemplateError

from slipway_api import logs, names
from slipway_api.runtime_api import StartupTimes
from slipway_api.served_certificate import Certificate, CertificateError
from slipway_runtime.boot_memory import BootMemory, compare_with_first_start
from slipway_runtime.engine.client import EngineClient, QueueLimits, Transport
from slipway_runtime.engine.launch import BootedEngine, EngineNotLoadedError
from slipway_runtime.loading import LOADER, Fetched, boot_engine, fetch_model, in_daemon_thread, load_engine
from slipway_runtime.messages import Loading, WarmingUp
from slipway_runtime.models.config_values import ModelRefusedError
from slipway_runtime.server.adapter_registry import FETCH_SECONDS, AdapterRegistry, AdapterSource, adapter_roots
from slipway_runtime.server.admin import serve_control
from slipway_runtime.server.app import admin_app, listening, serving_app
from slipway_runtime.server.boot import load_adapters, load_boot_list, prefill, read_boot_list
from slipway_runtime.server.metrics import Metrics
from slipway_runtime.server.model_choice import ModelChoice, StandbyError, stand_by
from slipway_runtime.server.prompt import PromptEncoder
from slipway_runtime.server.replica import Identity, LoadedModel, Replica
from slipway_runtime.server.sampling import model_defaults
from slipway_runtime.server.structured import GrammarValidator
from slipway_runtime.server.tokenizer import TokenizerMismatch
from slipway_runtime.server.tracing import start_tracing
from slipway_runtime.settings import MAX_QUEUED_REQUESTS, MAX_QUEUED_TOKENS, RuntimeSettings
from slipway_runtime.storage.address import lies_under
from slipway_runtime.storage.fetch import Access, FetchError, fetch, release, shown
from slipway_runtime.termination import engine_death_message, termination_message, write_termination_message

log = structlog.get_logger()

ADAPTER_MOST_BYTES: Final = 4 << 30  # limit of an adapter's files: rank 64 on 70B needs 2 GiB
START_OVER: Final = -1  # instead of an exit code: execute the same command line again
STREAM_END_SECONDS: Final = 5.0  # after the engine's death, for open streams to end with an error


def run(settings: RuntimeSettings) -> int:
    """Run the server until it ends; returns the exit code."""
    logs.configure("runtime", settings.log_level)
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # they double the page, unused
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        code = runner.run(serve(settings))
    sys.stderr.flush()
    if code == START_OVER:
        # Nothing of the old model is left: the engine process has ended, and this process gets a new memory image. The
        # container goes on, so the kubelet counts no restart and holds the next start up by no backoff.
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606  our own command line
    if any(thread.name == LOADER for thread in threading.enumerate()):
        os._exit(code)  # a load is still running in a daemon thread: unloading torch meanwhile could crash
    return code


async def serve(settings: RuntimeSettings) -> int:
    """Serve until SIGTERM or a fatal error; returns the exit code, or START_OVER after DELETE /model.

    Without a model, waits for POST /model.
    """
    replica = Replica(
        Identity(model="", namespace=settings.namespace),
        drain_timeout=settings.drain_timeout,
        hang_seconds=settings.hang_seconds,
    )
    replica.tracing = start_tracing(settings.tracing, pod=settings.pod, namespace=settings.namespace)
    stop = _stop_signal(replica)
    serving = serving_app(
        replica,
        max_body_bytes=settings.max_body_bytes,
        adapter_endpoints=settings.adapter_endpoints,
        token_digests=settings.serving_token_digests,
        gateway_token_digests=settings.gateway_token_digests,
        has_metrics=settings.metrics_on_serving_port,
    )
    if settings.kv_events_endpoint and not settings.kv_events_endpoint.startswith(("tcp://127.", "tcp://*:")):
        log.warning(
            "KV events contain the tokens of prompts, and anybody who connects reads them",
            endpoint=settings.kv_events_endpoint,
        )
    try:
        certificate = Certificate(settings.tls_directory) if settings.tls_directory is not None else None
    except CertificateError as error:
        log.error("cannot serve TLS", reason=str(error))
        write_termination_message(str(error))
        return 1
    choice = ModelChoice(settings, replica)
    admin = admin_app(replica, choice, token_digests=settings.admin_token_digests)
    # The threads end after the ports, so that a late request does not meet a closed thread pool.
    threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="prompt")
    async with (
        _closing(threads),
        listening(serving, settings.host, settings.port, certificate=certificate) as port,
        listening(admin, settings.admin_host, settings.admin_port, certificate=certificate) as admin_port,
    ):
        control = await serve_control(replica, settings.run_directory)
        log.info("listening", model=settings.model_name, port=port, admin_port=admin_port)
        loading = asyncio.create_task(_load_and_run(choice, replica, threads))
        stopping = asyncio.create_task(stop.wait())
        giving_back = asyncio.create_task(choice.given_back())
        await asyncio.wait({loading, stopping, giving_back}, return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            code = loading.result()
        elif not stopping.done():
            log.info("giving the model back", model=replica.identity.model)
            code = START_OVER
        else:
            replica.drain(replica.drain_timeout, "SIGTERM")
            with contextlib.suppress(TimeoutError):  # a step loop that hangs must not block the exit
                async with asyncio.timeout(replica.drain_timeout + STREAM_END_SECONDS):
                    await replica.drained()
            log.info("drained", left=replica.drain_status().running)
            code = 0
        loading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await loading
        giving_back.cancel()
        if stop.is_set() and code == START_OVER:
            code = 0
        if control is not None:
            control.close()
        replica.text_blocks.close()
    if replica.tracing is not None:
        await replica.tracing.close()
    return code


@contextlib.asynccontextmanager
async def _closing(threads: ThreadPoolExecutor) -> AsyncIterator[None]:
    try:
        yield
    finally:
        threads.shutdown(wait=False)


def _stop_signal(replica: Replica) -> asyncio.Event:
    """An event set by SIGTERM and Ctrl-C; a second signal ends the running requests at once."""
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            replica.drain(0, "a second signal")
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    return stop


class _MemoryCheck:
    """Checks, when the engine process has booted, that the model before it has left no memory behind."""

    def __init__(self, run_directory: Path, replica: Replica) -> None:
        self._run_directory = run_directory
        self._replica = replica
        self.excess = ""  # a sentence; empty: all memory is free
        self.is_done = asyncio.Event()

    def record(self, memory: BootMemory | None) -> None:
        """Compare the memory in use with that of the first start. None: it cannot be measured."""
        self.excess = compare_with_first_start(self._run_directory, memory) if memory else ""
        if self.excess:
            log.error("memory is not free", reason=self.excess)
            self._replica.memory_not_freed(self.excess)
        else:
            self._replica.booted()
        self.is_done.set()


async def _load_and_run(choice: ModelChoice, replica: Replica, threads: ThreadPoolExecutor) -> int:
    """Load the model and serve it until the engine dies; returns the exit code."""
    check = _MemoryCheck(choice.process_settings.run_directory, replica)
    booted = None if choice.is_claimed else await boot_engine(choice.process_settings, check.record)
    try:
        settings = await choice.chosen()
    except asyncio.CancelledError:
        if booted is not None:
            await booted.stop()
        raise
    began = time.monotonic()
    try:
        fetched, transport = await _load(settings, replica, booted, check)
    except (FetchError, ModelRefusedError, TokenizerMismatch, FileNotFoundError, ValueError) as error:
        return _refuse(settings, error)
    except EngineNotLoadedError as error:
        return _refuse(settings, error, trace=error.trace)
    except Exception as error:  # noqa: BLE001  any error of a broken checkpoint: logged, and ends the process
        return _refuse(settings, error, trace=traceback.format_exc())
    client = EngineClient(transport, limits=queue_limits(settings), stall_seconds=settings.stall_seconds)
    client.on_text_blocks = replica.text_blocks.apply
    await client.start()
    try:
        if settings.standby:
            claimed = await stand_by(settings, choice, replica, client)
            if claimed is None:
                return await _end_with_engine(client, replica)
            settings = claimed
        model = _model(settings, fetched, client, threads, replica.identity)
        times = await _make_ready(settings, fetched, model, replica)
        log.info("ready", model=settings.model_name, **times, total_seconds=round(time.monotonic() - began, 3))
        await client.wait_dead()
        return await _end_with_engine(client, replica)
    except (StandbyError, TemplateError) as error:
        return _refuse(settings, error)
    finally:
        await client.stop()


async def _load(
    settings: RuntimeSettings, replica: Replica, booted: BootedEngine | None, check: _MemoryCheck
) -> tuple[Fetched, Transport]:
    """Download the model and load it into an engine. Raises what `_load_and_run` turns into a refusal."""

    def report(event: Loading | WarmingUp) -> None:
        if isinstance(event, WarmingUp):
            replica.warming_up()
        else:
            replica.loading(event.bytes_done, event.bytes_total)

    if not settings.model_uri.startswith(("file:", "/")):
        replica.downloading()
    fetched = await in_daemon_thread(lambda: fetch_model(settings))
    if settings.standby and booted is not None:
        if await booted.wait() is not None:
            await check.is_done.wait()
        if check.excess:
            await asyncio.Event().wait()  # load nothing beside what is left: the operator deletes the pod
    replica.loading()
    return fetched, await load_engine(settings, fetched, report, booted)


async def _make_ready(
    settings: RuntimeSettings, fetched: Fetched, model: LoadedModel, replica: Replica
) -> dict[str, float]:
    """Load the adapters, prefill the warm prompts, and make the replica ready. Returns the seconds of each part."""
    vocabulary = asyncio.create_task(asyncio.to_thread(model.grammars.prepare))
    await load_adapters(model, settings.adapters)
    if settings.max_adapters:
        await load_boot_list(model, read_boot_list(settings.boot_list))
    await prefill(model, settings.warm_prompts)
    await vocabulary  # else the first grammars would wait for it
    tools = model.prompts.template.tools
    if tools.place and not tools.form:
        log.warning("the form of tool calls is not known: tool_choice auto is refused; set --tool-call-parser")
    facts = model.engine.facts
    times = StartupTimes(
        download_seconds=round(fetched.seconds, 3),
        load_seconds=round(facts.load_seconds, 3),
        warmup_seconds=round(facts.warmup_seconds, 3),
    )
    for warning in facts.warnings:
        log.warning("model warning", reason=warning)
    if facts.kernels_compiled or facts.kernels_shared:
        log.info(
            "kernels at start",
            compiled=facts.kernels_compiled,
            shared=facts.kernels_shared,
            refused=facts.kernels_refused,
        )
    if facts.graphs_failed:
        log.warning("CUDA graphs disabled", reason=facts.graphs_failed)
    replica.ready_with(model, times)
    return times.model_dump(exclude_none=True)


def queue_limits(settings: RuntimeSettings) -> QueueLimits:
    """The limits of the waiting queue; a setting of 0 is the default, never a queue without a limit."""
    return QueueLimits(
        max_requests=settings.max_num_queued_reqs or MAX_QUEUED_REQUESTS,
        max_tokens=settings.max_queued_tokens or MAX_QUEUED_TOKENS,
    )


async def _end_with_engine(client: EngineClient, replica: Replica) -> int:
    """Log why the engine died, write the termination message, and wait for the open streams to end."""
    log.error("the engine has died", reason=client.error)
    write_termination_message(engine_death_message(client.error))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(STREAM_END_SECONDS):
            await replica.all_closed()
    return 1


def _refuse(settings: RuntimeSettings, error: Exception, *, trace: str = "") -> int:
    """Log why this model cannot be served, and write the termination message; returns the exit code."""
    more = {"exception": trace} if trace else {}
    log.error("cannot serve this model", model=shown(settings.model_uri), reason=str(error), **more)
    write_termination_message(termination_message(settings.model_uri, error))
    return 1


def _fetch_adapter(settings: RuntimeSettings, uri: str, from_client: bool, credentials: Mapping[str, str]) -> Path:
    """Fetch an adapter. The environment's bearer token is sent to HTTP_BEARER_HOSTS and hosts of the settings only.

    Credentials of the load call replace those of the environment; their bearer token is also sent to the host of `uri`.
    An address that a client names is read without credentials, unless it lies under one that the command line names.
    """
    named = (
        settings.model_uri,
        settings.tokenizer_uri,
        settings.draft_model_uri,
        *(adapter.uri for adapter in settings.adapters),
    )
    if credentials:
        kept = {key: value for key, value in os.environ.items() if key not in names.CREDENTIALS}
        access = Access.of({**kept, **credentials}).with_hosts_of(uri)
    elif not from_client:
        access = Access.of(os.environ).with_hosts_of(*named)
    elif lies_under(uri, (*named, *settings.credentials_for)):
        access = Access.of(os.environ).with_hosts_of(uri)
    else:
        access = Access.of(os.environ).without_credentials()
    access = replace(access, public_only=from_client and not settings.private_adapter_addresses)
    return fetch(
        uri,
        cache=settings.cache_directory,
        at_most_bytes=ADAPTER_MOST_BYTES,
        at_most_seconds=FETCH_SECONDS,
        access=access,
    )


def _model(
    settings: RuntimeSettings,
    fetched: Fetched,
    client: EngineClient,
    threads: ThreadPoolExecutor,
    identity: Identity,
) -> LoadedModel:
    facts = client.facts
    adapters = AdapterRegistry(
        client,
        identity,
        source=AdapterSource(
            partial(_fetch_adapter, settings),
            partial(release, cache=settings.cache_directory),
            roots=adapter_roots(
                settings.cache_directory, fetched.directory, named=[one.uri for one in settings.adapters]
            ),
        ),
        clock=time.monotonic,
    )
    metrics = Metrics(
        settings.model_name,
        facts,
        client.stats,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        adapter_names=adapters.names_of,
        legacy_names=settings.legacy_metric_names,
    )
    client.on_step = metrics.stepped
    return LoadedModel(
        engine=client,
        prompts=PromptEncoder(
            fetched.tokenizer,
            max_model_len=facts.max_model_len,
            threads=threads,
            tool_call_parser=settings.tool_call_parser,
        ),
        metrics=metrics,
        grammars=GrammarValidator.over(fetched.tokenizer.tokenizer, facts.eos_token_ids),
        adapters=adapters,
        defaults=settings.sampling_defaults.over(model_defaults(fetched.directory)),
        max_output_tokens=settings.max_output_tokens,
        created=int(time.time()),
        reasoning_parser=settings.reasoning_parser,
    )
