"""Tensor parallel ranks beside rank 0: starts their processes, sends them every plan, notices their end.

    rank 0   this engine: schedules, computes its share, samples
    rank n   a process (rank.py) that computes its share of the same plans, and gets with each the tokens sampled last

A socket pair to each carries msgpack in both directions. The kernel closes it, whatever ended one of them: rank n ends
when rank 0 does, and rank 0 notices rank n's end at once. Tensors travel another way: worker/collective.py.
"""

import contextlib
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from slipway_runtime.engine.decide import EnginePlan
from slipway_runtime.engine.launch import how_it_ended
from slipway_runtime.engine.options import EngineOptions
from slipway_runtime.messages import EngineFailed, SchedulerOutput, StepResult
from slipway_runtime.models.config import ModelRefusedError
from slipway_runtime.models.sharding import Share
from slipway_runtime.worker.collective import Collective, PeerLostError
from slipway_runtime.worker.kv_cache import CacheSize
from slipway_runtime.worker.runner import Runner
from slipway_runtime.worker.sampler import Masks

OBITUARY_SECONDS: Final = 5.0  # to wait, after a failed sum, for the end of the rank that caused it


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


RankNews = RankLoaded | RankSized | EngineFailed
RankOrder = RankPool | RankStep
_N = TypeVar("_N", RankLoaded, RankSized)


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
                sentence = self._deaths.get(timeout=OBITUARY_SECONDS).error
            except queue.Empty:
                sentence = str(lost)
            raise RankDiedError(sentence) from lost


class _Other:
    """The process of one other rank, and rank 0's connection to it."""

    def __init__(self, start: RankStart, on_death: Callable[[EngineFailed], object]) -> None:
        self.connection, theirs = Pipe()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "slipway_runtime.engine.rank"], stdin=theirs.fileno()
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
        failed = last_word or EngineFailed(how_it_ended(self._name, self.process.wait()))
        self._news.put(failed)
        on_death(failed)


def _end(processes: list["subprocess.Popen[bytes]"], directory: Path) -> None:
    """Kill the processes, which hold no state that must be saved, and remove the directory."""
    for process in processes:
        process.kill()
        process.wait()
    shutil.rmtree(directory, ignore_errors=True)
