"""The field `spec.model` of an InferenceService: the model's address, credentials, tokenizer and sampling defaults.

| address                      | what it is                               | keys of the credentials' Secret          |
|------------------------------|------------------------------------------|------------------------------------------|
| `hf://organisation/name@rev` | a repository on a hub                    | HF_TOKEN                                 |
| `s3://bucket/prefix`         | the objects under a prefix               | AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY |
| `https://host/path`          | files over HTTP                          | HTTP_BEARER_TOKEN                        |
| `pvc://claim/path`           | a directory of a claim, read-only        |                                          |
| `oci://registry/name:tag`    | an image volume, pulled by the kubelet   | (imagePullSecrets of the template)       |
| `file:///path`               | a directory of the image, or of a volume |                                          |
"""

from enum import StrEnum
from typing import Annotated, Final

from pydantic import Field

from slipway_api.model_source import CACHE_RULE, ModelCache, ModelNetwork
from slipway_api.types import DecimalString, LocalReference, Rule, Struct, bounded_list, cel_rules, decimal_rule

_HF = "hf://[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*(@[A-Za-z0-9][A-Za-z0-9._/-]*)?"
_S3 = "s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^ ]*)?"
_HTTP = "https?://[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?(:[0-9]{1,5})?/[^ ]+"  # no user:password@, which would leak
_FILE = "file:///[^ ]+"
_PVC = "pvc://[a-z0-9]([a-z0-9-]*[a-z0-9])?([.][a-z0-9]([a-z0-9-]*[a-z0-9])?)*(/[^ ]*)?"
# A reference to an image; after # a directory in it.
_OCI = (
    "oci://[A-Za-z0-9][A-Za-z0-9.-]*(:[0-9]{1,5})?(/[a-z0-9][a-z0-9._-]*)+(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?"
    "(@sha256:[0-9a-f]{64})?(#[A-Za-z0-9_][A-Za-z0-9._/-]*)?"
)
_URI_HELP = (
    "must be hf://organisation/model, hf://organisation/model@revision, s3://bucket/prefix, https://host/path{} or "
    "file:///absolute/path"
)

# Linux takes at most 128 KiB in one argument of a program, and JSON writes a character in up to six bytes.
WARM_PROMPT_CHARACTERS: Final = 16_384


def _is_uri(field: str, *kinds: str) -> str:
    return f"{field}.matches('^({'|'.join(kinds)})$') && !{field}.matches('/[.][.](/|$)')"


def fetched_uri_rule() -> Rule:
    """The rule for the address of an adapter or a draft model: pods mount no volume for it, so not pvc:// or oci://."""
    return Rule(_is_uri("self.uri", _HF, _S3, _HTTP, _FILE), f"uri {_URI_HELP.format('')}", ".uri")


class TokenizerSource(Struct):
    """A tokenizer other than the model's own."""

    model_config = cel_rules(
        Rule(
            f"!has(self.uri) || self.uri == '' || ({_is_uri('self.uri', _HF, _S3, _HTTP, _FILE)})",
            f"uri {_URI_HELP.format('')}",
            ".uri",
        ),
        Rule(
            "!has(self.sha256) || self.sha256.matches('^([0-9a-f]{64})?$')", "sha256 must be 64 hex digits", ".sha256"
        ),
    )

    uri: str = Field(default="", max_length=512)
    """Address of the tokenizer; empty: the model's directory."""
    sha256: str = Field(default="", max_length=64)
    """SHA-256 of tokenizer.json; a replica with another one refuses to start. Empty: not checked."""


class SamplingDefaults(Struct):
    """Default sampling parameters of requests; part of the revision."""

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


