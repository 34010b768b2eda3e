"""Whole worker steps on a GPU that is not there, and what each asks of it: `python -m bench.gpu_steps [MODEL]`.

The runtime's own runner executes the scheduler's plans, on fake tensors (`bench.fake_gpu`). Prints launches, copies
and waits of each step, and exits with 1 where one has a fault: a device mismatch, a host read outside of
`upload.Download`, a copy that the host waits for.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.fake_gpu import DEVICE, FakeGpu, Launched, Record, fake_gpu
from bench.figures import Figure, Section
from bench.gpu_models import PUBLISHED
from bench.no_weights import NoWeights
from slipway_runtime.kernels import kv_pages
from slipway_runtime.kernels.attention_plan import MAX_SPLITS, SPLIT, num_splits
from slipway_runtime.kernels.dispatch import kernels_for
from slipway_runtime.layers.lora import LoraBank
from slipway_runtime.messages import (
    AdapterLoad,
    Demote,
    NewSequence,
    Promote,
    SamplingParams,
    SchedulerOutput,
    TokenMasks,
)
from slipway_runtime.models.adapter_weights import HostAdapter, lora_modules
from slipway_runtime.models.config import ModelConfig, parse_config
from slipway_runtime.models.decoder import load_decoder
from slipway_runtime.models.quantize import choose_kv_dtype, matmul_makers
from slipway_runtime.models.sharding import WHOLE, Shard, part_of
from slipway_runtime.worker.adapter_slots import AdapterSlots
from slipway_runtime.worker.collective import Collective
from slipway_runtime.worker.host_arena import HostArena
from slipway_runtime.worker.kv_cache import CacheSize, allocate_cache
from slipway_runtime.worker.pooling import Pooler
from slipway_runtime.worker.runner import Runner

BLOCK = 16
GREEDY = SamplingParams(max_tokens=9, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=9, temperature=0.8, top_p=0.9, top_k=40)
PENALIZED = SamplingParams(max_tokens=9, temperature=0.8, repetition_penalty=1.05, presence_penalty=0.1)
EVERYTHING = SamplingParams(
    max_tokens=9, temperature=0.8, min_p=0.1, repetition_penalty=1.05, min_tokens=6, logit_bias=((1, 1.0), (2, -1.0)),
    logprobs=5, stop_token_ids=(3,),
)  # fmt: skip


class Machine:
    """A runner whose weights mean nothing; row n has the blocks of its own."""

    def __init__(
        self,
        config: ModelConfig,
        device: torch.device,
        *,
        rows: int = 256,
        longest: int = 2048,
        dtype: torch.dtype = torch.bfloat16,
        quantization: str = "none",
        kv_dtype: str = "auto",
        deterministic: bool = False,
        adapters: int = 0,
        share: Shard = WHOLE,
        pooling: str = "",
    ) -> None:
        self.config, self.rows, self.longest = config, rows, longest
        self._device = device
        kernels = kernels_for(device, dtype, deterministic=deterministic)
        own = part_of(config, share.size)
        makers = matmul_makers(quantization, deterministic=deterministic, device=device)
        with torch.inference_mode():
            weights: Any = NoWeights(dtype, config, device)
            decoder = load_decoder(config, weights, kernels, longest, makers, share, scores_tokens=not pooling)
            self._slots = self._adapters(own, decoder, kernels, adapters, dtype, deterministic) if adapters else None
            size = CacheSize(rows * -(-longest // BLOCK), BLOCK, 0)
            self.caches = allocate_cache(own, size, choose_kv_dtype(kv_dtype, dtype), device)
        self.runner = Runner(
            decoder, self.caches, kernels, block_size=BLOCK, max_num_seqs=rows, max_model_len=longest,
            eos_token_ids=config.eos_token_ids, device=device, adapters=self._slots,
        )  # fmt: skip
        if pooling:
            self.runner.pooler = Pooler(pooling, rows, config.hidden_size, device)
        block_bytes = sum(cache[0].nbytes for cache in self.caches)
        self.runner.host = HostArena(2, block_bytes, config.num_layers, device)

    def close(self) -> None:
        """Release weights, KV and graphs, also where something still refers to the machine."""
        self.runner.graphs, self.runner.host = None, None
        self.caches.clear()
        del self.runner.decoder

    def prepare(
        self,
        new: list[int],
        computed: list[int],
        params: SamplingParams = GREEDY,
        *,
        run: Callable[[SchedulerOutput], object] | None = None,
        slot: int = -1,
        grammar: bool = False,
        grows: bool = False,
        **more: Any,
    ) -> SchedulerOutput:
        """Bring rows 0, 1, … to so many computed tokens; the plan of a step that gives them so many new ones.

        run: executes what comes before it. slot: of every row's adapter. grows: the rows get the blocks of their new
        tokens in this step. more: fields of the plan.
        """
        run = run or self.runner.execute
        order = sorted(range(len(new)), key=lambda row: new[row] != 1)
        drafts = more.get("drafts")
        known = [computed[row] + new[row] - (len(drafts[row]) if drafts else 0) for row in range(len(new))]
        # Only a sequence without output has logprobs of its prompt.
        prompts = [max(tokens - (5 if params.prompt_logprobs is None else 0), 1) for tokens in known]
        width = -(-self.longest // BLOCK)
        before = SchedulerOutput(
            step=0,
            adapter_loads=(AdapterLoad(slot, f"adapter-{slot}"),) if slot >= 0 else (),
            new_rows=tuple(
                NewSequence(row=row, token_ids=(1,) * known[row], num_prompt_tokens=prompts[row],
                            params=params, adapter_slot=slot, grammar=grammar)
                for row in order
            ),
        )  # fmt: skip
        blocks = [tuple(range(1 + row * width, 1 + (row + 1) * width)) for row in range(len(new))]
        begun = [row for row in order if computed[row]]
        first = [-(-computed[row] // BLOCK) if grows else width if computed[row] else 0 for row in range(len(new))]
        last_block = [-(-(computed[row] + new[row]) // BLOCK) if grows else width for row in range(len(new))]
        last = SchedulerOutput(  # the step before: rows that have computed tokens have blocks, and sampled
            step=0,
            rows=tuple(begun),
            num_computed=tuple(computed[row] - 1 for row in begun),
            num_new=(1,) * len(begun),
            new_blocks=tuple(blocks[row][: first[row]] for row in begun),
            samples=(True,) * len(begun),
        )
        plan = SchedulerOutput(
            step=1,
            rows=tuple(order),
            num_computed=tuple(computed[row] for row in order),
            num_new=tuple(new[row] for row in order),
            new_blocks=tuple(blocks[row][first[row] : last_block[row]] for row in order),
            samples=(True,) * len(new),
            **more,
        )
        run(before)
        run(last)
        return plan

    def _adapters(
        self, own: ModelConfig, decoder: Any, kernels: Any, count: int, dtype: torch.dtype, deterministic: bool
    ) -> AdapterSlots:
        bank = LoraBank(
            [linear for layer in decoder.layers for linear in layer.linears], kernels,
            num_slots=count, max_rank=16, dtype=dtype, device=self._device, deterministic=deterministic,
        )  # fmt: skip
        slots = AdapterSlots(bank, self.rows)
        matrices = {
            name: tuple(
                torch.empty(16, size, dtype=dtype, pin_memory=self._device.type == "cuda") for size in (columns, rows)
            )
            for name, (rows, columns) in lora_modules(own).items()
        }
        for slot in range(count):
            slots.keep(HostAdapter(digest=f"adapter-{slot}", rank=16, matrices=matrices, bytes=0))
        return slots


def plan_after(plan: SchedulerOutput, chunk: int = 1) -> SchedulerOutput:
    """The step after that one: decode, but for the last row, which gets `chunk` tokens; with several it has no sample.

    Its rows have their blocks already.
    """
    others = len(plan.rows) - 1
    return SchedulerOutput(
        step=plan.step + 1, rows=plan.rows, num_new=(*(1,) * others, chunk),
        samples=(*(True,) * others, chunk == 1),
        num_computed=tuple(sum(one) for one in zip(plan.num_computed, plan.num_new, strict=True)),
        new_blocks=((),) * len(plan.rows),
    )  # fmt: skip


class FakeMachine(Machine):
    """A machine on the fake GPU, which records what each step asks of it."""

    def __init__(
        self,
        gpu: FakeGpu,
        config: ModelConfig,
        *,
        graphs: bool = False,
        ranks: int = 1,
        rank: int = 1,
        **settings: Any,
    ) -> None:
        self.gpu = gpu
        collective = Collective(rank, ranks, DEVICE)
        collective._group = FakeGroup(gpu)
        share = WHOLE if ranks == 1 else Shard(rank, ranks, collective.sum, collective.gather)
        super().__init__(config, DEVICE, share=share, **settings)
        self._own = part_of(config, ranks)
        gpu.caches = {cache.untyped_storage()._cdata for cache in self.caches}
        if graphs:
            self.runner.capture_graphs(gpu.capture)

    def step(
        self,
        new: list[int],
        computed: list[int],
        params: SamplingParams = GREEDY,
        *,
        without_sampling: bool = False,
        **more: Any,
    ) -> Record:
        """What a step with so many new tokens for rows 0, 1, … asks of the device.

        without_sampling: as a rank that samples nothing. more: as for `prepare`.
        """
        run = self.runner.execute_without_sampling if without_sampling else self.runner.execute
        keys, products = self._attention(new, computed, decode=True)
        parts = self._parts(new, computed)
        self.gpu.attention = {
            "_decode": Launched(keys + parts, products, keys),
            "_merge": Launched(parts),
            "_extend": Launched(*self._attention(new, computed, decode=False)),
            "_extend_in_order": Launched(*self._attention(new, computed, decode=None)),
        }
        self._last = self.prepare(new, computed, params, run=run, **more)
        with self.gpu.step() as record:
            run(self._last)
        return record

    def ahead(self, steps: int, chunk: int = 1) -> list[Record]:
        """So many steps after the last step (`plan_after`), each launched before anything of the one before is read."""
        records, pending, plan = [], [], self._last
        for _ in range(steps):
            plan = plan_after(plan, chunk)
            with self.gpu.step() as record:
                pending.append(self.runner.launch(plan))
            records.append(record)
        for read in pending:
            with self.gpu.step() as record:
                read()
            records.append(record)
        return records

    def _attention(self, new: list[int], computed: list[int], *, decode: bool | None) -> tuple[int, int]:
        """Bytes of keys and values, and operations, of one layer; each key is counted once, queries see half of new.

        decode: of rows of one new token, or of several; None: of both.
        """
        own, cache = self._own, self.caches[0]
        of_a_token = 2 * own.num_kv_heads * kv_pages.head_bytes(own.head_dim, cache.dtype)
        rows = [row for row in zip(new, computed, strict=True) if decode is None or (row[0] == 1) == decode]
        keys = seen = 0
        for layer in range(own.num_layers):  # the mean: launches of all layers have one name
            window = own.window_of(layer) or self.longest
            keys += sum(min(count + past, window + count) for count, past in rows)
            seen += sum(count * min(past + (count + 1) // 2, window) for count, past in rows)
        layers = own.num_layers
        return of_a_token * keys // layers, 4 * own.num_q_heads * own.head_dim * seen // layers

    def _parts(self, new: list[int], computed: list[int]) -> int:
        """Bytes of partial results: what each split of a decoded row leaves for the merge."""
        lengths = np.array([past + 1 for count, past in zip(new, computed, strict=True) if count == 1], dtype=np.int64)
        splits = int(num_splits(lengths, SPLIT, MAX_SPLITS).sum())
        return 4 * splits * self._own.num_q_heads * (self._own.head_dim + 2)


class FakeGroup:
    """A process group of NCCL: each collective is one kernel, for which the stream waits, not the host."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu

    def allreduce(self, tensors: list[Tensor]) -> "FakeGroup":
        """As of torch's process groups."""
        self._gpu.launch("all_reduce", tensors)
        return self

    def _allgather_base(self, parts: Tensor, x: Tensor) -> "FakeGroup":
        self._gpu.launch("all_gather", [x, parts])
        return self

    def wait(self) -> None:
        """The stream waits."""


