"""Loads a LoRA adapter, or a rank's share of it, from its files into host memory, checked and ready for a slot.

`base_model_name_or_path` may be wrong and is not used: the shapes of all modules are checked instead.
"""

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from slipway_runtime.models.adapter_files import (
    MAX_CONFIG_BYTES,
    MODULES,
    WEIGHTS,
    AdapterConfig,
    AdapterRefusedError,
    adapter_digest,
    adapter_files,
    digest_of,
    parse_adapter_config,
    refuse_modules,
)
from slipway_runtime.models.config import ModelConfig
from slipway_runtime.models.sharding import WHOLE, Shard

__all__ = ["AdapterRefusedError", "HostAdapter", "adapter_digest", "lora_modules", "read_adapter", "slot_bytes"]

_TENSOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_INPUTS_DIVIDED = ("o_proj", "down_proj")  # modules of which a rank has columns, and rows of all others: `sharding`
_HEADER_BYTES = 4 << 20  # room for names and metadata in the file


@dataclass(frozen=True)
class HostAdapter:
    """A LoRA adapter, or a tensor-parallel rank's share of it, in host memory."""

    digest: str
    rank: int  # the largest of its modules
    matrices: Mapping[str, tuple[Tensor, Tensor]]  # by module: A (r, in), and B (r, out) with the scaling in it
    bytes: int


