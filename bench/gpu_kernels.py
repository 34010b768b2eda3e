"""What `bench.gpu` times of single kernels: attention beside torch's own, norms, activations, sampling. Random numbers.

Attention is replayed from a CUDA graph, as the runtime does it, so that the host's launches do not count.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bench.figures import Figure
from slipway_runtime.kernels import kv_pages

PAGE = 16


@dataclass(frozen=True)
class Ceilings:
    """What this card reaches: bytes a second of a copy, read and written; operations a second of a bf16 product."""

    bandwidth: float
    peak: float


@dataclass(frozen=True)
class Shape:
    """The dimensions of a model that its kernels depend on."""

    name: str
    hidden: int
    inner: int
    q_heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int

    def kv_bytes(self, tokens: int, dtype: torch.dtype) -> int:
        """Bytes of the keys and values of one layer."""
        return 2 * self.kv_heads * kv_pages.head_bytes(self.head_dim, dtype) * tokens


@dataclass(frozen=True)
class Timer:
    """How the median time of a call is taken, in seconds."""

    eager: Callable[[Callable[[], object]], float]
    graphed: Callable[[Callable[[], object]], float]


SHAPES = (
    Shape("Qwen3-0.6B", 1024, 3072, 16, 8, 128, 151_936),
    Shape("Llama-3.1-8B", 4096, 14_336, 32, 8, 128, 128_256),
)
# Tokens of each row's context. In the last batch one row has a third of all tokens.
CONTEXTS = {
    "1 × 8192": [8192],
    "32 × 2048": [2048] * 32,
    "256 × 1024": [1024] * 256,
    "255 × 1024 and 131,072": [1024] * 255 + [131_072],
}
KV = {"bf16": torch.bfloat16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
PROMPTS = (512, 2048, 8192)


def on_gpu() -> Timer:
    """By CUDA's events; the L2 cache is flushed between eager runs."""
    from triton.testing import do_bench, do_bench_cudagraph

    def graphed(run: Callable[[], object]) -> float:
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            return float(do_bench_cudagraph(run, rep=50, return_mode="median")) / 1e3

    return Timer(lambda run: float(do_bench(run, warmup=25, rep=100, return_mode="median")) / 1e3, graphed)


