"""Kernel dispatch: the `Kernels` protocol, and the implementation for a device and dtype.

Shapes: T tokens of the step, Hq query heads on Hkv key-value heads of size D, V vocabulary entries, R rows that sample.
"""

from typing import Any, Protocol, cast

import torch
from torch import Tensor

from slipway_runtime.kernels import fixed_order, native, reference
from slipway_runtime.kernels.attention_plan import ChunkTile
from slipway_runtime.kernels.captured_plan import ChunkCapacity, StaticChunks
from slipway_runtime.kernels.reference_attention import HeadNorms, Scoring
from slipway_runtime.kernels.reference_experts import ExpertWeights
from slipway_runtime.kernels.reference_lora import LoraWeights
from slipway_runtime.kernels.upload import Ints

OLDEST, OLDEST_WITH_FLOAT8 = (8, 0), (8, 9)  # compute capabilities
LARGEST_HEAD = 256  # largest head_dim of the GPU kernels
AttentionPlan = Any  # made by `plan_attention`, used by `paged_attention` of the same implementation
LoraPlan = Any  # made by `plan_lora`, used by `add_lora` of the same implementation


class Kernels(Protocol):
    """The functions of a kernel implementation; `reference` defines their results."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x: (…, H)  weight: (H,)."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x, residual: (T, H)  weight: (H,) -> (T, H). Adds x to the residual in place, returns the sum's norm."""

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """gate_up: (T, 2I) -> (T, I)."""

    def geglu(self, gate_up: Tensor) -> Tensor:
        """gate_up: (T, 2I) -> (T, I)."""

    def choose_experts(self, scores: Tensor, per_token: int, *, normalize: bool) -> tuple[Tensor, Tensor]:
        """scores: (T, E) of the router -> weights (T, K) float32 and experts (T, K)."""

    def mix_experts(self, x: Tensor, weights: Tensor, experts: Tensor, of: ExpertWeights) -> Tensor:
        """x: (T, H)  weights, experts: (T, K) -> (T, H)."""

    def rope_and_store(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: Tensor,
        slots: Tensor,
        num_q_heads: int,
        norms: HeadNorms = None,
    ) -> Tensor:
        """qkv: (T, Hq + 2 Hkv, D) -> q (T, Hq, D), rotated; rotated keys and values go into the cache's slots."""

    def plan_attention(
        self, num_computed: Ints, num_new: Ints, block_tables: Ints, block_size: int, like: Tensor
    ) -> AttentionPlan:
        """Make the attention plan of a step, shared by all layers."""

    def paged_attention(
        self,
        q: Tensor,
        kv: Tensor,
        cache: Tensor,
        plan: AttentionPlan,
        scale: float,
        window: int | None = None,
        scoring: Scoring | None = None,
    ) -> Tensor:
        """q: (T, Hq, D)  kv: (T, 2, Hkv, D), this step's  cache: see `kv_pages` -> (T, Hq * D)."""

    def plan_lora(self, token_slots: Ints, num_slots: int, like: Tensor, *, tile: int = 0) -> LoraPlan:
        """Make the LoRA plan of a step, shared by all layers. token_slots: (T,), -1 without an adapter."""

    def add_lora(self, x: Tensor, y: Tensor, weights: LoraWeights, plan: LoraPlan) -> None:
        """Add the LoRA output of each token's adapter to y in place. x: (T, in)  y: (T, out)."""

    def apply_bitmask(self, logits: Tensor, places: Tensor, words: Tensor) -> None:
        """logits: (D, V), changed in place  places: (M,) rows  words: (M, W) int32, a bit for each token."""

    def penalize_rows(
        self,
        logits: Tensor,
        places: Tensor,
        counts: Tensor,
        rows: Tensor,
        repetition: Tensor,
        presence: Tensor,
        frequency: Tensor,
    ) -> None:
        """logits: (D, V), changed in place  counts: (…, V) int32  places, rows of the counts, the rest: (M,)."""

    def sample(
        self,
        logits: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        seeds: Tensor,
        positions: Tensor,
    ) -> Tensor:
        """logits: (R, V)  the rest: (R,) -> token ids (R,)."""


