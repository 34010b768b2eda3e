"""The process of one rank beyond the first: loads its share of the weights, and follows the plans of rank 0.

    python -m slipway_runtime.engine.rank        # its standard input is a socket: RankStart, then orders; news go back

It samples nothing, so it needs neither masks nor the sampler.
"""

import gc
import os
import queue
import signal
import sys
import threading
import traceback
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch

from slipway_api import logs
from slipway_runtime.engine.decide import decide
from slipway_runtime.engine.parts import load_weights, make_tier, size_pool, use_threads
from slipway_runtime.engine.ranks import RankLoaded, RankOrder, RankPool, RankSized, RankStart, RankStep
from slipway_runtime.kernels.dispatch import kernels_for
from slipway_runtime.messages import EngineFailed, SchedulerOutput
from slipway_runtime.models.config import ModelRefusedError
from slipway_runtime.models.sharding import Share
from slipway_runtime.worker.collective import Collective, PeerLostError
from slipway_runtime.worker.kv_cache import allocate_cache
from slipway_runtime.worker.out_of_memory import oom_refused
from slipway_runtime.worker.runner import Runner

_O = TypeVar("_O", RankPool, RankStep)


class Leader:
    """The connection to rank 0. When rank 0 ends, so does this process, whatever it is doing."""

    def __init__(self, connection: "Connection[Any, Any]") -> None:
        self._connection = connection
        self._orders: queue.SimpleQueue[RankOrder] = queue.SimpleQueue()
        self.start = msgspec.msgpack.decode(connection.recv_bytes(), type=RankStart)
        threading.Thread(target=self._listen, name="rank 0", daemon=True).start()

    def tell(self, news: RankLoaded | RankSized | EngineFailed) -> None:
        """Send a message to rank 0."""
        self._connection.send_bytes(msgspec.msgpack.encode(news))

    def expect(self, kind: type[_O]) -> _O:
        """Wait for the next order, which must be of this kind."""
        order = self._orders.get()
        assert isinstance(order, kind)
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
        follow(leader)
    except PeerLostError:
        leader.wait_for_the_end()
    except (ModelRefusedError, FileNotFoundError, ValueError) as refused:
        leader.tell(EngineFailed(str(refused)))
    except Exception as error:  # noqa: BLE001  whatever it was, rank 0 must get the error
        leader.tell(
            EngineFailed(f"rank {leader.start.rank} failed: {type(error).__name__}: {error}", traceback.format_exc())
        )
    return 1


def follow(leader: Leader) -> None:
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
        runner = Runner(
            decoder,
            allocate_cache(plan.own, size, plan.kv_dtype, plan.device),
            kernels,
            block_size=options.block_size,
            max_num_seqs=plan.max_num_seqs,
            max_model_len=min(plan.max_model_len, size.num_blocks * options.block_size),
            eos_token_ids=plan.eos_token_ids,
            device=plan.device,
        )
    with oom_refused("cold KV blocks in host memory", plan.device):
        if made := make_tier(plan, size):
            _, runner.host = made
    gc.collect()
    gc.freeze()
    before = SchedulerOutput(step=0)
    while True:
        step = leader.expect(RankStep)
        runner.learn(before, step.sampled)
        runner.follow(step.plan)
        before = step.plan


if __name__ == "__main__":
    sys.exit(main())
