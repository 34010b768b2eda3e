"""Tensor parallel ranks beside rank 0: their processes, the plans sent to each, the notice of their end.

    rank 0   this engine: schedules, computes its share, samples
    rank n   a process that computes its share of the same plans, and gets with each the tokens sampled last

A socket pair to each carries msgpack in both directions. The kernel closes it, whatever ended one of them: rank n ends
when rank 0 does, and rank 0 notices rank n's end at once. Tensors travel another way: worker/collective.py. What a rank
does is in rank.py.
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
from concurrent.futures import Future, InvalidStateError
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import torch
from torch import Tensor

from slipway_runtime.engine.decide import EnginePlan
from slipway_runtime.engine.launch import describe_exit
from slipway_runtime.engine.options import EngineOptions
from slipway_runtime.engine.sleep import Sleeper
from slipway_runtime.layers.lora import LoraBank
from slipway_runtime.messages import EngineFailed, SchedulerOutput, StepResult
from slipway_runtime.models.adapter_weights import AdapterRefusedError, HostAdapter
from slipway_runtime.models.config import ModelRefusedError
from slipway_runtime.models.decoder import Decoder
from slipway_runtime.models.sharding import Shard
from slipway_runtime.worker.adapter_slots import AdapterSlots
from slipway_runtime.worker.capture import first_line
from slipway_runtime.worker.collective import Collective, PeerLostError
from slipway_runtime.worker.kv_cache import CacheSize
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


class RankReadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Read this rank's share of an adapter into host memory, while steps are computed."""

    path: str
    digest: str


class RankAdapterRead(msgspec.Struct, frozen=True, tag=True):
    """A rank has read its share of an adapter; or why it could not."""

    error: str = ""


class RankKeepAdapter(msgspec.Struct, frozen=True, tag=True):
    """Keep the adapter that was read, so that later plans may load it into a slot; or drop it."""

    digest: str
    kept: bool = True


class RankForgetAdapter(msgspec.Struct, frozen=True, tag=True):
    """Free the host memory of an adapter that was kept. A slot that holds the adapter keeps it."""

    digest: str


RankReply = RankLoaded | RankSized | RankCaptured | RankDone | RankAdapterRead | EngineFailed
RankCommand = (
    RankPool
    | RankStep
    | RankCapture
    | RankGraphs
    | RankSleep
    | RankWake
    | RankReadAdapter
    | RankKeepAdapter
    | RankForgetAdapter
)
_R = TypeVar("_R", RankLoaded, RankSized, RankCaptured, RankDone)


class RankDiedError(Exception):
    """An engine of several ranks cannot go on; the message is a sentence."""


