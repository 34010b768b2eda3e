"""A LoRA adapter's files on disk: their paths, the digest that identifies an adapter, and its adapter_config.json.

No torch: the API process identifies adapters by their digest, and refuses early what the engine would refuse.

| file                        | content                                       |
|-----------------------------|-----------------------------------------------|
| `adapter_config.json`       | PEFT's description: rank, scaling, modules    |
| `adapter_model.safetensors` | the matrices                                  |

Each key of adapter_config.json is used, known to have no effect, or refused. The modules that an adapter changes are
read from its tensors; the fields that chose them in training must agree.
"""

import hashlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"
MAX_CONFIG_BYTES: Final = 1 << 20
NO_ROOM_FOR_EXPERTS: Final = (
    "the adapter changes experts, and the slots of this server have no room for them: "
    "set spec.runtime.lora.experts (--lora-experts)"
)
_PICKLES = ("adapter_model.bin", "adapter_model.pt", "pytorch_model.bin")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")


class AdapterRefusedError(Exception):
    """An adapter that this engine cannot serve; the message is a sentence for the user."""


class AdapterNotFoundError(AdapterRefusedError):
    """The adapter's path does not exist."""


@dataclass(frozen=True)
class AdapterFiles:
    """Paths of an adapter's two files, links resolved."""

    config: Path
    weights: Path


def check_adapter_name(name: str) -> None:
    """Raise AdapterRefusedError for an invalid name: names appear in URLs, metrics and logs."""
    if not _NAME.fullmatch(name) or ".." in name:
        raise AdapterRefusedError(
            "an adapter's name is made of letters, digits, '.', '_' and '-', starts with a letter or digit, has no "
            "'..' in it, and is at most 253 characters long"
        )


def adapter_files(path: Path, roots: Sequence[Path] = ()) -> AdapterFiles:
    """The files of the adapter in the directory `path`; with `roots`, only inside one of these directories."""
    folder = path.resolve()
    if roots and not any(folder.is_relative_to(root.resolve()) for root in roots):
        raise AdapterRefusedError("the adapter lies outside the directories that adapters may be loaded from")
    if not folder.is_dir():
        raise AdapterNotFoundError("there is no directory at the adapter's path")
    if not (folder / WEIGHTS).exists():
        for name in _PICKLES:
            if (folder / name).exists():
                raise AdapterRefusedError(
                    f"the adapter is pickled ({name}): loading it could run code. Only safetensors is read; save the "
                    "adapter with safe_serialization=True"
                )
    return AdapterFiles(_file(folder, CONFIG), _file(folder, WEIGHTS))


def _file(folder: Path, name: str) -> Path:
    file = (folder / name).resolve()
    allowed = [folder]
    if folder.parent.name == "snapshots":  # Hugging Face cache: a revision is a folder of links to blobs
        allowed.append(folder.parent.parent / "blobs")
    if not any(file.is_relative_to(place) for place in allowed):
        raise AdapterRefusedError(f"{name} is a link out of the adapter's directory")
    if not file.is_file():
        raise AdapterRefusedError(f"there is no {name} in the adapter's directory")
    return file


def adapter_digest(path: Path, roots: Sequence[Path] = ()) -> str:
    """`sha256:…` of an adapter's content, at any path the same: the adapter's only name inside the engine.

    It is the output of `sha256sum adapter_config.json adapter_model.safetensors | sha256sum`.
    """
    files = adapter_files(path, roots)
    return digest_of(_sha256(files.config), _sha256(files.weights))


def digest_of(config_sha256: str, weights_sha256: str) -> str:
    """An adapter's digest from the SHA-256 digests of its files, in hex."""
    listing = f"{config_sha256}  {CONFIG}\n{weights_sha256}  {WEIGHTS}\n"
    return f"sha256:{hashlib.sha256(listing.encode()).hexdigest()}"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj", "gate_up_proj")