class Role(StrEnum):
    """Role of the author of a message."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"


class WarmMessage(Struct):
    """One message of a chat."""

    role: Role
    """Role of its author: system, user or assistant."""
    content: str = Field(min_length=1, max_length=WARM_PROMPT_CHARACTERS)
    """Text of the message."""


class WarmPrompt(Struct):
    """A prefix that many requests share, computed before a replica is ready."""

    model_config = cel_rules(
        Rule(
            "(has(self.prompt) && self.prompt != '') != (has(self.messages) && size(self.messages) > 0)",
            "a warm prompt must be either a prompt or messages",
        ),
        Rule(
            f"!has(self.messages) || self.messages.map(one, size(one.content)).sum() <= {WARM_PROMPT_CHARACTERS}",
            f"the messages of a warm prompt may have at most {WARM_PROMPT_CHARACTERS} characters together",
            ".messages",
        ),
    )

    prompt: str = Field(default="", max_length=WARM_PROMPT_CHARACTERS)
    """The beginning of a text completion."""
    messages: Annotated[tuple[WarmMessage, ...], bounded_list(at_most=8)] = ()
    """The first messages of a chat, often only the system message; the chat template makes a prompt of them."""


class Shape(Struct):
    """Sizes of the model, from which its memory is planned before a replica starts."""

    model_config = cel_rules(
        Rule("self.heads % self.kvHeads == 0", "heads must be a multiple of kvHeads", ".kvHeads"),
        Rule(
            "has(self.headDim) && self.headDim > 0 || self.hiddenSize % self.heads == 0",
            "headDim is needed where hiddenSize is not a multiple of heads",
            ".headDim",
        ),
        Rule(
            "!has(self.experts) || self.experts == 0 || has(self.expertsPerToken) && self.expertsPerToken > 0 && "
            "self.expertsPerToken <= self.experts && has(self.moeIntermediateSize) && self.moeIntermediateSize > 0",
            "experts needs expertsPerToken, at most as many, and moeIntermediateSize",
            ".experts",
        ),
    )

    layers: int = Field(ge=1, le=1000)
    """num_hidden_layers of its config.json."""
    hidden_size: int = Field(ge=1, le=1_000_000)
    """hidden_size."""
    heads: int = Field(ge=1, le=10_000)
    """num_attention_heads."""
    kv_heads: int = Field(ge=1, le=10_000)
    """num_key_value_heads: the KV cache has keys and values of these alone."""
    head_dim: int = Field(default=0, ge=0, le=10_000)
    """head_dim; 0: hiddenSize divided by heads."""
    latent_size: int = Field(default=0, ge=0, le=32_000)
    """kv_lora_rank plus qk_rope_head_dim of latent attention (MLA): the KV cache has one vector of it for each token.
    0: the cache has keys and values."""
    parameters: int = Field(ge=1, le=100_000_000_000_000)
    """Number of weights, such as 8030261248; of a mixture of experts, with all experts."""
    experts: int = Field(default=0, ge=0, le=10_000)
    """num_experts or num_local_experts of a mixture of experts; 0: a dense model."""
    experts_per_token: int = Field(default=0, ge=0, le=10_000)
    """num_experts_per_tok."""
    moe_intermediate_size: int = Field(default=0, ge=0, le=1_000_000)
    """moe_intermediate_size, or intermediate_size where config.json has no such key: the inner width of one expert."""


class Model(Struct):
    """The model, its served name and its credentials."""

    model_config = cel_rules(
        Rule(
            _is_uri("self.uri", _HF, _S3, _HTTP, _PVC, _OCI, _FILE),
            f"uri {_URI_HELP.format(', pvc://claim/path, oci://registry/name:tag')}",
            ".uri",
        ),
        CACHE_RULE,
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
    """Address of the checkpoint: hf://organisation/model@revision, s3://bucket/prefix, https://host/path,
    pvc://claim/path of a PersistentVolumeClaim, oci://registry/name:tag#folder of an image that is mounted as a volume,
    or file:///path of the runtime's image or of a mounted volume."""
    credentials_secret_ref: LocalReference | None = None
    """A Secret of the same namespace with the credentials for the address. Its keys: HF_TOKEN for hf://;
    AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and if needed AWS_SESSION_TOKEN, AWS_REGION and AWS_ENDPOINT_URL,
    for s3://; HTTP_BEARER_TOKEN for https://."""
    served_name: str = Field(default="", max_length=128)
    """The model name in requests; empty: metadata.name."""
    digest: str = Field(default="", max_length=71)
    """Digest of the checkpoint, sha256:...; a replica that finds another one refuses to start. Empty: not checked."""
    tokenizer: TokenizerSource = TokenizerSource()
    """A tokenizer other than the model's own."""
    chat_template: str = Field(default="", max_length=32768)
    """A Jinja chat template that replaces the model's own."""
    sampling_defaults: SamplingDefaults = SamplingDefaults()
    """Default sampling parameters of requests; part of the revision."""
    shape: Shape | None = None
    """Sizes of the model, for planning before any replica starts. Absent: the runtime plans when it has loaded the
    configuration. Not part of the revision."""
    cache: ModelCache = ModelCache()
    """Where replicas keep the model that they download, so that others need not download it again."""
    network: ModelNetwork = ModelNetwork()
    """How replicas reach the sources of models and adapters from a private network."""
    warm_prompts: Annotated[tuple[WarmPrompt, ...], bounded_list(at_most=16)] = ()
    """Prefixes that many requests share, such as a system message: computed before a replica is ready."""