def with_layers(config: ModelConfig, layers: int) -> ModelConfig:
    """The same model with so many layers: those beyond the first do the same again."""
    from dataclasses import replace

    return replace(config, num_layers=layers)


DECODE, PROMPT, MIXED = ([1] * 256, [1000] * 256), ([700, 300], [0, 512]), ([1, 1, 300, 17], [99, 1023, 512, 0])
SMALL = ([1, 1, 100, 17], [99, 1023, 512, 16])  # a captured step has room for it, and it has no new blocks
GROWING = ([1] * 256, [1008] * 256)  # each row needs a block for its new token
DRAFTS = {"drafts": ((7, 7, 7, 7), (7, 7), (), ())}
# name -> (settings of the machine, new tokens and computed tokens of the rows, what else the step is given)
STEPS: dict[str, tuple[dict[str, Any], tuple[list[int], list[int]], dict[str, Any]]] = {
    "prefill": ({}, PROMPT, {}),
    "mixed": ({}, MIXED, {}),
    "decode 256": ({}, DECODE, {}),
    "decode 256 sampled": ({}, DECODE, {"params": SAMPLED}),
    "decode 256 penalties": ({}, DECODE, {"params": PENALIZED}),
    "decode 256 bias, min_tokens, penalties, logprobs": ({}, DECODE, {"params": EVERYTHING}),
    "decode 256 recorded": ({"graphs": True}, DECODE, {"params": SAMPLED}),
    "decode 256 recorded, adapters": ({"graphs": True, "adapters": 4}, DECODE, {"params": SAMPLED, "slot": 1}),
    "decode 250 recorded": ({"graphs": True}, ([1] * 250, [1000] * 250), {}),
    "verify": ({}, ([5, 3, 1, 1], [40, 1023, 99, 7]), DRAFTS),
    "verify, penalties and logprobs": ({}, ([5, 3, 1, 1], [40, 1023, 99, 7]), {**DRAFTS, "params": EVERYTHING}),
    "verify recorded": ({"graphs": True}, ([5, 3, 1, 1], [40, 1023, 99, 7]), DRAFTS),
    "verify recorded, adapters": ({"graphs": True, "adapters": 4}, ([5, 3, 1, 1], [40, 1023, 99, 7]), {
        **DRAFTS, "slot": 1,
    }),
    "mixed, small": ({}, SMALL, {}),
    "mixed, small, recorded": ({"graphs": True}, SMALL, {}),
    "mixed, small, recorded, adapters": ({"graphs": True, "adapters": 4}, SMALL, {"slot": 2}),
    "verify, 256 rows": ({}, ([3] * 256, [1000] * 256), {"drafts": ((7, 7),) * 256}),
    "decode 256 recorded, tables grow": ({"graphs": True}, GROWING, {"grows": True}),
    "adapters": ({"adapters": 4}, MIXED, {"slot": 2}),
    "adapters, one is loaded": ({"adapters": 4}, MIXED, {"slot": 2, "adapter_loads": (AdapterLoad(3, "adapter-3"),)}),
    "adapters, one is replaced": ({"adapters": 4, "graphs": True}, DECODE, {
        "slot": 2, "adapter_loads": (AdapterLoad(1, "adapter-1"), AdapterLoad(1, "adapter-3")),
    }),
    "blocks to host memory and back": ({}, DECODE, {"host_moves": (Demote(3, 1), Demote(4, 2), Promote(1, 9))}),
    "prompt logprobs": ({}, PROMPT, {"params": SamplingParams(max_tokens=9, prompt_logprobs=2, logprobs=1)}),
    "grammar": ({}, ([1] * 3, [100] * 3), {
        "params": EVERYTHING, "grammar": True, "masks": TokenMasks((0, 1), b"\xff" * (2 * 4 * 4748)),
    }),
    "deterministic": ({"deterministic": True}, MIXED, {}),
    "deterministic, 256 rows": ({"deterministic": True}, DECODE, {}),
    "deterministic, adapters": ({"deterministic": True, "adapters": 4}, MIXED, {"slot": 2}),
    "deterministic, 256 rows, recorded": ({"deterministic": True, "graphs": True}, DECODE, {}),
    "deterministic, verify recorded, adapters": (
        {"deterministic": True, "graphs": True, "adapters": 4}, ([5, 3, 1, 1], [40, 1023, 99, 7]),
        {**DRAFTS, "slot": 1},
    ),
    "decode 256 recorded, int8 weights": ({"graphs": True, "quantization": "int8"}, DECODE, {}),
    "decode 256 recorded, fp8 weights": ({"graphs": True, "quantization": "fp8"}, DECODE, {}),
    "decode 256 recorded, int8 KV": ({"graphs": True, "kv_dtype": "int8"}, DECODE, {}),
    "decode 256 recorded, fp8 KV": ({"graphs": True, "kv_dtype": "fp8"}, DECODE, {}),
    "int8 weights": ({"quantization": "int8"}, MIXED, {}),
    "fp8 weights": ({"quantization": "fp8"}, MIXED, {}),
    "AWQ weights": ({"checkpoint": {"quant_method": "awq", "bits": 4, "group_size": 128}}, MIXED, {}),
    "decode 256 recorded, AWQ weights": (
        {"graphs": True, "checkpoint": {"quant_method": "awq", "bits": 4, "group_size": 128}}, DECODE, {},
    ),
    "GPTQ weights": ({"checkpoint": {"quant_method": "gptq", "bits": 4, "group_size": 128}}, MIXED, {}),
    "decode 256 recorded, GPTQ weights": (
        {"graphs": True, "checkpoint": {"quant_method": "gptq", "bits": 4, "group_size": 128}}, DECODE, {},
    ),
    "int8 weights, fp16": ({"quantization": "int8", "dtype": torch.float16}, MIXED, {}),
    "int8 KV": ({"kv_dtype": "int8"}, MIXED, {}),
    "fp8 KV": ({"kv_dtype": "fp8"}, MIXED, {}),
    "rank 0 of 2": ({"ranks": 2, "rank": 0}, DECODE, {"params": SAMPLED}),
    "rank 0 of 2, recorded": ({"ranks": 2, "rank": 0, "graphs": True}, DECODE, {"params": SAMPLED}),
    "rank 0 of 2, mixed": ({"ranks": 2, "rank": 0}, MIXED, {"params": EVERYTHING}),
    "rank 1 of 2": ({"ranks": 2}, DECODE, {"without_sampling": True}),
    "rank 1 of 2, recorded": ({"ranks": 2, "graphs": True}, DECODE, {"without_sampling": True}),
    "rank 1 of 2, mixed, recorded": ({"ranks": 2, "graphs": True}, SMALL, {"without_sampling": True}),
    "rank 1 of 2, mixed": ({"ranks": 2}, MIXED, {"without_sampling": True}),
    "rank 1 of 2, adapters": ({"ranks": 2, "adapters": 4}, MIXED, {"without_sampling": True, "slot": 2}),
    "rank 1 of 2, adapters, recorded": ({"ranks": 2, "graphs": True, "adapters": 4}, DECODE, {
        "without_sampling": True, "slot": 1,
    }),
    "rank 1 of 2, prompt logprobs": ({"ranks": 2}, PROMPT, {
        "without_sampling": True, "params": SamplingParams(max_tokens=9, prompt_logprobs=2, logprobs=1),
    }),
    "embeddings, last token": ({"pooling": "last"}, PROMPT, {}),
    "embeddings, mean": ({"pooling": "mean"}, PROMPT, {}),
    "copy on write": ({}, ([1] * 2, [100] * 2), {"copies": ((3, 9), (4, 10))}),
}  # fmt: skip