def ceilings(device: torch.device, timer: Timer, *, nbytes: int = 1 << 30, side: int = 8192) -> Ceilings:
    """Measure a copy of `nbytes` bytes, and the product of two matrices of `side` rows and columns."""
    source = torch.randint(256, (nbytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = timer.eager(lambda: target.copy_(source))
    a = torch.randn(side, side, device=device).to(torch.bfloat16)
    return Ceilings(2 * nbytes / copied, 2 * side**3 / timer.eager(lambda: a @ a))


def decode(
    shape: Shape, device: torch.device, timer: Timer, known: Ceilings, contexts: dict[str, list[int]], kv: Sequence[str]
) -> Iterator[Figure]:
    """One layer's attention of one new token a row; its lower bound is the keys and values, read once."""
    for name, lengths in contexts.items():
        for dtype in kv:
            seconds = timer.graphed(attention(shape, device, lengths, [1] * len(lengths), KV[dtype]))
            moved = shape.kv_bytes(sum(lengths), KV[dtype])
            share = 100 * moved / seconds / known.bandwidth
            yield Figure(
                f"{shape.name} decode attention, {name}, KV {dtype}", share, "% of a copy", f"{seconds * 1e6:.1f} µs"
            )


def prefill(
    shape: Shape, device: torch.device, timer: Timer, known: Ceilings, lengths: Sequence[int]
) -> Iterator[Figure]:
    """One layer's attention of a whole prompt, beside torch's own on keys and values that are not paged."""
    for length in lengths:
        seconds = timer.graphed(attention(shape, device, [length], [length], torch.bfloat16))
        flops = 2 * length * length * shape.q_heads * shape.head_dim  # two products, half of each: causal
        note = f"{seconds * 1e6:.1f} µs, {100 * flops / seconds / known.peak:.0f} % of a product's peak"
        yield Figure(f"{shape.name} prefill attention, {length}", flops / seconds / 1e12, "TFLOP/s", note)
        for peer, run in _peers(shape, device, length):
            try:
                theirs = timer.graphed(run)
            except RuntimeError as error:
                note = f"no figure: {str(error).splitlines()[0][:80]}"
                yield Figure(f"{shape.name} prefill attention, {length}: {peer} ÷ ours", math.nan, "×", note)
                continue
            yield Figure(
                f"{shape.name} prefill attention, {length}: {peer} ÷ ours", theirs / seconds, "×",
                f"{flops / theirs / 1e12:.0f} TFLOP/s; above 1: ours is faster",
            )  # fmt: skip


def _peers(shape: Shape, device: torch.device, length: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """torch's FlashAttention-2 and cuDNN's attention."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    q, k, v = (
        torch.randn(1, heads, length, shape.head_dim, device=device).to(torch.bfloat16)
        for heads in (shape.q_heads, shape.kv_heads, shape.kv_heads)
    )
    for name, backend in (("FlashAttention-2", SDPBackend.FLASH_ATTENTION), ("cuDNN", SDPBackend.CUDNN_ATTENTION)):

        def run(backend: SDPBackend = backend) -> Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        yield name, run


def attention(
    shape: Shape, device: torch.device, lengths: Sequence[int], new: Sequence[int], dtype: torch.dtype
) -> Callable[[], object]:
    """Returns a call of our attention. lengths, new: tokens of each row, and how many are new. dtype: of the cache."""
    from slipway_runtime.kernels import gpu

    total, added = np.array(lengths), np.array(new)
    blocks = -(-total // PAGE)
    cache = random_pages(int(blocks.sum()) + 1, shape, device, dtype)
    tables = np.zeros((len(total), int(blocks.max())), dtype=np.int64)
    tables[np.arange(tables.shape[1]) < blocks[:, None]] = np.random.default_rng(0).permutation(int(blocks.sum())) + 1
    plan = gpu.plan_attention(total - added, added, tables, PAGE, cache)
    heads = torch.randn(int(added.sum()), shape.q_heads + 2 * shape.kv_heads, shape.head_dim, device=device)
    heads = heads.to(torch.bfloat16 if device.type == "cuda" else torch.float32)
    kv = heads[:, shape.q_heads :].view(-1, 2, shape.kv_heads, shape.head_dim)
    q, scale = heads[:, : shape.q_heads], shape.head_dim**-0.5
    return lambda: gpu.paged_attention(q, kv, cache, plan, scale)


def random_pages(blocks: int, shape: Shape, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A KV cache: of zeros it would be read faster. Codes have scales of 0.01."""
    size = (blocks, 2, shape.kv_heads, *kv_pages.page_shape(PAGE, shape.head_dim, dtype))
    if not kv_pages.is_quantized(dtype):
        return torch.randn(size, device=device).to(dtype if device.type == "cuda" else torch.float32)
    cache = torch.randint(0, 100, size, dtype=torch.int8, device=device).view(dtype)
    kv_pages.scales(cache, shape.head_dim).fill_(0.01)
    return cache


def rowwise(
    shape: Shape, device: torch.device, timer: Timer, known: Ceilings, *, tokens: int = 4096
) -> Iterator[Figure]:
    """Kernels whose lower bound is the bytes that they read and write."""
    from slipway_runtime.kernels import gpu

    def some(*size: int) -> Tensor:
        return torch.randn(*size, device=device).to(torch.bfloat16)

    x, residual, weight = some(tokens, shape.hidden), some(tokens, shape.hidden), some(shape.hidden)
    gate_up, scores = some(tokens, 2 * shape.inner), some(256, shape.vocabulary).float()
    one = torch.ones(256, device=device)
    whole = torch.zeros(256, dtype=torch.int64, device=device)
    runs: list[tuple[str, int, Callable[[], object]]] = [
        ("add and norm", 4 * x.nbytes, lambda: gpu.add_rms_norm(x, residual, weight, 1e-5)),
        ("SwiGLU", gate_up.nbytes * 3 // 2, lambda: gpu.swiglu(gate_up)),
        ("sample of 256", scores.nbytes, lambda: gpu.sample(scores, one, whole, one, 0 * one, whole, whole)),
        (
            "sample of 256, top-p",
            scores.nbytes,
            lambda: gpu.sample(scores, one, whole, 0.9 * one, 0 * one, whole, whole),
        ),
    ]
    for name, moved, run in runs:
        seconds = timer.eager(run)
        share = 100 * moved / seconds / known.bandwidth
        yield Figure(f"{shape.name} {name}", share, "% of a copy", f"{seconds * 1e6:.1f} µs")