# Names that some families have for the matrices of their MLP or of their experts.
_OF_FAMILIES = ("c_fc", "c_proj", "w1", "w2", "w3", "input_linear", "output_linear")
_EMBEDDINGS = ("embed_tokens", "lm_head")
_PLAIN = re.compile(r"\w[\w.]*")


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """An adapter's ranks and scaling, and the modules that it claims to change."""

    rank: int  # of modules that rank_pattern does not name
    alpha: float  # of modules that alpha_pattern does not name
    rslora: bool  # scaled by alpha / sqrt(rank) instead of alpha / rank
    rank_pattern: dict[str, int]
    alpha_pattern: dict[str, float]
    target_modules: frozenset[str] | None  # None: given as an expression; the tensors' names are used
    target_parameters: frozenset[str]  # tensors of all experts of a layer, such as mlp.experts.down_proj
    layers: frozenset[int] | None  # None: all
    base_digest: str  # of the base model's weights; empty: not given

    @property
    def max_rank(self) -> int:
        """The largest rank of any module."""
        return max(self.rank, *self.rank_pattern.values()) if self.rank_pattern else self.rank

    def rank_of(self, module: str) -> int:
        """The rank that this module should have."""
        return int(_of_pattern(self.rank_pattern, module, self.rank))

    def scaling_of(self, module: str) -> float:
        """Factor of the product of this module's matrices A and B."""
        rank = self.rank_of(module)
        return _of_pattern(self.alpha_pattern, module, self.alpha) / (math.sqrt(rank) if self.rslora else rank)


def _of_pattern(pattern: dict[str, Any], module: str, default: float) -> float:
    """PEFT's rule: the first key that is the module's name or the end of it, from a dot on."""
    return next((value for key, value in pattern.items() if f".{module}".endswith(f".{key}")), default)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Keys without effect on what a trained adapter computes: training, bookkeeping, or a choice of modules that the
# tensors show.
_INERT = _words(
    "task_type base_model_name_or_path revision auto_mapping inference_mode peft_version lora_dropout megatron_core "
    "exclude_modules layers_pattern eva_config loftq_config corda_config lora_ga_config runtime_config "
    "ensure_weight_tying qalora_group_size"
)
_HONOURED = _words(
    "peft_type r lora_alpha use_rslora rank_pattern alpha_pattern target_modules layers_to_transform bias "
    "fan_in_fan_out init_lora_weights base_model_digest target_parameters"
)
_REFUSED = {
    "use_dora": "DoRA adapters (use_dora) are not supported",
    "lora_bias": "adapters with biases (lora_bias) are not supported",
    "modules_to_save": "modules_to_save replaces whole modules of the base model, which adapters here cannot",
    "trainable_token_indices": "adapters that change embeddings (trainable_token_indices) are not supported",
    "layer_replication": "layer_replication changes the base model, which is shared",
    "use_qalora": "QALoRA adapters (use_qalora) are not supported",
    "alora_invocation_tokens": "activated adapters (alora_invocation_tokens) are not supported",
}
# Supported initializations. Others move a part of the base model into the adapter, which would be added twice.
_INITS = (None, True, False, "gaussian", "eva", "orthogonal")


def read_adapter_config(path: Path) -> AdapterConfig:
    """Read the adapter_config.json of the adapter in the directory `path`; raise AdapterRefusedError."""
    with adapter_files(path).config.open("rb") as file:
        return parse_adapter_config(file.read(MAX_CONFIG_BYTES + 1))


def parse_adapter_config(text: bytes) -> AdapterConfig:
    """Parse an adapter_config.json. Raises AdapterRefusedError, which names the key that is not supported."""
    raw = _object(text)
    kind = raw.get("peft_type")
    if kind != "LORA":
        raise AdapterRefusedError(f"{CONFIG}: peft_type is {kind!r}; only 'LORA' is supported")
    for key, sentence in _REFUSED.items():
        if raw.get(key):
            raise AdapterRefusedError(f"{CONFIG}: {sentence}")
    unknown = sorted(key for key in raw.keys() - _INERT - _HONOURED - _REFUSED.keys() if raw[key] not in (None, False))
    if unknown:
        raise AdapterRefusedError(f"{CONFIG} asks for what this engine does not know: {', '.join(unknown)[:200]}")
    if raw.get("bias") not in (None, "none"):
        raise AdapterRefusedError(f"{CONFIG}: bias is {raw['bias']!r}; only 'none' is supported")
    if raw.get("fan_in_fan_out"):
        raise AdapterRefusedError(f"{CONFIG}: fan_in_fan_out is for models that this engine does not run")
    if raw.get("init_lora_weights") not in _INITS:
        raise AdapterRefusedError(
            f"{CONFIG}: init_lora_weights is {raw['init_lora_weights']!r}: such an adapter belongs to a base model "
            "that was changed with it; convert it to a plain LoRA adapter"
        )
    return AdapterConfig(
        rank=_whole("r", raw.get("r")),
        alpha=_number("lora_alpha", raw.get("lora_alpha", 8)),
        rslora=bool(raw.get("use_rslora")),
        rank_pattern={key: _whole("rank_pattern", value) for key, value in _pattern(raw, "rank_pattern")},
        alpha_pattern={key: _number("alpha_pattern", value) for key, value in _pattern(raw, "alpha_pattern")},
        target_modules=_target_modules(raw.get("target_modules")),
        target_parameters=_target_parameters(raw.get("target_parameters")),
        layers=_layers(raw.get("layers_to_transform")),
        base_digest=str(raw.get("base_model_digest") or ""),
    )