@contextmanager
def a_machine(
    model: str | dict[str, Any] = "Qwen3-0.6B",
    layers: int = 2,
    *,
    checkpoint: dict[str, Any] | None = None,
    **settings: Any,
) -> Iterator[FakeMachine]:
    """A machine of a published model with fewer layers. model: a name in PUBLISHED, or a config.json.

    checkpoint: its quantization_config.
    """
    config = PUBLISHED[model] if isinstance(model, str) else model
    if checkpoint is not None:
        config = config | {"quantization_config": checkpoint}
    with fake_gpu() as gpu:
        yield FakeMachine(gpu, with_layers(parse_config(config), layers), **settings)


def run_step(name: str, model: str | dict[str, Any] = "Qwen3-0.6B", layers: int = 2) -> Record:
    """What the named step asks of the device."""
    settings, (new, computed), more = STEPS[name]
    with a_machine(model, layers, **settings) as machine:
        return machine.step(new, computed, **more)


def measure() -> Section:
    """What the host does for each step: launches, and copies that it waits for."""
    figures = []
    for name in STEPS:
        record = run_step(name)
        figures.append(Figure(name, record.count("kernel") + record.count("graph"), "launches", record.summary()))
    return Section("Steps on a GPU that is not there: Qwen3-0.6B with two layers", tuple(figures))


def main() -> int:
    """Print a line for each step."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_steps", description=__doc__)
    parser.add_argument("model", nargs="?", default="Qwen3-0.6B", choices=PUBLISHED)
    parser.add_argument("--layers", type=int, default=2)
    options = parser.parse_args()
    faulty = 0
    for name in STEPS:
        record = run_step(name, options.model, options.layers)
        print(f"{name}: {record.summary()}")
        for sentence in record.faults:
            print(f"  fault: {sentence}")
        faulty += bool(record.faults)
    return int(bool(faulty))


if __name__ == "__main__":
    sys.exit(main())
