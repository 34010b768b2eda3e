"""The process of a tensor-parallel rank beyond rank 0: computes its share of the plans that rank 0 sends.

    python -m slipway_runtime.engine.rank       # standard input is a socket: RankStart, then commands; replies go back

It samples nothing, so it needs neither masks nor the sampler. Adapters are read on a thread of their own, as on rank 0:
no step waits for a file.
"""

import gc
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch

from slipway_api import logs
from slipway_runtime.engine.decide import decide
from slipway_runtime.engine.parts import (
    adapter_reader,
    load_weights,
    make_slots,
    make_tier,
    share_compiled_kernels,
    size_pool,
    use_threads,
    zero_adapters,
)
from slipway_runtime.engine.ranks import (
    RankAdapterRead,
    RankCapture,
    RankCaptured,
    RankCommand,
    RankDone,
    RankForgetAdapter,
    RankGraphs,
    RankKeepAdapter,
    RankLoaded,
    RankPool,
    RankReadAdapter,
    RankReply,
    RankSized,
    RankSleep,
    RankStart,
    RankStep,
    RankWake,
)
from slipway_runtime.engine.sleep import Sleeper
from slipway_runtime.engine.warmup import capture_steps
from slipway_runtime.kernels.dispatch import kernels_for
from slipway_runtime.messages import EngineFailed, SchedulerOutput
from slipway_runtime.models.adapter_weights import HostAdapter
from slipway_runtime.models.config import ModelRefusedError
from slipway_runtime.models.sharding import Shard
from slipway_runtime.worker.collective import Collective, PeerLostError
from slipway_runtime.worker.kv_cache import allocate_cache
from slipway_runtime.worker.out_of_memory import oom_refused
from slipway_runtime.worker.runner import Runner

_C = TypeVar("_C", RankPool, RankGraphs)
StepCommand = RankStep | RankCapture | RankSleep | RankWake | RankKeepAdapter | RankForgetAdapter


class Rank0Connection:
    """The connection to rank 0. When rank 0 ends, so does this process, whatever it is doing."""

    def __init__(self, connection: "Connection[Any, Any]") -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._commands: queue.SimpleQueue[RankCommand] = queue.SimpleQueue()
        self._to_read: queue.SimpleQueue[RankReadAdapter] = queue.SimpleQueue()
        self.read: dict[str, HostAdapter] = {}  # by digest: adapters that rank 0 has not decided about
        self.start = msgspec.msgpack.decode(connection.recv_bytes(), type=RankStart)
        threading.Thread(target=self._listen, name="rank 0", daemon=True).start()

    def send(self, reply: RankReply) -> None:
        """Send a message to rank 0. Any thread may call this."""
        with self._sending:
            self._connection.send_bytes(msgspec.msgpack.encode(reply))

    def expect(self, kind: type[_C]) -> _C:
        """Wait for the next command, which must be of this kind."""
        command = self._commands.get()
        assert isinstance(command, kind)
        return command

    def next(self) -> StepCommand:
        """Wait for the next command after the pool is allocated."""
        command = self._commands.get()
        assert not isinstance(command, RankPool | RankGraphs | RankReadAdapter)
        return command

    def read_adapters(self, read: Callable[[Path, str], HostAdapter]) -> None:
        """Read the adapters that rank 0 names into `read`, on a thread of their own. read: by path and digest."""
        threading.Thread(target=self._read_adapters, args=(read,), name="adapters", daemon=True).start()

    def wait_for_the_end(self) -> None:
        """Block until rank 0, which knows the cause, ends this process."""
        threading.Event().wait()

    def _listen(self) -> None:
        try:
            decoder = msgspec.msgpack.Decoder(RankCommand)
            while True:
                command = decoder.decode(self._connection.recv_bytes())
                if isinstance(command, RankReadAdapter):
                    self._to_read.put(command)
                else:
                    self._commands.put(command)
        except (EOFError, ConnectionError):
            os._exit(0)
        except Exception as error:  # noqa: BLE001  the main thread would wait for commands that never come
            self.send(EngineFailed(f"a rank cannot read its commands: {error}", traceback.format_exc()))
            os._exit(1)

    def _read_adapters(self, read: Callable[[Path, str], HostAdapter]) -> None:
        while True:
            command = self._to_read.get()
            try:
                self.read[command.digest] = read(Path(command.path), command.digest)
            except Exception as error:  # noqa: BLE001  whatever is wrong with a file, only this adapter is refused
                self.send(RankAdapterRead(str(error) or type(error).__name__))
            else:
                self.send(RankAdapterRead())


