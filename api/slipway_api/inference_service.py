"""The InferenceService kind: one model, the replicas that serve it, and how they scale, roll and drain.

Fields that are not built yet are absent, not ignored. Defaults stand in the schema; the two that depend on another
field (`served_name`, `fixed_replicas`) are resolved here and nowhere else.
"""

from enum import StrEnum
from typing import Annotated, Any, ClassVar

from pydantic import Field

from slipway_api.autoscaling import Autoscaling, ScalingMode
from slipway_api.inference_status import InferenceServiceStatus
from slipway_api.names import API_VERSION
from slipway_api.overlay import EnvVar, ResourceMap, Template, resource_rules
from slipway_api.types import (
    BYTES_PATTERN,
    ByteQuantity,
    DecimalString,
    ObjectMeta,
    Rule,
    ServiceKey,
    Struct,
    bounded_list,
    cel_rules,
    decimal,
    decimal_rule,
    parse_quantity,
)

_MODEL_URI = (
    r"^(hf://[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*(@[A-Za-z0-9][A-Za-z0-9._/-]*)?|file:///[^ ]+)$"
)
_URI_HELP = "must be hf://organisation/model, hf://organisation/model@revision or file:///absolute/path"


def _is_model_uri(field: str) -> str:
    return f"{field}.matches('{_MODEL_URI}') && !{field}.contains('/../')"


class TokenizerSource(Struct):
    """A tokenizer other than the model's own."""

    model_config = cel_rules(
        Rule(
            f"!has(self.uri) || self.uri == '' || ({_is_model_uri('self.uri')})",
            f"uri {_URI_HELP}",
            ".uri",
        ),
        Rule(
            "!has(self.sha256) || self.sha256.matches('^([0-9a-f]{64})?$')", "sha256 must be 64 hex digits", ".sha256"
        ),
    )

    uri: str = Field(default="", max_length=512)
    """Where it lives; empty: with the model."""
    sha256: str = Field(default="", max_length=64)
    """SHA-256 of tokenizer.json; a replica with another one refuses to start. Empty: not checked."""


class SamplingDefaults(Struct):
    """What holds for requests that do not say otherwise; part of the revision."""

    model_config = cel_rules(
        decimal_rule("temperature", "value <= 2.0", "temperature must be 0 to 2"),
        decimal_rule("topP", "value > 0.0 && value <= 1.0", "topP must be above 0 and at most 1"),
        decimal_rule("minP", "value <= 1.0", "minP must be 0 to 1"),
        decimal_rule("repetitionPenalty", "value > 0.0", "repetitionPenalty must be above 0"),
    )

    temperature: DecimalString | None = None
    """Randomness, "0" to "2"; "0" is greedy."""
    top_p: DecimalString | None = None
    """Sample from the most likely tokens that together have this probability."""
    top_k: int | None = Field(default=None, ge=0, le=1_000_000)
    """Sample from this many of the most likely tokens; 0: all."""
    min_p: DecimalString | None = None
    """Leave out tokens less likely than this share of the most likely one."""
    repetition_penalty: DecimalString | None = None
    """Above "1" discourages tokens that already appeared."""
    max_tokens: int = Field(default=1024, ge=1, le=10_000_000)
    """Tokens generated for a request that names no limit."""


class Model(Struct):
    """Which model, and under which name."""

    model_config = cel_rules(
        Rule(_is_model_uri("self.uri"), f"uri {_URI_HELP}", ".uri"),
        Rule(
            "!has(self.servedName) || self.servedName.matches('^([A-Za-z0-9][A-Za-z0-9._:/-]*)?$')",
            "servedName must be letters, digits and . _ : / -, starting with a letter or digit",
            ".servedName",
        ),
        Rule(
            "!has(self.digest) || self.digest.matches('^(sha256:[0-9a-f]{64})?$')",
            "digest must be sha256: and 64 hex digits",
            ".digest",
        ),
    )

    uri: str = Field(min_length=1, max_length=512)
    """Where the checkpoint lives: hf://organisation/model@revision, or file:///path of the image or of a volume."""
    served_name: str = Field(default="", max_length=128)
    """What clients send as model; empty: metadata.name."""
    digest: str = Field(default="", max_length=71)
    """Digest of the checkpoint, sha256:...; a replica that finds another one refuses to start. Empty: not checked."""
    tokenizer: TokenizerSource = TokenizerSource()
    """A tokenizer other than the model's own."""
    chat_template: str = Field(default="", max_length=32768)
    """A Jinja chat template that replaces the model's own."""
    sampling_defaults: SamplingDefaults = SamplingDefaults()
    """What holds for requests that do not say otherwise; part of the revision."""


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
    )

    gpu_memory_utilization: DecimalString = decimal("0.85")
    """Share of the GPU's memory for weights and KV cache together."""
    bytes: ByteQuantity = ""
    """Fixes the size of the pool, such as 64Mi; for CPUs and demonstrations. Empty: what the GPU has left."""

    @property
    def fixed_bytes(self) -> int | None:
        """The size asked for, or None where the memory decides."""
        return int(parse_quantity(self.bytes)) if self.bytes else None


