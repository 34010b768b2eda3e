"""The process that serves: ports around an engine, from the first moment to the last.

    ports open → model loads beside them (/health and /ready answer from the first moment) → ready
    SIGTERM → drain: nothing new, what runs finishes, or ends with an error event at the deadline → exit 0

Exit 1: the model cannot be served, or the engine died; the log's last line is the sentence why, and the kubelet gets
it as the container's termination message.
"""

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import prometheus_client
import structlog
import uvloop

from slipway_api import logs, names
from slipway_api.runtime_api import StartupTimes
from slipway_runtime.engine.client import EngineClient, QueueLimits
from slipway_runtime.engine.loop import Engine
from slipway_runtime.engine.thread import EngineThread
from slipway_runtime.server.app import admin_app, listening, serving_app
from slipway_runtime.server.control import serve_control
from slipway_runtime.server.loaded import Identity, LoadedModel
from slipway_runtime.server.metrics import Metrics
from slipway_runtime.server.prompt import PromptEncoder
from slipway_runtime.server.replica import Replica
from slipway_runtime.server.sampling import model_defaults
from slipway_runtime.server.tokenizer import TokenizerFiles, TokenizerMismatch, load_tokenizer
from slipway_runtime.settings import RuntimeSettings
from slipway_runtime.storage.fetch import FetchError, ModelNotFoundError, check_digest, fetch

log = structlog.get_logger()

LOADER: Final = "load"
LAST_WORDS_SECONDS: Final = 5.0  # after the engine's death, for the streams to hear of it
TERMINATION_MESSAGE: Final = Path("/dev/termination-log")  # Kubernetes' default; its mount is there in a pod only
_T = TypeVar("_T")


def run(settings: RuntimeSettings) -> int:
    """Serve until it is over; the exit code."""
    logs.configure("runtime", settings.log_level)
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # they double the page, and nobody draws them
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        code = runner.run(serve(settings))
    sys.stderr.flush()
    if any(thread.name == LOADER for thread in threading.enumerate()):
        os._exit(code)  # a load that nobody waits for: tearing torch down under its feet could crash
    return code


async def serve(settings: RuntimeSettings) -> int:
    """Serve until SIGTERM or until it cannot go on; the exit code."""
    replica = Replica(
        Identity(
            model=settings.model_name,
            revision=settings.revision,
            namespace=settings.namespace,
            uri=settings.model_uri,
        ),
        drain_timeout=settings.drain_timeout,
        stall_seconds=settings.stall_seconds,
    )
    stop = _stop_signal(replica)
    serving = serving_app(replica, max_body_bytes=settings.max_body_bytes)
    admin = admin_app(replica, token_digests=settings.admin_token_digests)
    async with (
        listening(serving, settings.host, settings.port) as port,
        listening(admin, settings.admin_host, settings.admin_port) as admin_port,
    ):
        control = await serve_control(replica, settings.run_directory)
        log.info("listening", model=settings.model_name, port=port, admin_port=admin_port)
        loading = asyncio.create_task(_load_and_run(settings, replica))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            code = loading.result()
        else:
            replica.drain(settings.drain_timeout, "SIGTERM")
            with contextlib.suppress(TimeoutError):  # a step loop that hangs must not keep the process for ever
                async with asyncio.timeout(settings.drain_timeout + LAST_WORDS_SECONDS):
                    await replica.drained()
            log.info("drained", left=replica.drain_status().running)
            code = 0
        loading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await loading
        if control is not None:
            control.close()
    return code


def _stop_signal(replica: Replica) -> asyncio.Event:
    """Set by SIGTERM and by Ctrl-C; a second one does not wait for what still runs."""
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            replica.drain(0, "a second signal")
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    return stop


async def _load_and_run(settings: RuntimeSettings, replica: Replica) -> int:
    """Load the model, then answer with it for as long as the engine lives; the exit code when it does not."""
    try:
        loop = asyncio.get_running_loop()
        loaded = await _in_daemon_thread(
            lambda: _load(settings, on_warm_up=lambda: loop.call_soon_threadsafe(replica.warming_up))
        )
    except (FetchError, TokenizerMismatch, FileNotFoundError, ValueError) as error:
        return _refuse(settings, error)
    except Exception as error:  # noqa: BLE001  whatever a strange checkpoint does: it is told, and ends the process
        return _refuse(settings, error, trace=type(error).__name__ != "ModelRefusedError")
    client = EngineClient(EngineThread(loaded.engine), limits=QueueLimits(max_requests=settings.max_num_queued_reqs))
    await client.start()
    try:
        with ThreadPoolExecutor(max_workers=2, thread_name_prefix="prompt") as threads:
            model = _model(settings, loaded, client, threads)
            replica.ready_with(model, loaded.times)
            log.info("ready", model=settings.model_name, **loaded.times.model_dump(exclude_none=True))
            await client.wait_dead()
        log.error("the engine has died", reason=client.error)
        _leave_word(f"the engine has died: {client.error}")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_SECONDS):
                await replica.all_closed()
        return 1
    finally:
        await client.stop()