class Ranks:
    """Ranks 1 … N - 1 of an engine. They end with this process, or when this object is garbage-collected."""

    def __init__(
        self, plan: EnginePlan, *, directory: Path | None = None, on_death: Callable[[EngineFailed], object]
    ) -> None:
        """directory: for the file where they meet. on_death: called on another thread, once for each rank that ends."""
        size = plan.options.tensor_parallel_size
        self.collective = Collective(0, size, plan.device)
        self.share = Shard(0, size, self.collective.sum, self.collective.gather)
        self._store = Path(tempfile.mkdtemp(prefix="ranks-", dir=directory)) / "store"
        self._sending = threading.Lock()
        self._sampled: tuple[tuple[int, ...], ...] = ()
        self._within = False  # a step that has begun and has not ended well
        self._death = death = Future[str]()  # a sentence about the first rank that ends; several threads may ask

        def on_rank_death(failed: EngineFailed) -> None:
            with contextlib.suppress(InvalidStateError):
                death.set_result(failed.error)
            on_death(failed)

        limits = {name: getattr(plan, name) for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens")}
        options = msgspec.structs.replace(plan.options, **limits)
        self._others = [
            _RankProcess(
                RankStart(rank=rank, model_path=str(plan.model_path), options=options, store=str(self._store)),
                on_rank_death,
            )
            for rank in range(1, size)
        ]
        weakref.finalize(self, _end, [other.process for other in self._others], self._store.parent)

    def wait_for_weights(self) -> int:
        """Wait until all ranks have their weights and can compute together; the bytes of the other ranks' weights."""
        replies = [other.expect(RankLoaded) for other in self._others]
        with self._raise_rank_death():
            self.collective.join(self._store)
        return sum(one.weight_bytes for one in replies)

    def agree(self, size: CacheSize) -> CacheSize:
        """The size of the KV pool that all ranks have room for."""
        agreed = min(size.num_blocks, *(other.expect(RankSized).num_blocks for other in self._others))
        self._send_to_all(RankPool(agreed))
        return replace(size, num_blocks=agreed)

    def capture(self, runner: Runner, capture: Callable[[], str]) -> str:
        """Capture graphs on all ranks; why no rank uses graphs, or an empty string. capture: this rank's.

        Raises RankDiedError where a rank has failed elsewhere than in a capture: the others are inside of its sums.
        """
        self._send_to_all(RankCapture())
        try:
            with self._raise_rank_death():
                own = capture()
        except RuntimeError as failed:
            raise RankDiedError(
                f"rank 0 of {self.share.size} failed while it captured steps, and the others cannot come out of it: "
                f"{first_line(failed)}"
            ) from failed
        errors = [own, *(other.expect(RankCaptured).error for other in self._others)]
        error = next(filter(None, errors), "")
        self._send_to_all(RankGraphs(used=not error))
        if error:
            runner.graphs = None
        return error

    def capture_again(self, runner: Runner, capture: Callable[[], str]) -> str:
        """Capture graphs on all ranks after they woke up. Raises RankDiedError where one has failed.

        The others are then inside of the capture, or wait for its result, so waking up cannot be tried again.
        """
        try:
            return self.capture(runner, capture)
        except ModelRefusedError as error:
            raise RankDiedError(str(error)) from error

    def sleep(self, level: int) -> None:
        """Put the other ranks to sleep; returns when their memory is free. Raises RankDiedError."""
        self._send_to_all(RankSleep(level))
        self._expect_done()

    def wake(self, own: Callable[[], object]) -> None:
        """Wake all ranks at the same time, this one by `own`.

        Raises ModelRefusedError, or what `own` raises, where one cannot be woken; it may be tried again. Raises
        RankDiedError where one has ended.
        """
        self._send_to_all(RankWake())
        try:
            own()
        finally:
            errors = self._expect_done()
        if error := next(filter(None, errors), ""):
            raise ModelRefusedError(error)

    def read_adapter(self, own: Callable[[Path, str], HostAdapter], path: Path, digest: str) -> HostAdapter:
        """Read an adapter on all ranks, on this one first, by `own`; this rank's share.

        Blocks, beside the steps: one call at a time, on a thread of its own. Raises what `own` raises, or
        AdapterRefusedError where another rank cannot read its share.
        """
        adapter = own(path, digest)
        self._send_to_all(RankReadAdapter(str(path), digest))
        errors = [other.expect_adapter().error for other in self._others]
        for rank, error in enumerate(errors, start=1):
            if error:
                self._send_to_all(RankKeepAdapter(digest, kept=False))
                raise AdapterRefusedError(f"rank {rank}: {error}")
        return adapter

    def keep_adapter(self, digest: str) -> None:
        """Let the other ranks keep what they have read of an adapter, for the steps that are sent from now on."""
        self._send_to_all(RankKeepAdapter(digest))

    def forget_adapter(self, digest: str) -> None:
        """Free the other ranks' host memory of an adapter, after the steps that were sent before."""
        self._send_to_all(RankForgetAdapter(digest))

    def execute(self, runner: Runner, plan: SchedulerOutput, masks: Masks | None = None) -> StepResult:
        """Execute a plan on all ranks, as `runner.execute` does on one. Raises RankDiedError."""
        if self._within:
            raise RankDiedError("a step has failed on rank 0, and the other ranks cannot come out of it")
        self._send_to_all(RankStep(plan=plan, sampled=self._sampled))
        self._within = True
        with self._raise_rank_death():
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

    def _send_to_all(self, command: RankCommand) -> None:
        message = msgspec.msgpack.encode(command)
        with self._sending, self._raise_rank_death():
            for other in self._others:
                other.connection.send_bytes(message)

    @contextlib.contextmanager
    def _raise_rank_death(self) -> Iterator[None]:
        """Where a sum or a message fails because a rank has ended, raise RankDiedError, which says how it ended."""
        try:
            yield
        except (PeerLostError, ConnectionError) as lost:
            try:
                sentence = self._death.result(RANK_ERROR_WAIT_SECONDS)
            except TimeoutError:
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


class SharedSlots(AdapterSlots):
    """Rank 0's adapter slots; the other ranks keep and forget the same adapters, between the same steps."""

    def __init__(self, ranks: Ranks, bank: LoraBank, max_num_seqs: int) -> None:
        super().__init__(bank, max_num_seqs)
        self._ranks = ranks

    def keep(self, adapter: HostAdapter) -> None:
        """Keep an adapter in host memory on all ranks, all of which have read it."""
        self._ranks.keep_adapter(adapter.digest)
        super().keep(adapter)

    def forget(self, digest: str) -> None:
        """Free an adapter's host memory on all ranks."""
        super().forget(digest)
        self._ranks.forget_adapter(digest)


class _RankProcess:
    """The process of one other rank, and rank 0's connection to it."""

    def __init__(self, start: RankStart, on_death: Callable[[EngineFailed], object]) -> None:
        self.connection, theirs = Pipe()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "slipway_runtime.engine.rank"], stdin=theirs.fileno()
            )
        self.connection.send_bytes(msgspec.msgpack.encode(start))
        self._name = f"rank {start.rank} of {start.options.tensor_parallel_size}"
        self._replies = queue.SimpleQueue[RankReply]()
        self._adapters = queue.SimpleQueue[RankAdapterRead]()  # apart: they are read beside the steps
        threading.Thread(target=self._listen, args=(on_death,), name=self._name, daemon=True).start()

    def expect(self, kind: type[_R]) -> _R:
        """Wait for the next reply, which must be of this kind. Raises ModelRefusedError where the rank has ended."""
        reply = self._replies.get()
        if isinstance(reply, EngineFailed):
            raise ModelRefusedError(reply.error)
        assert isinstance(reply, kind)
        return reply

    def expect_adapter(self) -> RankAdapterRead:
        """Wait until the rank has read an adapter, or has ended."""
        return self._adapters.get()

    def _listen(self, on_death: Callable[[EngineFailed], object]) -> None:
        decoder = msgspec.msgpack.Decoder(RankReply)
        failure = None
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                reply = decoder.decode(self.connection.recv_bytes())
                if isinstance(reply, EngineFailed):
                    failure = reply
                elif isinstance(reply, RankAdapterRead):
                    self._adapters.put(reply)
                else:
                    self._replies.put(reply)
        failed = failure or EngineFailed(describe_exit(self._name, self.process.wait()))
        self._replies.put(failed)
        self._adapters.put(RankAdapterRead(failed.error))
        on_death(failed)


def _end(processes: list["subprocess.Popen[bytes]"], directory: Path) -> None:
    """Kill the processes, which hold no state that must be saved, and remove the directory."""
    for process in processes:
        process.kill()
        process.wait()
    shutil.rmtree(directory, ignore_errors=True)
