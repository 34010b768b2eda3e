"""The LoRAAdapter kind: a LoRA adapter of an InferenceService, loaded into running replicas without a restart."""

import hashlib
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Final

from pydantic import Field

from slipway_api.conditions import Conditions
from slipway_api.model_spec import fetched_uri_rule
from slipway_api.names import API_VERSION
from slipway_api.types import (
    DecimalString,
    LocalReference,
    ObjectMeta,
    Rule,
    ServiceKey,
    Struct,
    Time,
    bounded_list,
    cel_rules,
)

# Under this infix a new version is loaded beside the one that serves; no adapter may have it in its name.
NEXT_VERSION: Final = ".next-"


class Alias(Struct):
    """A further model name, whose requests several adapters share by weight."""

    model_config = cel_rules(
        Rule("!has(self.weight) || (has(self.name) && self.name != '')", "alias.weight needs alias.name", ".weight"),
        Rule(
            "!has(self.name) || self.name.matches('^([A-Za-z0-9][A-Za-z0-9._-]*)?$')",
            "alias.name must be letters, digits and . _ -, starting with a letter or digit",
            ".name",
        ),
    )

    name: str = Field(default="", max_length=128)
    """The shared model name."""
    weight: int | None = Field(default=None, ge=0, le=1000)
    """This adapter's share of the alias, in proportion to the weights of the others; absent: 1."""


class AdapterSource(Struct):
    """The address of the adapter's files, and the credentials for it."""

    model_config = cel_rules(
        fetched_uri_rule(),
        Rule(
            "!has(self.digest) || self.digest.matches('^(sha256:[0-9a-f]{64})?$')",
            "digest must be sha256: and 64 hex digits",
            ".digest",
        ),
    )

    uri: str = Field(min_length=1, max_length=512)
    """Address of a folder in PEFT's format (adapter_config.json, adapter_model.safetensors):
    hf://organisation/name@revision, s3://bucket/prefix, https://host/path, or file:///path of the image or of a
    mounted volume."""
    credentials_secret_ref: LocalReference | None = None
    """A Secret of the same namespace with the credentials for the address; keys as in spec.model of an
    InferenceService. The operator needs a Role in the namespace to read it (chart value adapterCredentials)."""
    digest: str = Field(default="", max_length=71)
    """Digest of the files, sha256:..., as `sha256sum adapter_config.json adapter_model.safetensors | sha256sum` prints
    it; other content is refused. Empty: not checked."""


class PlacementMode(StrEnum):
    """Which replicas of the base load the adapter."""

    ALL = "All"
    REPLICAS = "Replicas"
    ON_DEMAND = "OnDemand"


class Placement(Struct):
    """Which replicas of the base load the adapter."""

    model_config = cel_rules(
        Rule(
            "self.mode != 'Replicas' || (has(self.replicas) && self.replicas >= 1)",
            "mode Replicas needs replicas, at least 1",
            ".replicas",
        ),
        Rule(
            "self.mode != 'OnDemand' || !has(self.replicas)",
            "mode OnDemand takes no replicas: the adapter is on one replica at most",
            ".replicas",
        ),
    )

    mode: PlacementMode = PlacementMode.ALL
    """All: every ready replica. Replicas: as many as `replicas` says, chosen so that few move when replicas change.
    OnDemand: none, until a request for the adapter comes, which waits at the gateway while one replica loads it. A
    replica with more adapters than spec.runtime.lora.maxCPUAdapters of the base drops idle ones of this mode."""
    replicas: int | None = Field(default=None, ge=1, le=1000)
    """Number of replicas of mode Replicas; all, if the base has fewer."""
    pin: bool = False
    """Keep the adapter in the memory of its replicas: it is never evicted for another one."""
    priority: int = Field(default=0, ge=-1000, le=1000)
    """Of mode OnDemand: where room is needed, idle adapters of the lowest priority are dropped first, and of these the
    one that has been idle longest."""


class Unload(Struct):
    """How the adapter leaves a replica."""

    drain_seconds: int = Field(default=30, ge=0, le=3600)
    """How long requests may take to finish on a replica that drops the adapter; a deletion waits no longer."""


_NAME_HELP = "letters, digits and . _ -, starting with a letter or digit, without '..'"


class LoRAAdapterSpec(Struct):
    """The desired state of the adapter: its base, source and placement."""

    model_config = cel_rules(
        Rule("self.baseRef.name == oldSelf.baseRef.name", "baseRef is immutable: make another adapter", ".baseRef"),
        Rule(
            "(has(self.adapterName) ? self.adapterName : '') == (has(oldSelf.adapterName) ? oldSelf.adapterName : '')",
            "adapterName is immutable: make another adapter",
            ".adapterName",
        ),
        Rule(
            "!has(self.adapterName) || (self.adapterName.matches('^([A-Za-z0-9][A-Za-z0-9._-]*)?$') && "
            f"!self.adapterName.contains('..') && !self.adapterName.contains('{NEXT_VERSION}'))",
            f"adapterName must be {_NAME_HELP} and '{NEXT_VERSION}'",
            ".adapterName",
        ),
    )

    base_ref: LocalReference
    """The InferenceService of the same namespace whose replicas load the adapter; immutable."""
    adapter_name: str = Field(default="", max_length=128)
    """The model name in requests; empty: metadata.name. Adapters and services of a namespace share one space of names,
    in which the older one wins. Immutable."""
    alias: Alias = Alias()
    """A further model name, whose requests several adapters share by weight."""
    source: AdapterSource
    """The address of the adapter's files. A changed source is loaded beside the old one, probed, and takes over without
    a gap; running requests finish on the old one."""
    placement: Placement = Placement()
    """Which replicas of the base load the adapter."""
    unload: Unload = Unload()
    """How the adapter leaves a replica."""