def _refuse(settings: RuntimeSettings, error: Exception, *, trace: bool = False) -> int:
    """Say why this model cannot be served, to the log and to the kubelet."""
    log.error("cannot serve this model", model=settings.model_uri, reason=str(error), exc_info=error if trace else None)
    _leave_word(last_word(settings.model_uri, error))
    return 1


def last_word(model_uri: str, error: Exception) -> str:
    """What the kubelet gets to hear of a model that cannot be served; the operator knows the one that is not there."""
    if isinstance(error, ModelNotFoundError):
        return f"{names.WORD_MODEL_NOT_FOUND}{error}"
    return f"cannot serve {model_uri}: {error}"


def _leave_word(sentence: str) -> None:
    """The container's termination message: it outlives the container, and the operator makes a condition of it."""
    if TERMINATION_MESSAGE.exists():
        with contextlib.suppress(OSError):
            TERMINATION_MESSAGE.write_text(sentence[:4000])


def _model(
    settings: RuntimeSettings, loaded: "_Loaded", client: EngineClient, threads: ThreadPoolExecutor
) -> LoadedModel:
    facts = client.facts
    metrics = Metrics(settings.model_name, facts, client.stats, gpu_memory_utilization=settings.gpu_memory_utilization)
    client.on_step = metrics.stepped
    return LoadedModel(
        engine=client,
        prompts=PromptEncoder(loaded.tokenizer, max_model_len=facts.max_model_len, threads=threads),
        metrics=metrics,
        defaults=settings.sampling_defaults.over(model_defaults(loaded.directory)),
        max_output_tokens=settings.max_output_tokens,
        created=int(time.time()),
    )


@dataclass(frozen=True)
class _Loaded:
    directory: Path
    tokenizer: TokenizerFiles
    engine: Engine
    times: StartupTimes


def _load(settings: RuntimeSettings, on_warm_up: Callable[[], object]) -> _Loaded:
    """Everything that takes long, on a thread of its own: the download, torch, the weights, the first steps."""
    began = time.monotonic()
    directory = fetch(settings.model_uri, cache=settings.cache_directory)
    if settings.model_digest:
        check_digest(directory, settings.model_digest)
    beside = directory
    if settings.tokenizer_uri:
        beside = fetch(settings.tokenizer_uri, cache=settings.cache_directory, weights=False)
    fetched = time.monotonic()
    tokenizer = load_tokenizer(beside, chat_template=settings.chat_template, expected_sha256=settings.tokenizer_sha256)
    # Only here: torch costs seconds and 500 MB, and the ports must be open before.
    import torch

    from slipway_runtime.engine.build import build_engine

    if settings.threads:
        torch.set_num_threads(settings.threads)
    eos = tokenizer.special_tokens.get("eos_token")
    eos_id = tokenizer.tokenizer.token_to_id(eos) if eos else None
    engine = build_engine(
        directory,
        dtype=settings.dtype,
        max_model_len=settings.max_model_len or None,
        max_num_seqs=settings.max_num_seqs or None,
        max_num_batched_tokens=settings.max_num_batched_tokens or None,
        block_size=settings.block_size,
        kv_cache_bytes=settings.kv_cache_bytes or None,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        extra_eos_token_ids=() if eos_id is None else (eos_id,),
        on_warm_up=on_warm_up,
    )
    times = StartupTimes(
        download_seconds=round(fetched - began, 3),
        load_seconds=round(engine.facts.load_seconds, 3),
        warmup_seconds=round(engine.facts.warmup_seconds, 3),
    )
    return _Loaded(directory, tokenizer, engine, times)


async def _in_daemon_thread(work: Callable[[], _T]) -> _T:
    """Run the work beside the loop. A daemon, so that SIGTERM during a long load ends the process at once."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_T] = loop.create_future()

    def settle(result: _T | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]  # a result, since there is no error

    def body() -> None:
        try:
            result, error = work(), None
        except BaseException as failure:  # noqa: BLE001  carried over to whoever waits
            result, error = None, failure
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=body, name=LOADER, daemon=True).start()
    return await done