def _object(text: bytes) -> dict[str, Any]:
    if len(text) > MAX_CONFIG_BYTES:
        raise AdapterRefusedError(f"{CONFIG} is larger than {MAX_CONFIG_BYTES} bytes")
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise AdapterRefusedError(f"{CONFIG} is not JSON") from error
    if not isinstance(raw, dict):
        raise AdapterRefusedError(f"{CONFIG} holds no JSON object")
    return raw


def _whole(key: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise AdapterRefusedError(f"{CONFIG}: {key} is {value!r}; a positive whole number is needed"[:200])
    return value


def _number(key: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise AdapterRefusedError(f"{CONFIG}: {key} is {value!r}; a number is needed"[:200])
    return float(value)


def _pattern(raw: dict[str, Any], key: str) -> list[tuple[str, Any]]:
    pattern = raw.get(key) or {}
    if not isinstance(pattern, dict):
        raise AdapterRefusedError(f"{CONFIG}: {key} is not a JSON object")
    for name in pattern:
        # PEFT takes regular expressions here; one that never ends would block the loading of all other adapters.
        if not _PLAIN.fullmatch(name):
            raise AdapterRefusedError(f"{CONFIG}: {key} has {name!r}; only plain module names are supported"[:200])
    return list(pattern.items())


def _target_modules(found: object) -> frozenset[str] | None:
    if found is None or isinstance(found, str):
        return None
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise AdapterRefusedError(f"{CONFIG}: target_modules is neither a list of names nor an expression")
    leaves = {name.rpartition(".")[2] for name in found}
    refuse_modules(leaves)
    return frozenset(leaves)


def _target_parameters(found: object) -> frozenset[str]:
    if found is None:
        return frozenset()
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise AdapterRefusedError(f"{CONFIG}: target_parameters is not a list of names")
    others = sorted(name for name in found if not re.search(r"(^|\.)experts\.(gate_up_proj|down_proj)$", name))
    if others:
        raise AdapterRefusedError(
            f"{CONFIG}: target_parameters names {', '.join(others)[:200]}; of bare parameters, adapters change "
            "experts.gate_up_proj and experts.down_proj only"
        )
    return frozenset(found)


def refuse_modules(leaves: set[str]) -> None:
    """Raise AdapterRefusedError for modules that adapters cannot change in this engine."""
    embeddings = sorted(leaves.intersection(_EMBEDDINGS))
    if embeddings:
        raise AdapterRefusedError(
            f"the adapter changes {', '.join(embeddings)}: embeddings and the output layer are shared by all adapters"
        )
    unknown = sorted(leaves.difference(MODULES, _OF_FAMILIES))
    if unknown:
        raise AdapterRefusedError(
            f"the adapter changes modules that this engine does not adapt: {', '.join(unknown)[:200]}; "
            f"it knows {', '.join(MODULES)}"
        )


def _layers(found: object) -> frozenset[int] | None:
    if found is None:
        return None
    layers = found if isinstance(found, list) else [found]
    if not all(isinstance(layer, int) and not isinstance(layer, bool) for layer in layers):
        raise AdapterRefusedError(f"{CONFIG}: layers_to_transform is neither a layer nor a list of layers")
    return frozenset(layers)
