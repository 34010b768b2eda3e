"""Plans the memory of a device: whether a model fits, and for how many sequences the KV cache has room. Pure.

Weights + adapters + reserve + KV cache must fit.

The operator plans before it creates a pod, from the manifest; the runtime plans again with measured sizes.
Sizes are bytes of one device. A worked example, Llama-3 70B with grouped-query attention in 16 bits:

    KV of a token = 2 (K and V) × 80 layers × 8 key-value heads × 128 × 2 bytes = 327,680 bytes
    (its 64 attention heads share those 8: counting them would plan eight times too much)
"""

from dataclasses import dataclass, replace
from typing import Final

GIB: Final = 1 << 30
WEIGHT_BYTES: Final = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1, "fp8": 1}
QUANTIZATIONS: Final = ("none", "int8", "fp8")
SCALE_BYTES: Final = 4  # a float32 per row of a quantized matrix, and per token and head of a quantized KV cache
NULL_BLOCKS: Final = 1  # padding points into it; it takes memory and holds no tokens
SMALLEST_POOL: Final = 2  # blocks; with fewer, a sequence could not grow by one token
_UNITS_PER_RANK: Final = 8  # at least, of inner features: so the largest part is at most an eighth above the mean

# On a CPU dtype auto is bf16 from so many parameters on; with fewer, fp32 costs little memory and is the fastest.
CPU_BF16_PARAMETERS: Final = 100_000_000

# A GPU holds more than what we allocate: its context, the libraries' workspaces, captured graphs.
GPU_RESERVE_BYTES: Final = GIB
# gpuMemoryUtilization above this leaves too little for what is not planned: other processes, fragments, the driver.
UTILIZATION_WARNED_ABOVE: Final = 0.92


