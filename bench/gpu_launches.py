"""Records every Triton launch of the runtime's wrappers, without a GPU.

A stub driver that knows only a compute capability is made Triton's active driver, `JITFunction.run` is replaced by a
function that records its arguments, and the wrappers (`gpu.paged_attention`, `gpu.add_lora`, `gpu.sample`, ...) are
called with CPU tensors in the shapes and strides of published models. So the constants, tiles, warps, stages and the
specializations on alignment are those of serving, decided by the code that decides them in serving.
"""

import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

PAGE = 16
BLOCK_SIZES = (8, 64)  # of those that a service may ask for, the least, and more than a tile of keys of few
LIKE = torch.empty(0)
TOKENS = 2048  # of a prefill
MAX_MODEL_LEN = 32_768


@dataclass(frozen=True)
class Model:
    """The sizes of a published model that decide how kernels are compiled."""

    q_heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    inner: int
    vocabulary: int  # columns of the logits, padding included
    tokens: int  # columns that are tokens
    norms: bool = False
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    experts: tuple[int, int] | None = None  # of a layer, and of a token; `inner` is the width of one
    limit: float | None = None  # of a clamped SwiGLU


MODELS = {
    "Llama-3.1-8B": Model(32, 8, 128, 4096, 14336, 128256, 128256),
    "Qwen3-0.6B": Model(16, 8, 128, 1024, 3072, 151936, 151669, norms=True),
    "SmolLM2-135M": Model(9, 3, 64, 576, 1536, 49152, 49152),
    "TinyLlama-1.1B": Model(32, 4, 64, 2048, 5632, 32000, 32000),
    "Qwen2.5-7B": Model(28, 4, 128, 3584, 18944, 152064, 151665),
}
# Head sizes, ratios of heads and vocabularies that no model above has, up to the largest that a GPU is given.
EDGES = {
    "head 80": Model(32, 32, 80, 2560, 6912, 50304, 50304),
    "head 96": Model(32, 32, 96, 3072, 8192, 32064, 32064, window=2047),
    "head 256": Model(8, 4, 256, 2304, 9216, 262144, 262144, window=4096, softcap=50.0),
    "gpt-oss-20b": Model(64, 8, 64, 2880, 2880, 201088, 201088, window=128, sinks=True, experts=(32, 4), limit=7.0),
    "Qwen3-30B-A3B": Model(32, 4, 128, 2048, 768, 151936, 151669, norms=True, experts=(128, 8)),
}
WITH_BLOCK_SIZES = ("Llama-3.1-8B", "gpt-oss-20b")  # whose attention is compiled for other block sizes too
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
KV_DTYPES = ("auto", "fp8", "int8")
USUAL_GROUPS = (128,)  # inputs that share a scale, in four bits
RANKS = (8, 16, 32, 64, 128, 256)


@dataclass
class Launch:
    """One compilation: a kernel with its signature, constants and options for a target; and where it is launched."""

    module: str
    kernel: str
    target: int
    signature: dict[str, str]
    constexprs: dict[tuple[int, ...], Any]
    attrs: dict[tuple[int, ...], Any]
    options: dict[str, Any]
    constants: dict[str, Any]  # by name
    case: str
    grid: tuple[int, ...]
    cases: list[str] = field(default_factory=list)
    dots: bool = False  # tensor cores do its products: of 16 bits, or of tf32 for float32

    @property
    def key(self) -> str:
        """The same for launches that compile to the same code."""
        parts = (
            self.kernel, self.target, sorted(self.signature.items()), sorted(map(str, self.constexprs.items())),
            sorted(map(str, self.attrs.items())), self.options.get("num_warps"), self.options.get("num_stages"),
        )  # fmt: skip
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


class _StubDriver:
    """An active driver that knows a target and nothing else."""

    def __init__(self) -> None:
        self.target = 90

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.target, 32)

    def get_current_device(self) -> int:
        return self.target  # a JITFunction keeps what it compiled by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the stub driver has no {name}: something asked for a real GPU")