class Dtype(StrEnum):
    """Number format of weights and arithmetic."""

    AUTO = "auto"
    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"


class Runtime(Struct):
    """How a replica runs the model."""

    model_config = cel_rules(
        Rule(
            "self.maxNumBatchedTokens >= self.maxNumSeqs",
            "maxNumBatchedTokens must be at least maxNumSeqs, so that every running request gets a token in each step",
            ".maxNumBatchedTokens",
        ),
        Rule("self.blockSize in [8, 16, 32, 64, 128]", "blockSize must be 8, 16, 32, 64 or 128", ".blockSize"),
        Rule(
            "self.maxOutputTokens == 0 || self.maxModelLen == 0 || self.maxOutputTokens < self.maxModelLen",
            "maxOutputTokens must be below maxModelLen, so that a prompt fits beside the answer",
            ".maxOutputTokens",
        ),
    )

    image: str = Field(default="", pattern=r"^\S*$", max_length=512)
    """Runtime image; empty: the chart's, frozen for the life of a revision."""
    args: Annotated[tuple[Annotated[str, Field(max_length=4096)], ...], bounded_list(at_most=64)] = ()
    """Further arguments of slipway-runtime serve."""
    env: Annotated[tuple[EnvVar, ...], bounded_list(at_most=64, key="name")] = ()
    """Environment variables of the runtime, as in a pod."""
    dtype: Dtype = Dtype.AUTO
    """Number format of weights and arithmetic; auto: the checkpoint's on a GPU, fp32 on a CPU."""
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
    tensor_parallel_size: int = Field(default=1, ge=1, le=1)
    """GPUs that share one replica's model. Only 1 is accepted so far."""
    kv_cache: KVCache = KVCache()
    """How much memory the KV cache of a replica takes."""
    startup_timeout_seconds: int = Field(default=1800, ge=10, le=86_400)
    """How long a replica may take to become ready before it is started over."""