def features_of_rank(count: int, rank: int, ranks: int) -> slice:
    """The slice of `count` inner features of an MLP that a tensor-parallel rank computes; rank 0 has the most.

    Cuts are at multiples of the largest power of two up to 128 that gives each rank at least 8 units, so that groups of
    quantized columns stay whole. `count` need not be divisible by `ranks`.
    """
    unit = 128
    while unit > 1 and (count % unit or count // unit < _UNITS_PER_RANK * ranks):
        unit //= 2
    own, longer = divmod(count // unit, ranks)
    start = rank * own + min(rank, longer)
    return slice(start * unit, (start + own + (rank < longer)) * unit)


LATENT_PLANES: Final = 1  # a token's latent is its key and its value (latent attention)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of a decoder that decide its memory. `parameters`, `intermediate` and `vocab` are 0 where unknown."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int = 0
    vocab: int = 0
    tied: bool = False
    parameters: int = 0  # 0: counted from the rest
    experts: int = 0  # of a sparse layer; 0: no layer has any
    experts_per_token: int = 0
    moe_intermediate: int = 0  # the inner width of one expert
    shared_intermediate: int = 0  # the inner width of the expert of all tokens in a sparse layer
    kv_planes: int = 2  # key and value; 1: one latent vector is both (latent attention)
    attention_parameters: int = 0  # of a layer; 0: counted from the heads
    gated: bool = True  # the dense feed-forward has gate, up and down; False: up and down
    sparse_layers: int = 0  # layers with experts in place of a feed-forward; 0: all, where there are experts

    @property
    def mlp(self) -> int:
        """The inner width of the feed-forward; where it is unknown, what is left of the parameters.

        With experts, that of the experts which a token passes through, together.
        """
        if self.experts:
            sparse = self.experts_per_token * self.moe_intermediate + self.shared_intermediate
            return max(sparse, self.intermediate) if self._dense_layers else sparse
        if self.intermediate:
            return self.intermediate
        per_layer = (self.parameters - self.embedding_parameters) // self.layers - self._attention_parameters
        return max(0, per_layer // (self._mlp_matrices * self.hidden)) or 4 * self.hidden

    @property
    def projections(self) -> tuple[tuple[int, int], ...]:
        """(in, out) of the matrices of a layer: q, k, v, o, gate if there is one, up, down."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = ((self.hidden, q), (self.hidden, kv), (self.hidden, kv), (q, self.hidden))
        inputs = ((self.hidden, self.mlp),) * (self._mlp_matrices - 1)
        return (*attention, *inputs, (self.mlp, self.hidden))

    def adapter_numbers(self, *, of_experts: bool) -> int:
        """Numbers of an adapter of rank 1: the inputs and outputs of all matrices that it may change.

        of_experts: including the experts of sparse layers.
        """
        if not self.experts:
            return self.layers * sum(a + b for a, b in self.projections)
        attention = self.layers * sum(a + b for a, b in self.projections[:4])
        dense = self._dense_layers * self._mlp_matrices * (self.hidden + self.intermediate)
        experts = self.experts * (self.hidden + self.moe_intermediate) if of_experts else 0
        shared = self.hidden + self.shared_intermediate if self.shared_intermediate else 0
        return attention + dense + (self.layers - self._dense_layers) * 3 * (experts + shared)

    @property
    def embedding_parameters(self) -> int:
        """The vocabulary's matrices: one where input and output share it."""
        return self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def linear_parameters(self) -> int:
        """What weight quantization makes smaller: the matrices of the layers.

        Qwen3-30B-A3B: 48 layers × (18.9 M of attention + 128 experts × 3 × 2048 × 768) = 29.9 G.
        """
        if not self.experts:
            mlp = self._mlp_matrices * self.hidden * self.mlp
            return self.layers * (self._attention_parameters + mlp)
        dense = self._dense_layers * 3 * self.hidden * self.intermediate
        router = self.hidden * self.experts
        inner = self.experts * self.moe_intermediate + self.shared_intermediate
        sparse = (self.layers - self._dense_layers) * (3 * self.hidden * inner + router)
        return self.layers * self._attention_parameters + dense + sparse

    @property
    def linear_rows(self) -> int:
        """Rows of these matrices, each of which has a scale when it is quantized."""
        if not self.experts:
            return self.layers * sum(out for _, out in self.projections)
        attention = (self.heads + 2 * self.kv_heads) * self.head_dim + self.hidden
        dense = self._dense_layers * (2 * self.intermediate + self.hidden)
        shared = 2 * self.shared_intermediate + self.hidden if self.shared_intermediate else 0
        each = self.experts * (2 * self.moe_intermediate + self.hidden) + shared
        sparse = (self.layers - self._dense_layers) * each
        return self.layers * attention + dense + sparse

    @property
    def all_parameters(self) -> int:
        """Every weight; norms and biases are too few to count."""
        return self.parameters or self.linear_parameters + self.embedding_parameters

    def on_one_of(self, devices: int) -> "ModelShape":
        """The largest part of the model on one of several devices: its heads, features of the MLP and tokens.

        With more devices than key-value heads, each device has a copy of one key-value head.
        """
        heads, kv_heads = (-(-count // devices) for count in (self.heads, self.kv_heads))
        widths = (self.intermediate if self.experts else self.mlp, self.moe_intermediate, self.shared_intermediate)
        mlp, inner, shared = (features_of_rank(count, 0, devices).stop for count in widths)
        part = replace(self, heads=heads, kv_heads=kv_heads, intermediate=mlp, moe_intermediate=inner, parameters=0)
        part = replace(part, shared_intermediate=shared, attention_parameters=-(-self.attention_parameters // devices))
        vocabulary = -(-max(0, self.all_parameters - self.linear_parameters) // devices)
        return replace(part, parameters=part.linear_parameters + vocabulary)

    def kv_bytes_per_token(self, kv_dtype: str) -> int:
        """Bytes of one token in the KV cache, all layers together."""
        return kv_bytes_per_token(self.layers, self.kv_heads, self.head_dim, kv_dtype, self.kv_planes)

    @property
    def _mlp_matrices(self) -> int:
        return 3 if self.gated else 2

    @property
    def _dense_layers(self) -> int:
        return self.layers - self.sparse_layers if self.sparse_layers else 0

    @property
    def _attention_parameters(self) -> int:
        return self.attention_parameters or 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """The settings of a service that decide how much memory it takes, named as in the manifest."""

    dtype: str = "bf16"  # bf16, fp16, fp32
    activation_dtype: str = ""  # also of adapters; empty: `dtype`
    quantization: str = "none"  # of the weights: none, int8, fp8
    kv_dtype: str = "auto"  # auto: that of the weights; int8, fp8
    block_size: int = 16
    max_model_len: int  # prompt and output together
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    draft_tokens: int = 0  # that a row may draft in a step; 0: speculation is off
    max_adapters: int = 0  # slots; 0: adapters are off
    max_rank: int = 0
    lora_experts: bool = False  # slots have room for experts
    on_gpu: bool = True
    tensor_parallel_size: int = 1  # devices that share the model

    @property
    def max_samples(self) -> int:
        """Most samples of a step: each row's own and those that verify its drafts, of which each is a token."""
        return min(self.max_num_seqs * (1 + self.draft_tokens), max(self.max_num_seqs, self.max_num_batched_tokens))

    @property
    def computes_in(self) -> str:
        """The number format of activations and adapters."""
        return self.activation_dtype or self.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes that are taken before the first token of the KV cache."""

    weights: int
    adapters: int
    reserve: int  # activations of the widest step, logits, and on a GPU context and graphs

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.adapters + self.reserve


@dataclass(frozen=True, slots=True, kw_only=True)
class Fits:
    """The model and at least one sequence of full length fit."""

    kv_blocks: int  # usable ones, without the null block
    kv_tokens: int
    bytes_per_token: int
    max_sequences: int  # at full length, at the same time


@dataclass(frozen=True, slots=True)
class DoesNotFit:
    """They do not fit; the message has the arithmetic and names the settings that would help."""

    message: str


def weight_bytes(shape: ModelShape, dtype: str, quantization: str = "none", *, on_gpu: bool = True) -> int:
    """Weights on the device. int8 and fp8: the layers' matrices in one byte with a scale a row, the rest in `dtype`.

    fp32 on a CPU: the matrices in two bytes, as they are kept where a checkpoint has them in bfloat16 (ADR 103).
    """
    plain = shape.all_parameters * WEIGHT_BYTES[dtype]
    linear = min(shape.linear_parameters, shape.all_parameters)
    if quantization != "none":
        saved = linear * (WEIGHT_BYTES[dtype] - WEIGHT_BYTES[quantization])
        return plain - saved + shape.linear_rows * SCALE_BYTES
    if dtype == "fp32" and not on_gpu:
        return plain - linear * (WEIGHT_BYTES["fp32"] - WEIGHT_BYTES["bf16"])
    return plain


def kv_bytes_per_token(layers: int, kv_heads: int, head_dim: int, kv_dtype: str, planes: int = 2) -> int:
    """Keys and values of one token in all layers. One byte formats carry a scale per token and head.

    planes: 1 for latent attention, with one vector of size `head_dim` for each token.
    """
    head = head_dim * WEIGHT_BYTES[kv_dtype] + (SCALE_BYTES if WEIGHT_BYTES[kv_dtype] == 1 else 0)
    return planes * layers * kv_heads * head


def adapter_slot_bytes(shape: ModelShape, max_rank: int, dtype: str, *, of_experts: bool = False) -> int:
    """One adapter slot: A (rank × in) and B (out × rank) of every matrix of every layer, padded to the largest rank.

    of_experts: also of all experts. Qwen3-30B-A3B at rank 16 takes 27 MB in bfloat16 without, 1.7 GB with them.
    """
    return max_rank * shape.adapter_numbers(of_experts=of_experts) * WEIGHT_BYTES[dtype]


def activation_bytes(shape: ModelShape, needs: Needs) -> int:
    """Peak of the largest step: a residual and gate, up and their product for each token; then logits."""
    attention = (2 * shape.heads + 2 * shape.kv_heads) * shape.head_dim
    copies = 3 * shape.experts_per_token * shape.hidden  # rows by expert, their outputs, and those in order
    width = 2 * shape.hidden + max(3 * shape.mlp + copies, attention)
    layer = needs.max_num_batched_tokens * width * WEIGHT_BYTES[needs.computes_in]
    logits = 2 * needs.max_samples * shape.vocab * 4  # float32, and a copy while they are sampled
    return max(layer, logits)


def footprint(shape: ModelShape, needs: Needs) -> Footprint:
    """Computes what a service takes before its KV cache; of one device, where several share the model."""
    if needs.tensor_parallel_size > 1:
        return footprint(*_of_one_device(shape, needs))
    slot = adapter_slot_bytes(shape, needs.max_rank, needs.computes_in, of_experts=needs.lora_experts)
    return Footprint(
        weights=weight_bytes(shape, needs.dtype, needs.quantization, on_gpu=needs.on_gpu),
        adapters=needs.max_adapters * slot,
        reserve=activation_bytes(shape, needs) + (GPU_RESERVE_BYTES if needs.on_gpu else 0),
    )


def pool_blocks(kv_bytes: int, bytes_per_token: int, block_size: int) -> int:
    """How many usable blocks so many bytes pay for; below 2 there is no pool."""
    return max(0, kv_bytes // (bytes_per_token * block_size) - NULL_BLOCKS)


def plan(shape: ModelShape, needs: Needs, *, memory_bytes: int, utilization: float = 1.0) -> Fits | DoesNotFit:
    """Whether one full-length sequence fits into `memory_bytes × utilization`, and how many do.

    Where devices share the model, memory and bytes are those of one; all hold the same blocks.
    """
    if needs.tensor_parallel_size > 1:
        return plan(*_of_one_device(shape, needs), memory_bytes=memory_bytes, utilization=utilization)
    budget = int(memory_bytes * utilization)
    found = _fit(shape, needs, budget)
    if found is not None:
        return found
    taken = footprint(shape, needs)
    per_token = shape.kv_bytes_per_token(_kv_dtype(needs))
    of = f" ({_gib(memory_bytes)} × {utilization:g})" if utilization != 1 else ""
    left = budget - taken.total
    adapters = f" + {needs.max_adapters} adapter slots {_gib(taken.adapters)}" if taken.adapters else ""
    arithmetic = f"weights {_gib(taken.weights)}{adapters} + reserve {_gib(taken.reserve)} = {_gib(taken.total)}"
    room = f"leave {_gib(left)} of {_gib(budget)}{of}" if left > 0 else f"exceed {_gib(budget)}{of}"
    wanted = f"one sequence of {needs.max_model_len} tokens at {per_token} bytes needs {_gib(_one(needs) * per_token)}"
    return DoesNotFit(f"{arithmetic} {room}; {wanted} of KV cache: {_advice(shape, needs, budget)}")


def _of_one_device(shape: ModelShape, needs: Needs) -> tuple[ModelShape, Needs]:
    return shape.on_one_of(needs.tensor_parallel_size), replace(needs, tensor_parallel_size=1)


def utilization_warning(utilization: float) -> str | None:
    """A warning where gpuMemoryUtilization leaves too little for what is not planned; None where it does not."""
    if utilization <= UTILIZATION_WARNED_ABOVE:
        return None
    return (
        f"gpuMemoryUtilization {utilization:g} is above {UTILIZATION_WARNED_ABOVE:g}: "
        "captured graphs, fragments and other processes on the device may not fit"
    )


def _fit(shape: ModelShape, needs: Needs, budget: int) -> Fits | None:
    per_token = shape.kv_bytes_per_token(_kv_dtype(needs))
    blocks = pool_blocks(budget - footprint(shape, needs).total, per_token, needs.block_size)
    of_one = -(-needs.max_model_len // needs.block_size)
    if blocks < max(of_one, SMALLEST_POOL):
        return None
    return Fits(
        kv_blocks=blocks,
        kv_tokens=blocks * needs.block_size,
        bytes_per_token=per_token,
        max_sequences=min(needs.max_num_seqs, blocks // of_one),
    )


def _kv_dtype(needs: Needs) -> str:
    return needs.dtype if needs.kv_dtype == "auto" else needs.kv_dtype


def _one(needs: Needs) -> int:
    """Tokens that the pool must hold for one sequence at full length, the null block included."""
    return (-(-needs.max_model_len // needs.block_size) + NULL_BLOCKS) * needs.block_size


def _advice(shape: ModelShape, needs: Needs, budget: int) -> str:
    """The settings that would make it fit, each alone; else how much memory the device would need."""
    settings: list[str] = []
    per_token = shape.kv_bytes_per_token(_kv_dtype(needs))
    left = budget - footprint(shape, needs).total
    length = pool_blocks(left, per_token, needs.block_size) * needs.block_size
    if length >= SMALLEST_POOL * needs.block_size:
        settings.append(f"lower maxModelLen to {length}")
    if needs.kv_dtype == "auto" and _fit(shape, replace(needs, kv_dtype="fp8"), budget):
        settings.append("set kvCache.dtype to fp8 or int8")
    if needs.quantization == "none" and _fit(shape, replace(needs, quantization="int8"), budget):
        settings.append("set quantization to int8 or fp8")
    if needs.max_adapters and _fit(shape, replace(needs, max_adapters=0), budget):
        settings.append("lower lora.maxAdapters or lora.maxRank")
    if needs.max_adapters and needs.lora_experts and _fit(shape, replace(needs, lora_experts=False), budget):
        settings.append("set lora.experts to false")
    smaller = replace(needs, max_num_batched_tokens=needs.max_num_seqs)
    if needs.max_num_batched_tokens > needs.max_num_seqs and _fit(shape, smaller, budget):
        settings.append("lower maxNumBatchedTokens")
    if settings:
        return ", or ".join(settings)
    wanted = footprint(shape, needs).total + _one(needs) * per_token
    return f"give it a device with {_gib(wanted)} to spare, or a smaller model"


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
