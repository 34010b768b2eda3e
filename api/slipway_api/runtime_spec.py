"""The field `spec.runtime` of an InferenceService: number formats, limits of a step, KV cache, speculation, adapters.

A field that is absent or at its default gives no flag on the command line of the runtime: a revision keeps the image
that it began with, and an older image would refuse the flags of a newer operator.
"""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from slipway_api.model_spec import fetched_uri_rule
from slipway_api.overlay import EnvVar
from slipway_api.types import (
    BYTES_PATTERN,
    ByteQuantity,
    DecimalString,
    Rule,
    Struct,
    bounded_list,
    cel_rules,
    decimal,
    decimal_rule,
    parse_quantity,
)
from slipway_api.upgrade_spec import UPGRADE_RULES, UpgradePolicy, UpgradeWindow


class Dtype(StrEnum):
    """Number format of weights and arithmetic."""

    AUTO = "auto"
    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"


class Quantization(StrEnum):
    """Number format of the weights, where it is not that of the checkpoint."""

    NONE = "none"
    INT8 = "int8"
    FP8 = "fp8"


class KVDtype(StrEnum):
    """Number format of the KV cache."""

    AUTO = "auto"
    FP8 = "fp8"
    INT8 = "int8"


class KVCache(Struct):
    """How much memory the KV cache of a replica takes."""

    model_config = cel_rules(
        decimal_rule(
            "gpuMemoryUtilization", "value > 0.0 && value <= 1.0", "gpuMemoryUtilization must be above 0 and at most 1"
        ),
        Rule(
            f"!has(self.bytes) || self.bytes.matches('{BYTES_PATTERN}')",
            "bytes must be a whole number of bytes such as 64Mi or 2Gi",
            ".bytes",
        ),
        Rule(
            f"!has(self.hostBytes) || self.hostBytes.matches('{BYTES_PATTERN}')",
            "hostBytes must be a whole number of bytes such as 32Gi",
            ".hostBytes",
        ),
    )

    gpu_memory_utilization: DecimalString = decimal("0.85")
    """Share of the GPU's memory for weights and KV cache together."""
    dtype: KVDtype = KVDtype.AUTO
    """Number format of keys and values; fp8 and int8 hold twice the tokens of 16 bits. auto: that of the arithmetic."""
    bytes: ByteQuantity = ""
    """Fixes the size of the pool, such as 64Mi; for CPUs and demonstrations. Empty: the rest of the GPU's memory."""
    host_bytes: ByteQuantity = ""
    """Host memory for prefixes that the pool has no room for, such as 32Gi; part of limits.memory. Empty: none."""

    @property
    def fixed_bytes(self) -> int | None:
        """The size asked for, or None where the memory decides."""
        return int(parse_quantity(self.bytes)) if self.bytes else None


class SpeculationMethod(StrEnum):
    """The source of speculated tokens."""

    NONE = "none"
    PROMPT_LOOKUP = "promptLookup"
    DRAFT = "draft"


class DraftModel(Struct):
    """A small model whose tokenizer is that of the model."""

    model_config = cel_rules(fetched_uri_rule())

    uri: str = Field(min_length=1, max_length=512)
    """Its address: hf://, s3://, https:// or file://. It is read with the credentials, the network and the cache of
    spec.model."""


class Speculation(Struct):
    """Tokens guessed ahead and checked together."""

    model_config = cel_rules(
        Rule(
            "(self.method == 'draft') == has(self.draftModel)",
            "draftModel is needed for method draft, and only there",
            ".draftModel",
        )
    )

    method: SpeculationMethod = SpeculationMethod.NONE
    """none; promptLookup: what followed the last tokens where they occurred before, in prompt or answer; or draft: the
    same, and where it finds nothing what draftModel would say."""
    max_tokens: int = Field(default=4, ge=1, le=32)
    """Most tokens guessed in one step; fewer are tried where guesses fail."""
    draft_model: DraftModel | None = None
    """For method draft: the small model that drafts tokens. It takes GPU memory beside the model, for its weights and
    for its own KV cache, which is part of kvCache."""


class LoRA(Struct):
    """Room for LoRA adapters beside the model."""

    model_config = cel_rules(
        Rule(
            "self.maxCPUAdapters >= self.maxAdapters",
            "maxCPUAdapters must be at least maxAdapters, because an adapter that computes is kept in host memory too",
            ".maxCPUAdapters",
        )
    )

    max_adapters: int = Field(default=8, ge=1, le=256)
    """Adapters that one step computes together; each takes a slot of maxRank on the device."""
    max_cpu_adapters: int = Field(default=32, alias="maxCPUAdapters", ge=1, le=4096)
    """Adapters kept in host memory, from where one gets into a slot without being fetched again."""
    max_rank: int = Field(default=16, ge=1, le=512)
    """The largest rank that an adapter may have."""
    experts: bool = False
    """Whether adapters may change the experts of a mixture of experts. Each slot then has room for all experts."""


