"""Tensor parallel ranks beside rank 0: their processes, the plans sent to each, the notice of their end.

    rank 0   this engine: schedules, computes its share, samples
    rank n   a process that computes its share of the same plans, and gets with each the tokens sampled last

A socket pair to each carries msgpack in both directions. The kernel closes it, whatever ended one of them: rank n ends
when rank 0 does, and rank 0 notices rank n's end at once. Tensors travel another way: worker/collective.py.

The process of a rank is started as

    python -m slipway_runtime.engine.ranks       # its standard input is a socket: RankStart, then orders; news go back

It samples nothing, so it needs neither masks nor the sampler.
"""

import contextlib
import gc
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import torch
from torch import Tensor

from slipway_api import logs
from slipway_runtime.engine.decide import EnginePlan, decide
from slipway_runtime.engine.launch import describe_exit
from slipway_runtime.engine.options import EngineOptions
from slipway_runtime.engine.parts import load_weights, make_tier, size_pool, use_threads
from slipway_runtime.engine.sleep import Sleeper
from slipway_runtime.engine.warmup import capture_steps
from slipway_runtime.kernels.dispatch import kernels_for
from slipway_runtime.messages import EngineFailed, SchedulerOutput, StepResult
from slipway_runtime.models.config import ModelRefusedError
from slipway_runtime.models.decoder import Decoder
from slipway_runtime.models.sharding import Share
from slipway_runtime.worker.collective import Collective, PeerLostError
from slipway_runtime.worker.kv_cache import CacheSize, allocate_cache
from slipway_runtime.worker.out_of_memory import oom_refused
from slipway_runtime.worker.runner import Runner
from slipway_runtime.worker.sampler import Masks

RANK_ERROR_WAIT_SECONDS: Final = 5.0  # to wait, after a failed sum, for the end of the rank that caused it


class RankStart(msgspec.Struct, frozen=True, kw_only=True):
    """The first message to a new rank."""

    rank: int
    model_path: str
    options: EngineOptions  # with the limits that rank 0 has decided on
    store: str  # the file where the ranks meet


class RankLoaded(msgspec.Struct, frozen=True, tag=True):
    """A rank has loaded its weights."""

    weight_bytes: int


class RankSized(msgspec.Struct, frozen=True, tag=True):
    """How many blocks of KV this rank has room for."""

    num_blocks: int


class RankPool(msgspec.Struct, frozen=True, tag=True):
    """How many blocks of KV every rank allocates."""

    num_blocks: int


