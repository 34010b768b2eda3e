"""Loads a model: the download, the tokenizer, and the warm engine, in its own process or in a thread.

All of it is slow and runs beside the event loop, which answers probes meanwhile.

The engine computes with as many threads as the container's CPU quota and the physical cores allow.
"""

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from slipway_api import names
from slipway_api.runtime_spec import Pooling, Task
from slipway_runtime.boot_memory import BootMemory
from slipway_runtime.cgroups import ContainerLimits, read_limits
from slipway_runtime.engine.client import Transport
from slipway_runtime.engine.launch import BootedEngine, EngineProcess
from slipway_runtime.engine.loop import EngineThread
from slipway_runtime.engine.options import EngineOptions
from slipway_runtime.messages import Loading, WarmingUp
from slipway_runtime.server.tokenizer import TokenizerFiles, load_tokenizer
from slipway_runtime.settings import RuntimeSettings
from slipway_runtime.storage.fetch import FetchError, check_digest, fetch
from slipway_runtime.storage.kernel_store import FOLDER as KERNELS_FOLDER
from slipway_runtime.storage.source import ModelNotFoundError

_CPUINFO = Path("/proc/cpuinfo")
SPARE_FROM = 4  # threads; from this number on, one is left to HTTP and scheduling


def compute_threads(
    limits: ContainerLimits | None = None, cpuinfo: Path = _CPUINFO, allowed: frozenset[int] | None = None
) -> int:
    """The container's CPU quota, rounded down, or the number of physical cores if that is smaller; at least 1.

    More threads wait for each other at every barrier, for a tick of the kernel's scheduler each time. `limits`: the
    container's; None: read them now. `allowed`: the processors that this process may run on; None: ask the kernel.
    """
    processors = os.sched_getaffinity(0) if allowed is None else allowed
    threads = _physical_cores(cpuinfo.read_text() if cpuinfo.exists() else "", frozenset(processors))
    processors_of_quota = (limits or read_limits()).processors
    if processors_of_quota is not None:
        threads = min(threads, int(processors_of_quota))
    return max(1, threads - 1 if threads >= SPARE_FROM else threads)


def _physical_cores(cpuinfo: str, processors: frozenset[int]) -> int:
    """Physical cores of these processors: two hyperthreads share a core. Without core numbers each processor is one."""
    cores = set()
    for block in cpuinfo.split("\n\n"):
        fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in block.splitlines())}
        if "processor" in fields and int(fields["processor"]) in processors:
            cores.add((fields.get("physical id", "0"), fields.get("core id", fields["processor"])))
    return len(cores) or len(processors)


LOADER: Final = "load"  # the name of threads that the process does not join at its end
_T = TypeVar("_T")
# The engine's names of the poolings.
_POOLING: Final = {Pooling.AUTO: "auto", Pooling.LAST_TOKEN: "last", Pooling.MEAN: "mean"}
_TASKS: Final[set["asyncio.Task[None]"]] = set()  # the event loop itself keeps no reference to a task


@dataclass(frozen=True)
class Fetched:
    """A downloaded and checked model, before the engine loads it."""

    directory: Path
    tokenizer_directory: Path
    tokenizer: TokenizerFiles
    seconds: float  # of downloading
    draft_directory: Path | None = None  # of the draft model, if there is one


def fetch_model(settings: RuntimeSettings) -> Fetched:
    """Fetch and check the model and its tokenizer. Blocks. Raises FetchError, TokenizerMismatch, FileNotFoundError."""
    began = time.monotonic()
    directory = fetch(settings.model_uri, cache=settings.cache_directory)
    if settings.model_digest:
        check_digest(directory, settings.model_digest, settings.cache_directory)
    beside = directory
    if settings.tokenizer_uri:
        beside = fetch(settings.tokenizer_uri, cache=settings.cache_directory, weights=False)
    draft = fetch_draft_model(settings.draft_model_uri, settings.cache_directory) if settings.draft_model_uri else None
    seconds = time.monotonic() - began
    tokenizer = load_tokenizer(beside, chat_template=settings.chat_template, expected_sha256=settings.tokenizer_sha256)
    return Fetched(directory, beside, tokenizer, seconds, draft)


def fetch_draft_model(uri: str, cache: Path) -> Path:
    """Fetch the draft model. An error says that it is about that, and not about the model."""
    try:
        return fetch(uri, cache=cache)
    except (ModelNotFoundError, FileNotFoundError) as error:
        raise FetchError(f"{names.WORD_INVALID_SPEC}{names.DRAFT_MODEL_FIELD}: {error}") from error
    except FetchError as error:
        raise type(error)(f"the draft model: {error}") from error