def main() -> int:
    """Run the process of a rank; the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the server handles signals: it drains, and this process ends with it
    try:
        leader = Rank0Connection(Connection(0))
    except EOFError:
        return 0
    logs.configure("runtime", "WARNING")  # only warnings of libraries: rank 0 logs the rest
    try:
        run_rank(leader)
    except PeerLostError:
        leader.wait_for_the_end()
    except (ModelRefusedError, FileNotFoundError, ValueError) as refused:
        leader.send(EngineFailed(str(refused)))
    except Exception as error:  # noqa: BLE001  whatever it was, rank 0 must get the error
        leader.send(
            EngineFailed(f"rank {leader.start.rank} failed: {type(error).__name__}: {error}", traceback.format_exc())
        )
    return 1


def run_rank(leader: Rank0Connection) -> None:
    """Load the weights, then compute the plans of rank 0 until this process ends."""
    runner, sleeper, collective, device = _load(leader)
    gc.collect()
    gc.freeze()
    slots, before = runner.adapters, SchedulerOutput(step=0)
    while True:
        match leader.next():
            case RankStep(plan=step, sampled=sampled):
                runner.record_sampled(before, sampled)
                runner.execute_without_sampling(step)
                before = step
            case RankKeepAdapter(digest=digest, kept=kept):
                adapter = leader.read.pop(digest, None)
                if kept:
                    assert slots is not None
                    assert adapter is not None
                    slots.keep(adapter)
            case RankForgetAdapter(digest=digest):
                assert slots is not None
                slots.forget(digest)
            case RankCapture():
                leader.send(RankCaptured(capture_steps(runner, device, collective)))
                if not leader.expect(RankGraphs).used:
                    runner.graphs = None
            case RankSleep(level=level):
                sleeper.sleep(level)
                leader.send(RankDone())
            case RankWake():
                leader.send(RankDone(_wake(sleeper)))


def _load(leader: Rank0Connection) -> tuple[Runner, Sleeper, Collective, torch.device]:
    """Load this rank's share of the model, in the order that rank 0 expects its messages in."""
    rank, options = leader.start.rank, leader.start.options
    if options.device != "cpu" and torch.cuda.is_available():
        torch.cuda.set_device(rank)
    plan = decide(Path(leader.start.model_path), options, rank)
    use_threads(options)
    share_compiled_kernels(plan)
    kernels = kernels_for(
        plan.device, plan.dtype, deterministic=options.deterministic, latent=plan.config.latent is not None
    )
    collective = Collective(rank, options.tensor_parallel_size, plan.device)
    share = Shard(rank, options.tensor_parallel_size, collective.sum, collective.gather)
    with oom_refused("the weights", plan.device):
        decoder = load_weights(plan, kernels, share=share)
    leader.send(RankLoaded(decoder.nbytes))
    collective.join(Path(leader.start.store))
    with oom_refused("the adapters", plan.device):
        slots = make_slots(plan, decoder, kernels)
    with oom_refused("the KV cache", plan.device):
        size = size_pool(plan, decoder, kernels)
        leader.send(RankSized(size.num_blocks))
        size = replace(size, num_blocks=leader.expect(RankPool).num_blocks)
        allocate = partial(allocate_cache, plan.own, size, plan.kv_dtype, plan.device)
        # Only the runner refers to the decoder from here on: a sleeping rank frees it.
        runner = Runner(
            decoder,
            allocate(),
            kernels,
            block_size=options.block_size,
            max_num_seqs=plan.max_num_seqs,
            max_model_len=min(plan.max_model_len, size.num_blocks * options.block_size),
            eos_token_ids=plan.eos_token_ids,
            device=plan.device,
            adapters=slots,
        )
    with oom_refused("cold KV blocks in host memory", plan.device):
        if made := make_tier(plan, size):
            _, runner.host = made
    if slots is not None:
        leader.read.update((adapter.digest, adapter) for adapter in zero_adapters(plan))
        leader.read_adapters(adapter_reader(plan, share))
    reload = partial(load_weights, plan, kernels, share=share)
    # Graphs are captured again when rank 0 says so: all ranks do it at the same time.
    sleeper = Sleeper(runner, plan.device, load_weights=reload, allocate_cache=allocate, capture=lambda: None)
    return runner, sleeper, collective, plan.device


def _wake(sleeper: Sleeper) -> str:
    """Why a rank cannot wake up, or an empty string."""
    try:
        sleeper.wake()
    except (ModelRefusedError, OSError) as error:
        return str(error)
    return ""


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # while Python ends, a process group would wait for sums that the others never join