def lora_modules(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """The modules of a model, or of a rank's part, that an adapter may change: (out, in) by their names in the file."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_q_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes = {
        "self_attn.q_proj": (q_size, hidden),
        "self_attn.k_proj": (kv_size, hidden),
        "self_attn.v_proj": (kv_size, hidden),
        "self_attn.o_proj": (hidden, q_size),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    assert {name.rpartition(".")[2] for name in shapes} == set(MODULES)
    return {
        f"model.layers.{layer}.{name}": shape for layer in range(config.num_layers) for name, shape in shapes.items()
    }


def _part_of_module(module: str, config: ModelConfig, share: Shard) -> slice:
    """The rows of B, or the columns of A, of a module that are the rank's."""
    if module.endswith(("q_proj", "o_proj")):
        return share.of_heads(config.num_q_heads, config.head_dim)
    if module.endswith(("k_proj", "v_proj")):
        return share.of_heads(config.num_kv_heads, config.head_dim)
    return share.of_features(config.intermediate_size)


def slot_bytes(config: ModelConfig, max_rank: int, bytes_per_value: int) -> int:
    """Memory of one adapter slot: every module at the largest rank."""
    return sum(max_rank * (rows + columns) for rows, columns in lora_modules(config).values()) * bytes_per_value


def read_adapter(
    path: Path,
    config: ModelConfig,
    *,
    max_rank: int,
    dtype: torch.dtype,
    digest: str = "",
    base_digest: Callable[[], str] | None = None,
    pin_memory: bool = False,
    share: Shard = WHOLE,
) -> HostAdapter:
    """Read and check the adapter in the directory `path`. Blocks: call it outside of the step loop's thread.

    config: of the whole base model. dtype: of the engine. digest: the expected digest, if any. base_digest: computes
    the digest of the base model's weights; called only if the adapter names one. share: the rank that reads.
    Raises AdapterRefusedError.
    """
    files = adapter_files(path)
    # Read once, so that the checked bytes are the used bytes, even if the files change meanwhile.
    most = slot_bytes(config, max_rank, bytes_per_value=4) + _HEADER_BYTES
    raw_config = _read(files.config, MAX_CONFIG_BYTES)
    said = parse_adapter_config(raw_config)
    if said.max_rank > max_rank:
        raise AdapterRefusedError(f"the adapter's rank is {said.max_rank}; this engine takes adapters up to {max_rank}")
    raw_weights = _read(files.weights, most)
    found = digest_of(hashlib.sha256(raw_config).hexdigest(), hashlib.sha256(raw_weights).hexdigest())
    if digest and found != digest.lower():
        raise AdapterRefusedError(f"the adapter has the digest {found}, and {digest} was requested")
    if said.base_digest and base_digest is not None and said.base_digest.lower() != (ours := base_digest()):
        raise AdapterRefusedError(
            f"the adapter was made for a base model with the digest {said.base_digest[:80]}; this one has {ours}"
        )
    pairs = _pairs(_tensors(raw_weights), said, config)
    matrices = {}
    for module, (a, b) in pairs.items():
        if module.endswith(_INPUTS_DIVIDED):
            a = a[:, _part_of_module(module, config, share)]
        else:
            b = b[_part_of_module(module, config, share)]
        scaled = (b.float() * said.scaling_of(module)).T.to(dtype).contiguous()
        ready = a.to(dtype).contiguous(), scaled
        matrices[module] = (ready[0].pin_memory(), ready[1].pin_memory()) if pin_memory else ready
    return HostAdapter(
        digest=found,
        rank=max(a.shape[0] for a, _ in matrices.values()),
        matrices=matrices,
        bytes=sum(a.nbytes + b.nbytes for a, b in matrices.values()),
    )


def _read(file: Path, most: int) -> bytes:
    """The file's bytes; a file larger than `most` bytes is refused."""
    with file.open("rb") as opened:
        content = opened.read(most + 1)
    if len(content) > most:
        raise AdapterRefusedError(f"{file.name} is larger than {most} bytes, which no adapter for this engine needs")
    return content


def _tensors(content: bytes) -> dict[str, Tensor]:
    try:
        return load(content)
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise AdapterRefusedError(f"{WEIGHTS} is broken, cut off, or not a safetensors file") from error


def _pairs(tensors: dict[str, Tensor], said: AdapterConfig, config: ModelConfig) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B by module, each checked against the base model and the adapter's config."""
    halves: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise AdapterRefusedError(f"{WEIGHTS} holds a tensor that is not a matrix of a LoRA adapter: {name[:200]}")
        if match[2] in halves.setdefault(match[1], {}):
            raise AdapterRefusedError(f"{WEIGHTS} holds lora_{match[2]} of {match[1][:200]} twice")
        halves[match[1]][match[2]] = tensor
    if not halves:
        raise AdapterRefusedError(f"{WEIGHTS} holds no tensors")
    refuse_modules({module.rpartition(".")[2] for module in halves})
    _check_choice(set(halves), said)
    known = lora_modules(config)
    return {module: _checked(module, both, said, known, config) for module, both in sorted(halves.items())}


def _check_choice(modules: set[str], said: AdapterConfig) -> None:
    """Check that the tensors are for exactly the target_modules, in layers of layers_to_transform."""
    if said.target_modules is not None:
        leaves = {module.rpartition(".")[2] for module in modules}
        if more := sorted(leaves - said.target_modules):
            raise AdapterRefusedError(f"{WEIGHTS} changes {', '.join(more)}, which target_modules does not name")
        if missing := sorted(said.target_modules - leaves):
            raise AdapterRefusedError(f"target_modules names {', '.join(missing)}, and {WEIGHTS} has no tensors of it")
    if said.layers is not None:
        layers = {int(match[1]) for module in modules if (match := _LAYER.match(module))}
        if more_layers := sorted(layers - said.layers):
            raise AdapterRefusedError(
                f"{WEIGHTS} changes layer {more_layers[0]}, which layers_to_transform does not name"
            )


def _checked(
    module: str,
    both: dict[str, Tensor],
    said: AdapterConfig,
    known: dict[str, tuple[int, int]],
    config: ModelConfig,
) -> tuple[Tensor, Tensor]:
    if both.keys() != {"A", "B"}:
        raise AdapterRefusedError(f"{WEIGHTS} lacks lora_{'B' if 'A' in both else 'A'} of {module[:200]}")
    if module not in known:
        layer = _LAYER.match(module)
        if layer and int(layer[1]) >= config.num_layers:
            raise AdapterRefusedError(
                f"the adapter was made for another base model: it changes layer {layer[1]}, and this model has the "
                f"layers 0 to {config.num_layers - 1}"
            )
        raise AdapterRefusedError(f"the adapter was made for another base model: there is no {module[:200]} here")
    a, b = both["A"], both["B"]
    rank, (out_size, in_size) = said.rank_of(module), known[module]
    for half, tensor, expected in (("A", a, (rank, in_size)), ("B", b, (out_size, rank))):
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise AdapterRefusedError(
                f"lora_{half} of {module} holds {tensor.dtype}: only 16 and 32 bit floats are read"
            )
        if tensor.ndim == 2 and expected[half == "A"] != tensor.shape[half == "A"]:
            base = tensor.shape[half == "A"]
            raise AdapterRefusedError(
                f"the adapter was made for another base model: {module} {'takes' if half == 'A' else 'gives'} {base} "
                f"values there and {expected[half == 'A']} here"
            )
        if tuple(tensor.shape) != expected:
            raise AdapterRefusedError(
                f"lora_{half} of {module} has the shape {tuple(tensor.shape)}; rank {rank} asks for {expected}"
            )
        if not bool(tensor.isfinite().all()):
            raise AdapterRefusedError(f"lora_{half} of {module} has NaN or infinite values")
    return a, b