class Recorder:
    """Calls the wrappers for a target, and collects what they launch. Replaces Triton's driver in this process."""

    def __init__(self) -> None:
        from slipway_runtime.kernels import tiles

        self._stub = _StubDriver()
        self.launches: dict[str, Launch] = {}
        self.case = ""
        driver.set_active(self._stub)
        recorder = self

        def run(fn: Any, *args: Any, grid: tuple[int, ...], warmup: bool = False, **kwargs: Any) -> None:
            recorder._record(fn, args, grid, kwargs)

        def tuned(kernel: str, *, head_dim: int, itemsize: int, device: torch.device) -> dict[str, int]:
            return tiles.lookup(f"sm{recorder._stub.target}", kernel, head_dim=head_dim, itemsize=itemsize)

        JITFunction.run = run
        tiles.tuned = tuned

    def for_target(self, target: int) -> None:
        """Set the compute capability (times ten) for which later launches are compiled."""
        self._stub.target = target

    def _record(self, fn: Any, args: tuple[Any, ...], grid: tuple[int, ...], kwargs: dict[str, Any]) -> None:
        kwargs["debug"] = kwargs.get("debug", fn.debug) or knobs.runtime.debug
        kwargs["instrumentation_mode"] = knobs.compilation.instrumentation_mode
        kwargs["fpsan_homomorphic_casts"] = knobs.compilation.fpsan_homomorphic_casts
        _, _, _, backend, binder = fn.device_caches[self._stub.target]
        bound, specialization, options = binder(*args, **kwargs)
        options, signature, constexprs, attrs = fn._pack_args(backend, kwargs, bound, specialization, options)
        names = fn.arg_names
        launch = Launch(
            fn.module, fn.fn.__name__, self._stub.target, signature, constexprs, attrs,
            {name: value for name, value in options.__dict__.items() if name != "extern_libs"},
            {names[index[0]]: value for index, value in constexprs.items()},
            self.case, tuple(int(size) for size in grid),
        )  # fmt: skip
        # `_shrink` of float32 waits for its matrices: tensor cores would take it 255 registers, and spills.
        launch.dots = launch.kernel in DOTS and (launch.kernel, signature.get("x")) != ("_shrink", "*fp32")
        known = self.launches.setdefault(launch.key, launch)
        if self.case not in known.cases:
            known.cases.append(self.case)


# Kernels that multiply matrices.
DOTS = frozenset(
    {"_decode", "_extend", "_extend_in_order", "_shrink", "_expand", "_grouped", "_times_codes", "_times_int4"}
)


def record(recorder: Recorder, target: int, model_name: str, dtype_name: str, kv: str, ranks: tuple[int, ...]) -> None:
    """All launches of a model in these types. kv: of KV_DTYPES."""
    recorder.for_target(target)
    model, dtype = (MODELS | EDGES)[model_name], DTYPES[dtype_name]
    for part, steps in (
        (f"{model_name} {dtype_name} KV {kv}", _attention(model, dtype, kv)),
        (f"{model_name} {dtype_name}", _rows(model, dtype)),
        (f"{model_name} {dtype_name} experts", _experts(model, dtype, target)),
        (f"{model_name} {dtype_name} bytes", _byte_products(model, dtype, target) if kv == "auto" else iter(())),
        (f"{model_name} {dtype_name} int4", _int4_products(model, dtype, USUAL_GROUPS) if kv == "auto" else iter(())),
        *((f"{model_name} {dtype_name} rank {rank}", _lora(model, dtype, rank)) for rank in ranks),
    ):
        recorder.case = f"{part} "
        for step in steps:
            recorder.case = f"{part} {step}"


def record_attention(recorder: Recorder, target: int, model_name: str, kv: str, page: int = PAGE) -> None:
    """The launches of a model's attention, in bfloat16. page: block size."""
    recorder.for_target(target)
    part = f"{model_name} bf16 KV {kv}" + (f" blocks of {page}" if page != PAGE else "")
    recorder.case = f"{part} "
    for step in _attention((MODELS | EDGES)[model_name], torch.bfloat16, kv, page):
        recorder.case = f"{part} {step}"