class RankStep(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The next plan, and the tokens that the one before sampled."""

    plan: SchedulerOutput
    sampled: tuple[tuple[int, ...], ...]  # parallel to the rows of the plan before


class RankCapture(msgspec.Struct, frozen=True, tag=True):
    """Capture the CUDA graphs now, as all ranks do: their sums are captured too."""


class RankCaptured(msgspec.Struct, frozen=True, tag=True):
    """A rank has captured its graphs; or why not."""

    error: str


class RankGraphs(msgspec.Struct, frozen=True, tag=True):
    """Whether all ranks have graphs. A step must be replayed by all of them or by none: sums are of padded batches."""

    used: bool


class RankSleep(msgspec.Struct, frozen=True, tag=True):
    """Free the memory of weights and KV cache; see `engine.sleep`."""

    level: int


class RankWake(msgspec.Struct, frozen=True, tag=True):
    """Restore that memory; nothing to do where it was restored by an earlier try."""


class RankDone(msgspec.Struct, frozen=True, tag=True):
    """A rank has gone to sleep or woken up; or why it could not."""

    error: str = ""


RankNews = RankLoaded | RankSized | RankCaptured | RankDone | EngineFailed
RankOrder = RankPool | RankStep | RankCapture | RankGraphs | RankSleep | RankWake
_N = TypeVar("_N", RankLoaded, RankSized, RankCaptured, RankDone)


class RankDiedError(Exception):
    """An engine of several ranks cannot go on; the message is a sentence."""


class Ranks:
    """Ranks 1 … N - 1 of an engine. They end with this process, or when this object is garbage-collected."""

    def __init__(
        self, plan: EnginePlan, *, directory: Path | None = None, on_death: Callable[[EngineFailed], object]
    ) -> None:
        """directory: for the file where they meet. on_death: called on another thread, once for each rank that ends."""
        size = plan.options.tensor_parallel_size
        self._collective = Collective(0, size, plan.device)
        self.share = Share(0, size, self._collective.sum)
        self._store = Path(tempfile.mkdtemp(prefix="ranks-", dir=directory)) / "store"
        self._encoder = msgspec.msgpack.Encoder()
        self._sampled: tuple[tuple[int, ...], ...] = ()
        self._within = False  # a step that has begun and has not ended well
        self._deaths = deaths = queue.SimpleQueue[EngineFailed]()

        def die(failed: EngineFailed) -> None:
            deaths.put(failed)
            on_death(failed)

        limits = {name: getattr(plan, name) for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens")}
        options = msgspec.structs.replace(plan.options, **limits)
        self._others = [
            _Other(RankStart(rank=rank, model_path=str(plan.model_path), options=options, store=str(self._store)), die)
            for rank in range(1, size)
        ]
        weakref.finalize(self, _end, [other.process for other in self._others], self._store.parent)

    def loaded(self) -> int:
        """Wait until all ranks have their weights and can compute together; the bytes of the other ranks' weights."""
        news = [other.expect(RankLoaded) for other in self._others]
        with self._or_why_not():
            self._collective.join(self._store)
        return sum(one.weight_bytes for one in news)

    def agree(self, size: CacheSize) -> CacheSize:
        """The size of the KV pool that all ranks have room for."""
        agreed = min(size.num_blocks, *(other.expect(RankSized).num_blocks for other in self._others))
        self._tell(RankPool(agreed))
        return replace(size, num_blocks=agreed)

    def capture(self, runner: Runner, capture: Callable[[], str]) -> str:
        """Capture graphs on all ranks; why no rank uses graphs, or an empty string. capture: this rank's."""
        self._tell(RankCapture())
        errors = [_captured(capture), *(other.expect(RankCaptured).error for other in self._others)]
        error = next(filter(None, errors), "")
        self._tell(RankGraphs(used=not error))
        if error:
            runner.graphs = None
        return error

    def capture_again(self, runner: Runner, capture: Callable[[], str]) -> str:
        """Capture graphs on all ranks after they woke up. Raises RankDiedError where the memory is short on one.

        The others are then inside of the capture, or wait for its result, so waking up cannot be tried again.
        """
        try:
            return self.capture(runner, capture)
        except ModelRefusedError as error:
            raise RankDiedError(str(error)) from error

    def sleep(self, level: int) -> None:
        """Put the other ranks to sleep; returns when their memory is free. Raises RankDiedError."""
        self._tell(RankSleep(level))
        self._expect_done()

    def wake(self, own: Callable[[], object]) -> None:
        """Wake all ranks at the same time, this one by `own`.

        Raises ModelRefusedError, or what `own` raises, where one cannot be woken; it may be tried again. Raises
        RankDiedError where one has ended.
        """
        self._tell(RankWake())
        try:
            own()
        finally:
            errors = self._expect_done()
        if error := next(filter(None, errors), ""):
            raise ModelRefusedError(error)

    def execute(self, runner: Runner, plan: SchedulerOutput, masks: Masks | None = None) -> StepResult:
        """Execute a plan on all ranks, as `runner.execute` does on one. Raises RankDiedError."""
        if self._within:
            raise RankDiedError("a step has failed on rank 0, and the other ranks cannot come out of it")
        self._tell(RankStep(plan=plan, sampled=self._sampled))
        self._within = True
        with self._or_why_not():
            result = runner.execute(plan, masks)
        self._within, self._sampled = False, result.token_ids
        return result

    def _expect_done(self) -> list[str]:
        """Wait until every other rank sleeps or is awake; why one could not, or an empty string, for each."""
        try:
            errors = [other.expect(RankDone).error for other in self._others]
        except ModelRefusedError as ended:
            raise RankDiedError(str(ended)) from ended
        return [error and f"rank {rank}: {error}" for rank, error in enumerate(errors, start=1)]

    def _tell(self, order: RankOrder) -> None:
        message = self._encoder.encode(order)
        with self._or_why_not():
            for other in self._others:
                other.connection.send_bytes(message)

    @contextlib.contextmanager
    def _or_why_not(self) -> Iterator[None]:
        """Where a sum or a message fails because a rank has ended, raise RankDiedError, which says how it ended."""
        try:
            yield
        except (PeerLostError, ConnectionError) as lost:
            try:
                sentence = self._deaths.get(timeout=RANK_ERROR_WAIT_SECONDS).error
            except queue.Empty:
                sentence = str(lost)
            raise RankDiedError(sentence) from lost


class SharedSleeper(Sleeper):
    """Rank 0's sleep mode, which puts the other ranks to sleep and wakes them with it."""

    def __init__(
        self,
        ranks: Ranks,
        runner: Runner,
        device: torch.device,
        *,
        load_weights: Callable[[], Decoder],
        allocate_cache: Callable[[], list[Tensor]],
        capture: Callable[[], str],
    ) -> None:
        """capture: captures the graphs of rank 0."""
        together = partial(ranks.capture_again, runner, capture)
        super().__init__(runner, device, load_weights=load_weights, allocate_cache=allocate_cache, capture=together)
        self._ranks = ranks

    def _free(self, level: int) -> None:
        self._ranks.sleep(level)
        super()._free(level)

    def _restore(self) -> None:
        self._ranks.wake(super()._restore)


class _Other:
    """The process of one other rank, and rank 0's connection to it."""

    def __init__(self, start: RankStart, on_death: Callable[[EngineFailed], object]) -> None:
        self.connection, theirs = Pipe()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "slipway_runtime.engine.ranks"], stdin=theirs.fileno()
            )
        self.connection.send_bytes(msgspec.msgpack.encode(start))
        self._name = f"rank {start.rank} of {start.options.tensor_parallel_size}"
        self._news = queue.SimpleQueue[RankNews]()
        threading.Thread(target=self._listen, args=(on_death,), name=self._name, daemon=True).start()

    def expect(self, kind: type[_N]) -> _N:
        """Wait for the next news, which must be of this kind. Raises ModelRefusedError where the rank has ended."""
        news = self._news.get()
        if isinstance(news, EngineFailed):
            raise ModelRefusedError(news.error)
        assert isinstance(news, kind)
        return news

    def _listen(self, on_death: Callable[[EngineFailed], object]) -> None:
        decoder = msgspec.msgpack.Decoder(RankNews)
        last_word = None
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                news = decoder.decode(self.connection.recv_bytes())
                if isinstance(news, EngineFailed):
                    last_word = news
                else:
                    self._news.put(news)
        failed = last_word or EngineFailed(describe_exit(self._name, self.process.wait()))
        self._news.put(failed)
        on_death(failed)