async def boot_engine(
    settings: RuntimeSettings, on_booted: Callable[[BootMemory | None], object]
) -> BootedEngine | None:
    """Start an engine process, or import its modules, before a model is known; calls `on_booted` on the event loop.

    With the memory in use then; None in in-process mode, where it cannot be told from the caller's.
    """
    if settings.in_process:

        def load_modules() -> None:
            import slipway_runtime.engine.build  # noqa: F401  torch costs seconds, and the ports are open meanwhile

        await in_daemon_thread(load_modules)
        on_booted(None)
        return None
    booted = await BootedEngine.start()

    async def tell() -> None:
        memory = await booted.wait()
        if memory is not None:
            on_booted(memory)

    task = asyncio.create_task(tell(), name="boot")
    _TASKS.add(task)
    task.add_done_callback(_TASKS.discard)
    return booted


async def load_engine(
    settings: RuntimeSettings,
    fetched: Fetched,
    on_progress: Callable[[Loading | WarmingUp], object],
    booted: BootedEngine | None = None,
) -> Transport:
    """Load and warm an engine; `on_progress` is called on the event loop. Raises EngineNotLoadedError, or its error."""
    options = engine_options(settings, fetched)
    if settings.in_process:
        loop = asyncio.get_running_loop()

        def build() -> Transport:
            # Imported here: torch costs seconds and 500 MB, and the ports must be open before.
            from slipway_runtime.engine.build import build_engine

            def report(event: Loading | WarmingUp) -> None:
                loop.call_soon_threadsafe(on_progress, event)

            return EngineThread(build_engine(fetched.directory, options, on_progress=report))

        return await in_daemon_thread(build)
    return await EngineProcess.launch(
        fetched.directory,
        options,
        run_directory=settings.run_directory,
        log_level=settings.log_level,
        on_progress=on_progress,
        booted=booted,
    )


def engine_options(settings: RuntimeSettings, fetched: Fetched) -> EngineOptions:
    """The engine's options from the settings and the fetched model."""
    eos = fetched.tokenizer.special_tokens.get("eos_token")
    eos_id = fetched.tokenizer.tokenizer.token_to_id(eos) if eos else None
    return EngineOptions(
        model_digest=settings.model_digest,
        dtype=settings.dtype,
        quantization=settings.quantization,
        kv_cache_dtype=settings.kv_cache_dtype,
        deterministic=settings.deterministic,
        device=settings.device,
        tensor_parallel_size=settings.tensor_parallel_size,
        threads=settings.threads or compute_threads(),
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        block_size=settings.block_size,
        kv_cache_bytes=settings.kv_cache_bytes,
        kv_cache_host_bytes=settings.kv_cache_host_bytes,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        extra_eos_token_ids=() if eos_id is None else (eos_id,),
        tokenizer_path=str(fetched.tokenizer_directory),
        speculation=settings.speculation,
        speculation_max_tokens=settings.speculation_max_tokens,
        draft_model="" if fetched.draft_directory is None else str(fetched.draft_directory),
        max_adapters=settings.max_adapters,
        max_cpu_adapters=settings.max_cpu_adapters,
        max_rank=settings.max_rank,
        lora_experts=settings.lora_experts,
        prefix_caching=not settings.no_prefix_caching,
        score_tokens=settings.score_tokens,
        pooling=_POOLING[settings.pooling] if settings.task is Task.EMBED else "",
        overlap=False if settings.no_overlap else None,
        tenant_weights=dict(settings.tenant_weights),
        kv_events_endpoint=settings.kv_events_endpoint,
        kv_events_topic=settings.kv_events_topic,
        kernels_directory=str(settings.cache_directory / KERNELS_FOLDER),
        kernels_key=settings.kernels_key,
    )


async def in_daemon_thread(work: Callable[[], _T]) -> _T:
    """Run `work` in a daemon thread, so that SIGTERM during a long load ends the process at once."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_T] = loop.create_future()

    def settle(result: _T | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]  # without an error there is a result

    def body() -> None:
        try:
            result, error = work(), None
        except BaseException as failure:  # noqa: BLE001  raised again in the coroutine that awaits it
            result, error = None, failure
        with contextlib.suppress(RuntimeError):  # the loop is closed: no coroutine awaits the result
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=body, name=LOADER, daemon=True).start()
    return await done