class GPU(Struct):
    """GPUs of one replica."""

    count: int = Field(default=1, ge=0, le=16)
    """How many; 0 runs the model on CPUs."""
    resource_name: str = Field(
        default="nvidia.com/gpu",
        pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?/[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$",
        max_length=253,
    )
    """Resource that the device plugin announces."""
    product: str = Field(default="", pattern=r"^([A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?)?$", max_length=63)
    """Only nodes whose label nvidia.com/gpu.product has this value; empty: any."""


class Resources(Struct):
    """What one replica needs of a node."""

    model_config = cel_rules(*resource_rules())

    gpu: GPU = GPU()
    """GPUs of one replica."""
    requests: ResourceMap = Field(default_factory=dict)
    """CPU, memory and ephemeral storage that the scheduler sets aside, such as cpu: 500m."""
    limits: ResourceMap = Field(default_factory=dict)
    """CPU, memory and ephemeral storage that a replica may use at most; limits.cpu is also its number of threads."""


class RollingUpdate(Struct):
    """How many replicas more or fewer a rollout may have."""

    model_config = cel_rules(
        Rule("self.maxSurge + self.maxUnavailable > 0", "maxSurge and maxUnavailable must not both be 0")
    )

    max_surge: int = Field(default=1, ge=0, le=1000)
    """Replicas above the desired number."""
    max_unavailable: int = Field(default=0, ge=0, le=1000)
    """Replicas below the desired number."""


class RolloutStrategy(StrEnum):
    """How a new revision replaces the old one."""

    ROLLING_UPDATE = "RollingUpdate"


class Rollout(Struct):
    """How a new revision replaces the old one."""

    strategy: RolloutStrategy = RolloutStrategy.ROLLING_UPDATE
    """RollingUpdate: start new replicas, wait until they are ready, drain old ones."""
    rolling_update: RollingUpdate = RollingUpdate()
    """How many replicas more or fewer a rollout may have."""
    progress_deadline_seconds: int = Field(default=1800, ge=30, le=86_400)
    """A rollout without progress for this long is reported as Stalled."""
    revision_history_limit: int = Field(default=5, ge=0, le=5)
    """Old revisions that status remembers."""


class Drain(Struct):
    """How a replica goes: it leaves the route, finishes its requests, and only then stops."""

    model_config = cel_rules(
        Rule(
            "self.endpointPropagationSeconds < self.timeoutSeconds",
            "endpointPropagationSeconds must be below timeoutSeconds",
            ".endpointPropagationSeconds",
        )
    )

    timeout_seconds: int = Field(default=300, ge=1, le=3600)
    """How long requests may take to finish; then they are ended with an error."""
    endpoint_propagation_seconds: int = Field(default=5, ge=0, le=3600)
    """Shortest wait between leaving the route and stopping, until every router knows."""


class InferenceServiceSpec(Struct):
    """What should be served, and how."""

    model_config = cel_rules(
        Rule(
            "self.resources.gpu.count == 0 || self.runtime.tensorParallelSize == self.resources.gpu.count",
            "resources.gpu.count must be 0 (CPU) or equal runtime.tensorParallelSize",
            ".resources.gpu.count",
        ),
        Rule(
            "!has(self.autoscaling) || self.autoscaling.mode == 'External' || !has(self.replicas)",
            "replicas must be absent where autoscaling decides; set one of the two, or autoscaling.mode: External",
            ".replicas",
        ),
        Rule(
            "!has(self.autoscaling) || self.autoscaling.mode != 'External' || has(self.replicas)",
            "autoscaling.mode External needs replicas: the number to start with, which kubectl scale, an HPA or KEDA "
            "then writes",
        ),
    )

    model: Model
    """Which model, and under which name."""
    runtime: Runtime = Runtime()
    """How a replica runs the model."""
    resources: Resources = Resources()
    """What one replica needs of a node."""
    template: Template = Template()
    """An overlay for the pods, within an allow-list."""
    replicas: int | None = Field(default=None, ge=0, le=1000)
    """A fixed number of replicas, or with autoscaling.mode External the one written through /scale. Absent: 1."""
    autoscaling: Autoscaling | None = None
    """Between which limits, and by which metrics, the number of replicas moves."""
    rollout: Rollout = Rollout()
    """How a new revision replaces the old one."""
    drain: Drain = Drain()
    """How a replica goes: it leaves the route, finishes its requests, and only then stops."""


class InferenceService(Struct):
    """A model served by replicas of Slipway's runtime behind one OpenAI-compatible endpoint."""

    model_config = cel_rules(
        Rule(
            "size(self.metadata.name) <= 40",
            "metadata.name may have at most 40 characters, so that the names of its pods fit",
            ".metadata.name",
        ),
        Rule(
            "self.metadata.name.matches('^[a-z]([a-z0-9-]*[a-z0-9])?$')",
            "metadata.name must be lower-case letters, digits and '-', starting with a letter: it also names a Service",
            ".metadata.name",
        ),
    )

    KIND: ClassVar[str] = "InferenceService"
    PLURAL: ClassVar[str] = "inferenceservices"

    api_version: str = API_VERSION
    kind: str = "InferenceService"
    metadata: ObjectMeta
    spec: InferenceServiceSpec
    """What should be served, and how."""
    status: InferenceServiceStatus = InferenceServiceStatus()
    """The state of the service as the operator last saw it."""

    @classmethod
    def parse(cls, raw: dict[str, Any]) -> "InferenceService":
        """The kind from what the API server sent; raises pydantic.ValidationError."""
        return cls.model_validate(raw)

    @property
    def key(self) -> ServiceKey:
        """Namespace and name."""
        return ServiceKey(self.metadata.namespace, self.metadata.name)

    @property
    def served_name(self) -> str:
        """What clients send as `model`."""
        return self.spec.model.served_name or self.metadata.name

    @property
    def fixed_replicas(self) -> int | None:
        """The number of replicas the spec fixes, 1 where it says nothing; None where the autoscaler decides."""
        if self.spec.autoscaling and self.spec.autoscaling.mode is ScalingMode.ACTIVE:
            return None
        return 1 if self.spec.replicas is None else self.spec.replicas

    @property
    def is_being_deleted(self) -> bool:
        """Whether a deletion waits for the replicas to drain."""
        return self.metadata.deletion_timestamp is not None