def _end(processes: list["subprocess.Popen[bytes]"], directory: Path) -> None:
    """Kill the processes, which hold no state that must be saved, and remove the directory."""
    for process in processes:
        process.kill()
        process.wait()
    shutil.rmtree(directory, ignore_errors=True)


_O = TypeVar("_O", RankPool, RankGraphs)


class Leader:
    """The connection to rank 0. When rank 0 ends, so does this process, whatever it is doing."""

    def __init__(self, connection: "Connection[Any, Any]") -> None:
        self._connection = connection
        self._orders: queue.SimpleQueue[RankOrder] = queue.SimpleQueue()
        self.start = msgspec.msgpack.decode(connection.recv_bytes(), type=RankStart)
        threading.Thread(target=self._listen, name="rank 0", daemon=True).start()

    def tell(self, news: RankNews) -> None:
        """Send a message to rank 0."""
        self._connection.send_bytes(msgspec.msgpack.encode(news))

    def expect(self, kind: type[_O]) -> _O:
        """Wait for the next order, which must be of this kind."""
        order = self._orders.get()
        assert isinstance(order, kind)
        return order

    def next(self) -> RankStep | RankCapture | RankSleep | RankWake:
        """Wait for the next order after the pool is allocated."""
        order = self._orders.get()
        assert not isinstance(order, RankPool | RankGraphs)
        return order

    def wait_for_the_end(self) -> None:
        """Block until rank 0, which knows the cause, ends this process."""
        threading.Event().wait()

    def _listen(self) -> None:
        try:
            decoder = msgspec.msgpack.Decoder(RankOrder)
            while True:
                self._orders.put(decoder.decode(self._connection.recv_bytes()))
        except (EOFError, ConnectionError):
            os._exit(0)
        except Exception as error:  # noqa: BLE001  the main thread would wait for orders that never come
            self.tell(EngineFailed(f"a rank cannot read its orders: {error}", traceback.format_exc()))
            os._exit(1)


