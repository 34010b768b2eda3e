"""Fields that say how a model reaches a replica: `spec.model.cache`, `spec.model.network`, `spec.prePull`."""

from enum import StrEnum
from typing import Final

from pydantic import Field

from slipway_api.types import Rule, Struct, cel_rules

# No user:password@ in an address: it would stand in the pod's environment for everybody who may read pods.
_HOST: Final = "[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?(:[0-9]{1,5})?"
_ENDPOINT: Final = f"https?://{_HOST}(/[A-Za-z0-9._~/-]*)?"
_PROXY: Final = f"https?://{_HOST}/?"


class CachePolicy(StrEnum):
    """Where a replica keeps the model that it downloads."""

    NONE = "None"
    SHARED = "Shared"
    NODE = "Node"


class ModelCache(Struct):
    """Where replicas keep the model that they download, so that others need not download it again."""

    model_config = cel_rules(
        Rule(
            "(self.policy == 'Shared') == (has(self.claimName) && self.claimName != '')",
            "cache.claimName is needed for policy Shared, and only there",
            ".claimName",
        )
    )

    policy: CachePolicy = CachePolicy.NONE
    """None: each pod downloads the model for itself. Shared: the claim claimName, which all replicas mount and write
    (ReadWriteMany; a read-only claim is a pvc:// model). Node: a folder of the node, which the chart names in
    modelCache.nodePath; the second pod on a node downloads nothing. Pods with such a folder need a namespace that
    PodSecurity does not restrict; elsewhere an oci:// model is kept by the node too."""
    claim_name: str = Field(
        default="", pattern=r"^([a-z0-9]([a-z0-9-]*[a-z0-9])?([.][a-z0-9]([a-z0-9-]*[a-z0-9])?)*)?$", max_length=253
    )
    """For policy Shared: a PersistentVolumeClaim of the same namespace."""


class CABundle(Struct):
    """A ConfigMap of the same namespace with certificates."""

    name: str = Field(min_length=1, max_length=253)
    """Name of the ConfigMap."""
    key: str = Field(default="ca.crt", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=253)
    """Its key with the certificates, in PEM."""


class ModelNetwork(Struct):
    """How replicas reach the sources of models and adapters from a private network."""

    model_config = cel_rules(
        Rule(
            f"!has(self.hubEndpoint) || self.hubEndpoint == '' || self.hubEndpoint.matches('^{_ENDPOINT}$')",
            "network.hubEndpoint must be http(s)://host, with a port or a path, and without a password",
            ".hubEndpoint",
        ),
        Rule(
            f"!has(self.proxy) || self.proxy == '' || self.proxy.matches('^{_PROXY}$')",
            "network.proxy must be http(s)://host:port, without a password: a proxy with one goes into runtime.env, "
            "as HTTPS_PROXY with valueFrom a Secret",
            ".proxy",
        ),
        Rule(
            "!has(self.noProxy) || self.noProxy == '' || (has(self.proxy) && self.proxy != '')",
            "network.noProxy needs network.proxy",
            ".noProxy",
        ),
    )

    hub_endpoint: str = Field(default="", max_length=256)
    """The hub of hf:// addresses, such as https://hub.example.internal; empty: the public one."""
    proxy: str = Field(default="", max_length=256)
    """An HTTP proxy for all downloads, such as http://proxy.example.internal:3128."""
    no_proxy: str = Field(default="", pattern=r"^[A-Za-z0-9.,:/*_-]*$", max_length=1024)
    """Hosts, domains and networks that are reached without the proxy, separated by commas."""
    ca_bundle_ref: CABundle | None = None
    """A ConfigMap with the certificates of the authorities that sources are checked against, in place of the image's
    own; pods wait for it in ContainerCreating."""


class PrePull(Struct):
    """Pods that bring image and model to nodes before a replica is placed there."""

    max_concurrent: int = Field(default=2, ge=1, le=64)
    """Nodes that pull at the same time."""


PRE_PULL_RULE: Final = Rule(
    "!has(self.prePull) || self.model.uri.startsWith('oci://') || self.model.uri.startsWith('file://') || "
    "(has(self.model.cache) && self.model.cache.policy != 'None')",
    "prePull needs a model that a node or a claim keeps: model.cache.policy Node or Shared, or an oci:// address",
    ".prePull",
)
CACHE_RULE: Final = Rule(
    "!has(self.cache) || self.cache.policy == 'None' || self.uri.matches('^(hf|s3|https?)://')",
    "cache.policy must be None for a model that is not downloaded: pvc://, oci:// and file:// are there already",
    ".cache",
)