class PodState(StrEnum):
    """How far the adapter is on one replica."""

    LOADING = "Loading"
    LOADED = "Loaded"
    RETRYING = "Retrying"
    FAILED = "Failed"
    UNREACHABLE = "Unreachable"
    UNLOADING = "Unloading"


class AdapterPodStatus(Struct):
    """The adapter on one replica."""

    name: str = Field(max_length=253)
    """Name of the pod."""
    state: PodState
    """Loading, Loaded, Retrying (after a failure), Failed (not tried again until the spec changes), Unreachable or
    Unloading."""
    load_seconds: DecimalString | None = None
    """How long the load took."""
    attempts: int | None = Field(default=None, ge=1)
    """Failed attempts in a row."""
    not_before: Time | None = None
    """When it is tried again."""
    message: str = Field(default="", max_length=512)
    """What is waited for, or why it failed."""


class LoRAAdapterStatus(Struct):
    """The state of the adapter that the operator last observed."""

    observed_generation: int | None = Field(default=None, ge=0)
    """The generation of the spec that this status was made from."""
    conditions: Conditions = ()
    """Ready, Reconciling, Stalled, SourceResolved, Loaded."""
    adapter_name: str = Field(default="", max_length=253)
    """The model name in requests."""
    desired_replicas: int | None = Field(default=None, ge=0)
    """Replicas that should have the adapter."""
    loaded_replicas: int | None = Field(default=None, ge=0)
    """Replicas that answer requests for it."""
    loaded: str = Field(default="", max_length=32)
    """loadedReplicas/desiredReplicas, for kubectl get."""
    resolved_digest: str = Field(default="", max_length=71)
    """Digest of the files that are loaded."""
    rank: int | None = Field(default=None, ge=0)
    """Rank of the adapter."""
    size_bytes: int | None = Field(default=None, ge=0)
    """Memory that it takes on a replica."""
    last_used_time: Time | None = None
    """When a request last used it, to within a few minutes."""
    pods: Annotated[tuple[AdapterPodStatus, ...], bounded_list(at_most=64, key="name")] = ()
    """The adapter on each replica; of a large base only replicas that do not have it yet, at most 64."""


class LoRAAdapter(Struct):
    """A LoRA adapter of an InferenceService: loaded into its running replicas, and served as a model of its own."""

    model_config = cel_rules(
        Rule(
            "(has(self.spec.adapterName) && self.spec.adapterName != '') || size(self.metadata.name) <= 128",
            "metadata.name may have at most 128 characters where adapterName is empty",
            ".metadata.name",
        ),
        Rule(
            f"!self.metadata.name.contains('{NEXT_VERSION}')",
            f"metadata.name may not contain '{NEXT_VERSION}'",
            ".metadata.name",
        ),
    )

    KIND: ClassVar[str] = "LoRAAdapter"
    PLURAL: ClassVar[str] = "loraadapters"

    api_version: str = API_VERSION
    kind: str = "LoRAAdapter"
    metadata: ObjectMeta
    spec: LoRAAdapterSpec
    """The desired state of the adapter: its base, source and placement."""
    status: LoRAAdapterStatus = LoRAAdapterStatus()
    """The state of the adapter that the operator last observed."""

    @property
    def adapter_name(self) -> str:
        """What clients send as `model`."""
        return self.spec.adapter_name or self.metadata.name

    @property
    def base(self) -> ServiceKey:
        """Namespace and name of the InferenceService."""
        return ServiceKey(self.metadata.namespace, self.spec.base_ref.name)

    @property
    def version(self) -> str:
        """A short hash of the source; replicas report the one that they loaded."""
        return source_version(self.spec.source.uri, self.spec.source.digest)

    @property
    def is_being_deleted(self) -> bool:
        """Whether a deletion waits for the replicas to drop the adapter."""
        return self.metadata.deletion_timestamp is not None

    @classmethod
    def parse(cls, raw: dict[str, Any]) -> "LoRAAdapter":
        """The kind from what the API server sent; raises pydantic.ValidationError."""
        return cls.model_validate(raw)


def source_version(uri: str, digest: str) -> str:
    """Eight hex digits that change when the source does."""
    return hashlib.sha256(f"{uri}\n{digest}".encode()).hexdigest()[:8]