def main() -> int:
    """Run the process of a rank; the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the server handles signals: it drains, and this process ends with it
    try:
        leader = Leader(Connection(0))
    except EOFError:
        return 0
    logs.configure("runtime", "WARNING")  # only warnings of libraries: rank 0 logs the rest
    try:
        run_rank(leader)
    except PeerLostError:
        leader.wait_for_the_end()
    except (ModelRefusedError, FileNotFoundError, ValueError) as refused:
        leader.tell(EngineFailed(str(refused)))
    except Exception as error:  # noqa: BLE001  whatever it was, rank 0 must get the error
        leader.tell(
            EngineFailed(f"rank {leader.start.rank} failed: {type(error).__name__}: {error}", traceback.format_exc())
        )
    return 1


def _captured(capture: Callable[[], str]) -> str:
    """Why a capture failed, or an empty string. A sum that cannot be captured is no lost rank."""
    try:
        return capture()
    except PeerLostError as error:
        return str(error)


def _wake(sleeper: Sleeper) -> str:
    """Why a rank cannot wake up, or an empty string."""
    try:
        sleeper.wake()
    except (ModelRefusedError, OSError) as error:
        return str(error)
    return ""


def run_rank(leader: Leader) -> None:
    """Load the weights, then compute the plans of rank 0 until this process ends."""
    rank, options = leader.start.rank, leader.start.options
    if options.device != "cpu" and torch.cuda.is_available():
        torch.cuda.set_device(rank)
    plan = decide(Path(leader.start.model_path), options, rank)
    use_threads(options)
    kernels = kernels_for(plan.device, plan.dtype, deterministic=options.deterministic)
    collective = Collective(rank, options.tensor_parallel_size, plan.device)
    share = Share(rank, options.tensor_parallel_size, collective.sum)
    with oom_refused("the weights", plan.device):
        decoder = load_weights(plan, kernels, share=share)
    leader.tell(RankLoaded(decoder.nbytes))
    collective.join(Path(leader.start.store))
    with oom_refused("the KV cache", plan.device):
        size = size_pool(plan, decoder, kernels)
        leader.tell(RankSized(size.num_blocks))
        size = replace(size, num_blocks=leader.expect(RankPool).num_blocks)
        allocate = partial(allocate_cache, plan.own, size, plan.kv_dtype, plan.device)
        runner = Runner(
            decoder,
            allocate(),
            kernels,
            block_size=options.block_size,
            max_num_seqs=plan.max_num_seqs,
            max_model_len=min(plan.max_model_len, size.num_blocks * options.block_size),
            eos_token_ids=plan.eos_token_ids,
            device=plan.device,
        )
    del decoder  # only the runner refers to it: a sleeping rank frees it
    with oom_refused("cold KV blocks in host memory", plan.device):
        if made := make_tier(plan, size):
            _, runner.host = made
    reload = partial(load_weights, plan, kernels, share=share)
    # Graphs are captured again when rank 0 says so: all ranks do it at the same time.
    sleeper = Sleeper(runner, plan.device, load_weights=reload, allocate_cache=allocate, capture=lambda: None)
    gc.collect()
    gc.freeze()
    before = SchedulerOutput(step=0)
    while True:
        match leader.next():
            case RankStep(plan=step, sampled=sampled):
                runner.record_sampled(before, sampled)
                runner.execute_without_sampling(step)
                before = step
            case RankCapture():
                leader.tell(RankCaptured(_captured(partial(capture_steps, runner, plan.device))))
                if not leader.expect(RankGraphs).used:
                    runner.graphs = None
            case RankSleep(level=level):
                sleeper.sleep(level)
                leader.tell(RankDone())
            case RankWake():
                leader.tell(RankDone(_wake(sleeper)))


if __name__ == "__main__":
    sys.exit(main())