class CapturableKernels(Kernels, Protocol):
    """Kernels for CUDA graphs: the launches of a step depend on its number of rows, or of tokens, only."""

    def plan_for_capture(self, num_rows: int, max_model_len: int, block_size: int, like: Tensor) -> AttentionPlan:
        """Attention plan of rows of one new token each, in static buffers."""

    def first_rows(self, plan: AttentionPlan, num_rows: int) -> AttentionPlan:
        """The captured plan for fewer rows, in the same buffers."""

    def update_static_inputs(self, plan: AttentionPlan, lengths: Tensor, tables: Tensor, rows: Tensor) -> None:
        """Copy a step's rows into such a plan, within the graph. lengths, rows: (R,)  tables: (N, blocks)."""

    def chunk_capacity(self, num_tokens: int, max_num_seqs: int) -> ChunkCapacity:
        """What a captured step of so many tokens has room for, in which rows may have several new tokens."""

    def with_chunks(
        self, plan: AttentionPlan, capacity: ChunkCapacity, starts: Tensor, work: Tensor, merges: Tensor
    ) -> AttentionPlan:
        """The captured plan for such a step, in the row buffers of `plan`. The tensors: static, of `pack_chunks`."""

    def empty_chunks(self, capacity: ChunkCapacity, padding_row: int) -> StaticChunks:
        """Static inputs of such a step that consists of padding: rows, lengths, starts, work, merges."""

    def pack_chunks(
        self,
        capacity: ChunkCapacity,
        row_ids: Ints,
        num_computed: Ints,
        num_new: Ints,
        *,
        padding_row: int,
        tile: ChunkTile,
    ) -> StaticChunks | None:
        """Static inputs of such a step, padded; None: it has no room for the step. tile: see `chunk_tile`."""

    def chunk_tile(self, q: Tensor, cache: Tensor, block_size: int) -> ChunkTile:
        """What a program of such a step attends. q: (…, Hq, D)."""

    def plan_lora_for_capture(self, num_tokens: int, num_slots: int, like: Tensor) -> LoraPlan:
        """LoRA plan in static buffers, for any adapters that a step uses."""

    def update_static_lora_inputs(self, plan: LoraPlan, token_slots: Ints) -> None:
        """Copy the slots of a step's tokens into a captured plan. token_slots: (num_tokens,), -1: no adapter."""


def capturable(kernels: Kernels) -> CapturableKernels | None:
    """These kernels, if CUDA graphs can capture their steps; else None."""
    return cast(CapturableKernels, kernels) if hasattr(kernels, "plan_for_capture") else None


def kernels_for(
    device: torch.device, dtype: torch.dtype, *, deterministic: bool = False, latent: bool = False
) -> Kernels:
    """The kernel implementation for a device and dtype; `deterministic`: one with a fixed order of sums.

    latent: for latent attention, whose cache has one plane; `refusal` has the devices and settings without it.

    Triton on CUDA; on a CPU for float32 the compiled kernels, if they are built, whose order of sums is always fixed;
    the reference everywhere else.
    """
    if device.type == "cuda":  # imported here, so that Triton is not imported on a CPU
        if deterministic:
            from slipway_runtime.kernels import gpu_fixed_order

            return gpu_fixed_order
        from slipway_runtime.kernels import gpu

        return gpu
    if latent:
        return reference
    if device.type == "cpu" and dtype == torch.float32 and native.library() is not None:
        from slipway_runtime.kernels import cpu

        return cpu
    return fixed_order if deterministic else reference


def refusal_of_latents(device: torch.device, *, deterministic: bool) -> str:
    """Why latent attention (MLA) is not possible on this device with this setting, as a sentence; "": it is."""
    if device.type == "cuda":
        return "multi-head latent attention runs on CPUs only: the GPU kernels do not read its cache; set device to cpu"
    if deterministic:
        return "multi-head latent attention has no kernel with a fixed order of sums: set deterministic to false"
    return ""


def has_float8(device: torch.device) -> bool:
    """Whether kernels for this device convert float8; those that do not read its codes as bytes."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= OLDEST_WITH_FLOAT8


def refusal(
    device: torch.device, capability: tuple[int, int], *, head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype
) -> str:
    """Why the kernels of this device do not support a model in these dtypes, as a sentence; "": they do."""
    if device.type != "cuda":
        return ""
    name = f"a GPU of compute capability {capability[0]}.{capability[1]}"
    if capability < OLDEST:  # Triton compiles for older ones too, without tensor cores and with spills of kilobytes
        return f"{name} is not supported: the kernels need 8.0 or newer (A100, L4, H100); use another GPU or a CPU"
    if kv_dtype == torch.float8_e4m3fn and capability < OLDEST_WITH_FLOAT8:
        return f"{name} has no float8: set kvCache.dtype to int8 or auto"
    if head_dim > LARGEST_HEAD:
        return f"heads of size {head_dim} do not fit into a GPU's shared memory; at most {LARGEST_HEAD} do"
    return ""