def record_int4(recorder: Recorder, target: int, model_name: str, dtype_name: str) -> None:
    """The products of a model in four bits, in groups of other sizes than most are published in."""
    recorder.for_target(target)
    recorder.case = f"{model_name} {dtype_name} int4 "
    for step in _int4_products((MODELS | EDGES)[model_name], DTYPES[dtype_name], (32, 64, 0)):
        recorder.case = f"{model_name} {dtype_name} int4 {step}"


def record_experts(recorder: Recorder, target: int, model_name: str) -> None:
    """The launches of a mixture of experts, in bfloat16."""
    recorder.for_target(target)
    recorder.case = f"{model_name} bf16 experts "
    for step in _experts((MODELS | EDGES)[model_name], torch.bfloat16, target):
        recorder.case = f"{model_name} bf16 experts {step}"


def record_sampling(recorder: Recorder, target: int, model_name: str) -> None:
    """The launches that sample tokens from a model's logits."""
    from slipway_runtime.kernels import gpu

    model = (MODELS | EDGES)[model_name]
    recorder.for_target(target)
    for samples in (1, 3, 256):
        recorder.case = f"{model_name} sampling {samples}"
        logits = torch.empty(samples, model.vocabulary)[:, : model.tokens]  # as the runner cuts them
        whole, one = torch.zeros(samples, dtype=torch.int64), torch.ones(samples)
        gpu.sample(logits, one, whole, one, one, whole, whole)
        counts = torch.zeros(samples, model.tokens, dtype=torch.int32)
        gpu.penalize_rows(logits, whole, counts, whole, one, one, one)
        gpu.apply_bitmask(logits, whole, torch.zeros(samples, -(-model.tokens // 32), dtype=torch.int32))


def _attention(model: Model, dtype: torch.dtype, kv: str, page: int = PAGE) -> Iterator[str]:
    """Yields the name of each step before it is launched. Steps as `layers.attention` and `layers.rotary` make them.

    page: block size. With another one than usual, one step for each kernel that reads or writes the cache.
    """
    from slipway_runtime.kernels import gpu, gpu_fixed_order, kv_pages
    from slipway_runtime.kernels.reference_attention import Scoring

    heads, kv_heads, d = model.q_heads, model.kv_heads, model.head_dim
    kv_dtype = dtype if kv == "auto" else kv_pages.KV_DTYPES[kv]
    sinks = torch.empty(heads) if model.sinks else None
    scoring = Scoring(model.softcap, sinks) if model.softcap or model.sinks else None
    shape = (2, 9, 2, kv_heads, *kv_pages.page_shape(page, d, kv_dtype))
    cache = torch.empty(shape, dtype=kv_dtype).unbind(0)[1]  # a layer in the middle of the arena
    table = torch.empty(64, 2, d, dtype=dtype)

    def step(computed: list[int], new: list[int], kernels: Any = gpu, plan: Any = None) -> None:
        total = sum(new)
        qkv = torch.empty(total, (heads + 2 * kv_heads) * d, dtype=dtype).view(total, heads + 2 * kv_heads, d)
        rows = table.index_select(0, torch.zeros(total, dtype=torch.int64))
        norms = (torch.empty(d, dtype=dtype), torch.empty(d, dtype=dtype), 1e-6) if model.norms else None
        slots = torch.zeros(total, dtype=torch.int64)
        q = kernels.rope_and_store(qkv, rows[:, :1], rows[:, 1:], cache, slots, heads, norms)
        before, added = np.array(computed, dtype=np.int64), np.array(new, dtype=np.int64)
        blocks = np.zeros((len(new), -(-int((before + added).max()) // page)), dtype=np.int64)
        plan = plan or kernels.plan_attention(before, added, blocks, page, LIKE)
        kv_new = qkv[:, heads:].view(total, 2, kv_heads, d)
        kernels.paged_attention(q, kv_new, cache, plan, d**-0.5, model.window, scoring)

    if page != PAGE:
        yield "decode, prompt and drafts"
        step([8190], [1])
        step([0], [TOKENS])
        step([8190], [5])
        yield "deterministic"
        step([8190], [1], gpu_fixed_order)
        return
    yield "decode 1x100"
    step([99], [1])
    yield "decode 3x8191"
    step([8190] * 3, [1] * 3)
    for size in (1, 8, 256):
        yield f"graph {size}"
        step([99] * size, [1] * size, plan=gpu.plan_for_capture(size, MAX_MODEL_LEN, PAGE, LIKE))
    yield f"prefill {TOKENS}"
    step([0], [TOKENS])
    yield "mixed"
    step([99, 1023, 512, 0], [1, 1, 300, 17])
    yield "drafts"
    step([8190] * 2, [5] * 2)
    yield "deterministic"
    step([99, 1023, 512, 0], [1, 1, 300, 17], gpu_fixed_order)
    step([99], [1], gpu_fixed_order, gpu_fixed_order.plan_for_capture(1, MAX_MODEL_LEN, PAGE, LIKE))
    for tokens in (8, 256):
        yield f"graph with chunks, {tokens} tokens"
        capacity = gpu.chunk_capacity(tokens, 256)
        static = [torch.from_numpy(array) for array in gpu.empty_chunks(capacity, 0)[2:]]
        whole = gpu.plan_for_capture(capacity.rows, MAX_MODEL_LEN, PAGE, LIKE)
        step([99], [tokens], plan=gpu.with_chunks(whole, capacity, *static))


def _rows(model: Model, dtype: torch.dtype) -> Iterator[str]:
    from slipway_runtime.kernels import gpu

    for tokens in (1, 3, TOKENS):
        yield f"rows {tokens}"
        x, weight = torch.empty(tokens, model.hidden, dtype=dtype), torch.empty(model.hidden, dtype=dtype)
        gpu.rms_norm(x, weight, 1e-5)
        gpu.add_rms_norm(x, torch.empty_like(x), weight, 1e-5)
        gpu.swiglu(torch.empty(tokens, 2 * model.inner, dtype=dtype))
        gpu.geglu(torch.empty(tokens, 2 * model.inner, dtype=dtype))


def _experts(model: Model, dtype: torch.dtype, target: int) -> Iterator[str]:
    """The products of a mixture of experts, small in all that compilation does not depend on."""
    from slipway_runtime.kernels import gpu
    from slipway_runtime.kernels.reference_experts import ExpertWeights

    if model.experts is None:
        return
    count, per_token = model.experts
    weights = ExpertWeights(
        torch.empty(count, 2 * model.inner, model.hidden, dtype=dtype, device="meta"),
        torch.empty(count, model.hidden, model.inner, dtype=dtype, device="meta"),
        torch.empty(count, 2 * model.inner, dtype=dtype, device="meta") if model.sinks else None,
        torch.empty(count, model.hidden, dtype=dtype, device="meta") if model.sinks else None,
        model.limit,
    )
    sizes = (2 * model.inner, model.hidden), (model.hidden, model.inner)
    biases = weights.gate_up_bias, weights.down_bias
    forms = {"": weights}
    if model.sinks:  # gpt-oss is published so
        forms[" in MXFP4"] = ExpertWeights(*(_mxfp4(count, *size, dtype) for size in sizes), *biases, model.limit)
    elif target >= 89:
        forms[" in FP8 blocks"] = ExpertWeights(*(_float8_blocks(count, *size, dtype) for size in sizes))
    for tokens, (form, of) in itertools.product((1, 256, TOKENS), forms.items()):
        yield f"tokens {tokens}{form}"
        x, scores = torch.empty(tokens, model.hidden, dtype=dtype), torch.empty(tokens, count, dtype=dtype)
        gpu.mix_experts(x, *gpu.choose_experts(scores, per_token, normalize=True), of)


def _mxfp4(count: int, out_size: int, in_size: int, dtype: torch.dtype) -> Any:
    from slipway_runtime.kernels.reference_experts import Mxfp4Matrices

    codes, scales = (
        torch.empty(count, out_size, in_size // columns, dtype=torch.uint8, device="meta") for columns in (2, 32)
    )
    return Mxfp4Matrices(codes, scales, dtype)


def _float8_blocks(count: int, out_size: int, in_size: int, dtype: torch.dtype) -> Any:
    from slipway_runtime.kernels.reference_experts import ByteMatrices

    codes = torch.empty(count, out_size, in_size, dtype=torch.float8_e4m3fn, device="meta")
    return ByteMatrices(codes, torch.empty(count, out_size, in_size // 128, device="meta"), 128, dtype)


def _byte_products(model: Model, dtype: torch.dtype, target: int) -> Iterator[str]:
    """Products with one-byte weights: int8, and float8, which older cards read as bytes."""
    from slipway_runtime.kernels.byte_products import numbers_of_codes, rows_as_float8, times_codes

    if dtype == torch.float32:
        return
    for name, size, out in _linears(model):
        for tokens in (1, 32, 256):
            yield f"{name} {tokens}"
            codes, scales = torch.empty(out, size, dtype=torch.int8), torch.empty(out)
            times_codes(torch.empty(tokens, size, dtype=dtype), codes, scales)
            if target >= 89:  # `ScaledFp8.fits`
                rows_as_float8(torch.empty(tokens, size, dtype=dtype))
            yield f"float8 {name} {tokens}"
            float8 = codes.view(torch.float8_e4m3fn if target >= 89 else torch.uint8)  # `readable`
            times_codes(torch.empty(tokens, size, dtype=dtype), float8, scales)
            yield f"float8 blocks {name} {tokens}"
            blocks = float8, torch.empty(out, -(-size // 128))
            times_codes(torch.empty(tokens, size, dtype=dtype), *blocks, 128)
            numbers_of_codes(*blocks, 128, dtype)


def _int4_products(model: Model, dtype: torch.dtype, groups: tuple[int, ...]) -> Iterator[str]:
    """Products with four-bit weights. groups: of so many inputs, where they divide a matrix; 0: one for all of them."""
    from slipway_runtime.kernels.int4_products import Packed, numbers_of_int4, times_int4

    if dtype == torch.float32:
        return
    for name, size, out in _linears(model):
        for group in (one or size for one in groups if size % (one or size) == 0):
            scales, zeros = torch.empty(size // group, out), torch.empty(size // group, out, dtype=torch.uint8)
            weight = Packed(torch.empty(out, size // 2, dtype=torch.uint8), scales, zeros, group)
            for tokens in (1, 32, 256):
                yield f"{name} {tokens} groups of {group}"
                times_int4(torch.empty(tokens, size, dtype=dtype), weight)
            numbers_of_int4(weight, dtype)


def _linears(model: Model) -> tuple[tuple[str, int, int], ...]:
    """Name, inputs and outputs of two of a layer's matrices."""
    return (
        ("qkv", model.hidden, (model.q_heads + 2 * model.kv_heads) * model.head_dim),
        ("down", model.inner, model.hidden),
    )


def _lora(model: Model, dtype: torch.dtype, rank: int, slots: int = 8) -> Iterator[str]:
    from slipway_runtime.kernels import gpu
    from slipway_runtime.kernels.reference_lora import LoraWeights

    heads, kv_heads, d = model.q_heads, model.kv_heads, model.head_dim
    linears = {
        "qkv": (model.hidden, (heads * d, kv_heads * d, kv_heads * d)),
        "down": (model.inner, (model.hidden,)),
    }
    for name, (size, outs) in linears.items():
        weights = LoraWeights(size, outs, num_slots=slots, max_rank=rank, dtype=dtype, device=LIKE.device)
        weights.slots = 1
        for tokens in (3, 64):
            yield f"{name} {tokens}"
            x, y = torch.empty(tokens, size, dtype=dtype), torch.empty(tokens, sum(outs), dtype=dtype)
            gpu.add_lora(x, y, weights, gpu.plan_lora(np.zeros(tokens, dtype=np.int64), slots, LIKE))
            gpu.add_lora(x, y, weights, gpu.plan_lora_for_capture(tokens, slots, LIKE))


def compile_launch(launch: Launch) -> Any:
    """The kernel that Triton compiles for the target. Raises what the compiler raises."""
    import importlib

    from triton.compiler import ASTSource

    fn = getattr(importlib.import_module(launch.module), launch.kernel)
    return triton.compile(
        ASTSource(fn, launch.signature, launch.constexprs, launch.attrs),
        target=GPUTarget("cuda", launch.target, 32),
        options=launch.options,
    )