class Task(StrEnum):
    """What the replicas of a service compute."""

    GENERATE = "generate"
    EMBED = "embed"


class Pooling(StrEnum):
    """How an embedding is made of the hidden states of a text."""

    AUTO = "auto"
    LAST_TOKEN = "lastToken"  # noqa: S105  no secret
    MEAN = "mean"


class Runtime(Struct):
    """How a replica runs the model."""

    model_config = cel_rules(
        Rule(
            "self.maxNumBatchedTokens >= self.maxNumSeqs",
            "maxNumBatchedTokens must be at least maxNumSeqs, so that every running request gets a token in each step",
            ".maxNumBatchedTokens",
        ),
        Rule(
            "self.pooling == 'auto' || self.task == 'embed'",
            "pooling is only for task embed: a service that generates pools nothing",
            ".pooling",
        ),
        Rule(
            "self.task != 'embed' || self.speculation.method == 'none'",
            "task embed computes prompts only: speculation must be none",
            ".speculation",
        ),
        Rule(
            "self.task != 'embed' || !has(self.lora)",
            "lora is only for task generate: an adapter is routed when it has generated a token",
            ".lora",
        ),
        Rule("self.blockSize in [8, 16, 32, 64, 128]", "blockSize must be 8, 16, 32, 64 or 128", ".blockSize"),
        Rule(
            "self.maxOutputTokens == 0 || self.maxModelLen == 0 || self.maxOutputTokens < self.maxModelLen",
            "maxOutputTokens must be below maxModelLen, so that a prompt fits beside the answer",
            ".maxOutputTokens",
        ),
        *UPGRADE_RULES,
    )

    engine: str = Field(default="slipway", pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$", max_length=63)
    """The inference server: the name of an Engine. slipway is our own runtime."""
    image: str = Field(default="", pattern=r"^\S*$", max_length=512)
    """Image of the runtime, or of the engine; empty: the chart's, or the Engine's, fixed when a revision is created."""
    args: Annotated[tuple[Annotated[str, Field(max_length=4096)], ...], bounded_list(at_most=64)] = ()
    """Further arguments of slipway-runtime serve."""
    env: Annotated[tuple[EnvVar, ...], bounded_list(at_most=64, key="name")] = ()
    """Environment variables of the runtime, as in a pod."""
    task: Task = Task.GENERATE
    """generate: text; embed: embeddings at /v1/embeddings and nothing else."""
    pooling: Pooling = Pooling.AUTO
    """For task embed: lastToken, mean, or auto: as the checkpoint's 1_Pooling/config.json says, else lastToken."""
    dtype: Dtype = Dtype.AUTO
    """Number format of weights and arithmetic; auto: the checkpoint's on a GPU; on a CPU fp32, bf16 from 100 M
    parameters on."""
    quantization: Quantization = Quantization.NONE
    """Weights in one byte, made while they load: int8, or fp8 where the hardware can; none: as they are stored."""
    deterministic: bool = False
    """The same request gives the same tokens, alone and in any batch; costs throughput."""
    max_model_len: int = Field(default=0, ge=0, le=10_000_000)
    """Longest prompt and answer together, in tokens; 0: the model's own limit."""
    max_num_seqs: int = Field(default=64, ge=1, le=4096)
    """Most requests that one step computes together."""
    max_num_batched_tokens: int = Field(default=2048, ge=1, le=1_048_576)
    """Most tokens that one step computes; longer prompts are computed in chunks."""
    block_size: int = 16
    """Tokens per block of the KV cache: 8, 16, 32, 64 or 128."""
    max_output_tokens: int = Field(default=0, ge=0, le=10_000_000)
    """Hard limit of generated tokens per request; 0: what fits in maxModelLen."""
    tensor_parallel_size: int = Field(default=1, ge=1, le=16)
    """GPUs that share one replica's model, or without a GPU processes.

    It must divide the model's query heads, and divide its key-value heads or be a multiple of them."""
    kv_cache: KVCache = KVCache()
    """How much memory the KV cache of a replica takes."""
    speculation: Speculation = Speculation()
    """Tokens guessed ahead and checked together: the same answers in fewer steps."""
    lora: LoRA | None = None
    """Room for LoRA adapters beside the model. Absent: none can be loaded."""
    startup_timeout_seconds: int = Field(default=1800, ge=10, le=86_400)
    """How long a replica may take to become ready before it is started over."""
    upgrade_policy: UpgradePolicy = UpgradePolicy.ON_SPEC_CHANGE
    """When a service without runtime.image takes the image of a newer installation. OnSpecChange: with the next new
    revision. Auto: immediately. Window: in upgradeWindow. The upgrade is a rollout by spec.rollout, with its gates."""
    upgrade_window: UpgradeWindow | None = None
    """When an upgrade may start; only with upgradePolicy Window."""
