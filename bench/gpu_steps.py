"""Whole worker steps on a GPU that is not there, and what each asks of it: `python -m bench.gpu_steps [MODEL]`.

The runtime's own runner executes the scheduler's plans, on fake tensors (`bench.fake_gpu`). Prints launches, copies
and waits of each step, and exits with 1 where one has a fault: a device mismatch, a host read outside of
`upload.download`, a copy that the host waits for.
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
from slipway_runtime.kernels import kv_pages
from slipway_runtime.kernels.attention_plan import MAX_SPLITS, SPLIT, num_splits
from slipway_runtime.kernels.dispatch import kernels_for
from slipway_runtime.layers.lora import LoraBank
from slipway_runtime.messages import AdapterLoad, NewSequence, SamplingParams, SchedulerOutput, TokenMasks
from slipway_runtime.models.adapters import HostAdapter, lora_modules
from slipway_runtime.models.config import ModelConfig, parse_config
from slipway_runtime.models.decoder import load_decoder
from slipway_runtime.models.quantize import choose_kv_dtype, head_maker, matmul_maker
from slipway_runtime.models.quantized_checkpoint import parse_quantization
from slipway_runtime.models.sharding import WHOLE, Share, part_of
from slipway_runtime.worker.adapters import AdapterSlots
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
# As published: huggingface.co, config.json of the repositories of these names.
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": {
        "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936,
        "tie_word_embeddings": True, "max_position_embeddings": 40_960, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000,
        "torch_dtype": "bfloat16", "eos_token_id": 151_645,
    },
    "Llama-3.1-8B": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256, "tie_word_embeddings": False,
        "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "torch_dtype": "bfloat16",
        "eos_token_id": 128_001, "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
}  # fmt: skip


class NoWeights:
    """A checkpoint whose tensors have shapes, and on a real device numbers that mean nothing."""

    def __init__(self, dtype: torch.dtype, config: ModelConfig, device: torch.device = DEVICE) -> None:
        """Of a model whose experts may be MXFP4, or its layers float8 in blocks of 128 × 128."""
        form = parse_quantization(config.quantization)
        self.dtype = dtype
        self.device = device
        self._in_mxfp4 = form is not None and form.method == "mxfp4"
        self._in_float8 = lora_modules(config) if form is not None and form.method == "fp8" else {}
        self._shapes: dict[str, tuple[int, ...]] = {}

    def __contains__(self, name: str) -> bool:
        """Every matrix; of the tensors that only some checkpoints have, codes and scales."""
        module, _, leaf = name.rpartition(".")
        is_scale = module in self._in_float8 and leaf == "weight_scale_inv"
        return leaf == "weight" or is_scale or (self._in_mxfp4 and name.endswith(("_blocks", "_scales")))

    def dtype_of(self, name: str) -> torch.dtype:
        """As `Checkpoint.dtype_of`."""
        return torch.float8_e4m3fn if name.removesuffix(".weight") in self._in_float8 else self.dtype

    def check_shape(self, name: str, *shape: int) -> None:
        """As `Checkpoint.check_shape`; any shape is right."""
        self._shapes[name] = shape

    def take_raw(self, name: str, *, taken: bool = True) -> Tensor:
        """As `Checkpoint.take_raw`, for codes and scales."""
        module, _, leaf = name.rpartition(".")
        if module not in self._in_float8:
            return torch.empty(self._shapes[name], dtype=torch.uint8, device=self.device)
        out_size, in_size = self._in_float8[module]
        if leaf == "weight":
            return torch.empty(out_size, in_size, dtype=torch.float8_e4m3fn, device=self.device)
        return torch.empty(-(-out_size // 128), -(-in_size // 128), device=self.device)

    def take(self, name: str, *shape: int, rows: slice | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """As `Checkpoint.take`."""
        first = shape[0] if rows is None else len(range(*rows.indices(shape[0])))
        # Small: sums of many products stay finite, and no branch of sampling meets a NaN.
        return torch.empty((first, *shape[1:]), dtype=dtype or self.dtype, device=self.device).fill_(0.01)

    def in_parallel(self, make: Any, count: int) -> list[Any]:
        """As `Checkpoint.in_parallel`."""
        return [make(index) for index in range(count)]

    def ignore(self, name: str) -> None:
        """As `Checkpoint.ignore`."""

    def ignore_if(self, is_ignored: Any) -> None:
        """As `Checkpoint.ignore_if`."""


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
        share: Share = WHOLE,
        pooling: str = "",
    ) -> None:
        self.config, self.rows, self.longest = config, rows, longest
        self._device = device
        kernels = kernels_for(device, dtype, deterministic=deterministic)
        own = part_of(config, share.size)
        makers = [make(quantization, deterministic=deterministic, device=device) for make in (matmul_maker, head_maker)]
        with torch.inference_mode():
            weights: Any = NoWeights(dtype, config, device)
            decoder = load_decoder(
                config, weights, kernels, longest, dtype, device, *makers, share, scores_tokens=not pooling
            )
            self._slots = self._adapters(own, decoder, kernels, adapters, dtype, deterministic) if adapters else None
            size = CacheSize(rows * -(-longest // BLOCK), BLOCK, 0)
            self.caches = allocate_cache(own, size, choose_kv_dtype(kv_dtype, dtype), device)
        self.runner = Runner(
            decoder, self.caches, kernels, block_size=BLOCK, max_num_seqs=rows, max_model_len=longest,
            eos_token_ids=config.eos_token_ids, device=device, adapters=self._slots,
        )  # fmt: skip
        if pooling:
            self.runner.pooler = Pooler(pooling, rows, config.hidden_size, device)
        self.runner.host = HostArena(2, 1 << 20, config.num_layers, device)

    def close(self) -> None:
        """Let go of weights, KV and graphs, whoever still refers to the machine."""
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
        **more: Any,
    ) -> SchedulerOutput:
        """Bring rows 0, 1, … to so many computed tokens; the plan of a step that gives them so many new ones.

        run: executes what comes before it. slot: of every row's adapter. more: fields of the plan.
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
        last = SchedulerOutput(  # the step before: rows that have computed tokens have blocks, and sampled
            step=0,
            rows=tuple(begun),
            num_computed=tuple(computed[row] - 1 for row in begun),
            num_new=(1,) * len(begun),
            new_blocks=tuple(blocks[row] for row in begun),
            samples=(True,) * len(begun),
        )
        plan = SchedulerOutput(
            step=1,
            rows=tuple(order),
            num_computed=tuple(computed[row] for row in order),
            num_new=tuple(new[row] for row in order),
            new_blocks=tuple(() if computed[row] else blocks[row] for row in order),
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
            name: (torch.empty(16, columns, dtype=dtype), torch.empty(16, rows, dtype=dtype))
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
        self, gpu: FakeGpu, config: ModelConfig, *, graphs: bool = False, ranks: int = 1, **settings: Any
    ) -> None:
        self.gpu = gpu
        share = WHOLE if ranks == 1 else Share(1, ranks, self._sum, self._gather)
        super().__init__(config, DEVICE, share=share, **settings)
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

    def _attention(self, new: list[int], computed: list[int], *, decode: bool) -> tuple[int, int]:
        """Bytes of keys and values, and operations, of one layer; each key is counted once, queries see half of new."""
        config, rows = self.config, [pair for pair in zip(new, computed, strict=True) if (pair[0] == 1) == decode]
        of_a_token = 2 * config.num_kv_heads * kv_pages.head_bytes(config.head_dim, self.caches[0].dtype)
        seen = sum(count * (past + (count + 1) // 2) for count, past in rows)
        return of_a_token * sum(map(sum, rows)), 4 * config.num_q_heads * config.head_dim * seen

    def _parts(self, new: list[int], computed: list[int]) -> int:
        """Bytes of partial results: what each split of a decoded row leaves for the merge."""
        lengths = np.array([past + 1 for count, past in zip(new, computed, strict=True) if count == 1], dtype=np.int64)
        splits = int(num_splits(lengths, SPLIT, MAX_SPLITS).sum())
        return 4 * splits * self.config.num_q_heads * (self.config.head_dim + 2)

    def _sum(self, x: Tensor) -> Tensor:
        self.gpu.launch("all_reduce", [x])
        return x

    def _gather(self, x: Tensor) -> Tensor:
        parts = x.new_empty(len(x), 2 * x.shape[1])
        self.gpu.launch("all_gather", [x, parts])
        return parts


def with_layers(config: ModelConfig, layers: int) -> ModelConfig:
    """The same model with so many layers: those beyond the first do the same again."""
    from dataclasses import replace

    return replace(config, num_layers=layers)


DECODE, PROMPT, MIXED = ([1] * 256, [1000] * 256), ([700, 300], [0, 512]), ([1, 1, 300, 17], [99, 1023, 512, 0])
SMALL = ([1, 1, 100, 17], [99, 1023, 512, 16])  # a captured step has room for it, and it has no new blocks
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
    "adapters": ({"adapters": 4}, MIXED, {"slot": 2}),
    "prompt logprobs": ({}, PROMPT, {"params": SamplingParams(max_tokens=9, prompt_logprobs=2, logprobs=1)}),
    "grammar": ({}, ([1] * 3, [100] * 3), {
        "params": EVERYTHING, "grammar": True, "masks": TokenMasks((0, 1), b"\xff" * (2 * 4 * 4748)),
    }),
    "deterministic": ({"deterministic": True}, MIXED, {}),
    "deterministic, 256 rows": ({"deterministic": True}, DECODE, {}),
    "decode 256 recorded, int8 weights": ({"graphs": True, "quantization": "int8"}, DECODE, {}),
    "decode 256 recorded, fp8 weights": ({"graphs": True, "quantization": "fp8"}, DECODE, {}),
    "decode 256 recorded, int8 KV": ({"graphs": True, "kv_dtype": "int8"}, DECODE, {}),
    "decode 256 recorded, fp8 KV": ({"graphs": True, "kv_dtype": "fp8"}, DECODE, {}),
    "int8 weights": ({"quantization": "int8"}, MIXED, {}),
    "fp8 weights": ({"quantization": "fp8"}, MIXED, {}),
    "int8 weights, fp16": ({"quantization": "int8", "dtype": torch.float16}, MIXED, {}),
    "int8 KV": ({"kv_dtype": "int8"}, MIXED, {}),
    "fp8 KV": ({"kv_dtype": "fp8"}, MIXED, {}),
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
def a_machine(model: str | dict[str, Any] = "Qwen3-0.6B", layers: int = 2, **settings: Any) -> Iterator[FakeMachine]:
    """A machine of a published model with fewer layers. model: a name in CONFIGS, or a config.json."""
    config = CONFIGS[model] if isinstance(model, str) else model
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
    parser.add_argument("model", nargs="?", default="Qwen3-0.6B", choices=CONFIGS)
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
