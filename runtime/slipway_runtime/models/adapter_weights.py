"""Loads a LoRA adapter, or a rank's share of it, from its files into host memory, checked and ready for a slot.

`base_model_name_or_path` may be wrong and is not used: the shapes of all modules are checked instead.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load
from torch import Tensor

from slipway_runtime.layers.rotary import reorder_rotary_dims
from slipway_runtime.models.adapter_files import (
    MAX_CONFIG_BYTES,
    NO_ROOM_FOR_EXPERTS,
    WEIGHTS,
    AdapterRefusedError,
    adapter_digest,
    adapter_files,
    digest_of,
    parse_adapter_config,
)
from slipway_runtime.models.adapter_modules import Module, adapted_modules
from slipway_runtime.models.adapter_pairs import changes_experts, pairs_of
from slipway_runtime.models.config import ModelConfig
from slipway_runtime.models.sharding import WHOLE, Shard

__all__ = ["AdapterRefusedError", "HostAdapter", "adapter_digest", "lora_modules", "read_adapter", "slot_bytes"]

_HEADER_BYTES = 4 << 20  # room for metadata in the file
_NAME_BYTES = 512  # room for the names of the two tensors of a matrix


@dataclass(frozen=True)
class HostAdapter:
    """A LoRA adapter, or a tensor-parallel rank's share of it, in host memory."""

    digest: str
    rank: int  # the largest of its modules
    # By module: A (r, in), and B (r, out) with the scaling in it; of experts (E, r, in) and (E, r, out).
    matrices: Mapping[str, tuple[Tensor, Tensor]]
    bytes: int


def lora_modules(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """The matrices of a model, or of a rank's part, that an adapter may change, but not those of experts.

    (out, in) by their names in the file.
    """
    modules = adapted_modules(config, of_experts=False)
    return {name: (module.out_size, module.in_size) for name, module in modules.items()}


def slot_bytes(config: ModelConfig, max_rank: int, bytes_per_value: int, *, of_experts: bool = False) -> int:
    """Memory of one adapter slot: every module at the largest rank. of_experts: see `read_adapter`."""
    modules = adapted_modules(config, of_experts=of_experts)
    return max_rank * sum(module.values_per_rank for module in modules.values()) * bytes_per_value


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
    of_experts: bool = False,
) -> HostAdapter:
    """Read and check the adapter in the directory `path`. Blocks: call it outside of the step loop's thread.

    config: of the whole base model. dtype: of the engine. digest: the expected digest, if any. base_digest: computes
    the digest of the base model's weights; called only if the adapter names one. share: the rank that reads.
    of_experts: whether slots have room for the experts of sparse layers. Raises AdapterRefusedError.
    """
    files = adapter_files(path)
    # Read once, so that the checked bytes are the used bytes, even if the files change meanwhile.
    modules = adapted_modules(config, of_experts=of_experts)
    names = sum(max(1, module.experts) for module in modules.values()) * _NAME_BYTES
    most = slot_bytes(config, max_rank, bytes_per_value=4, of_experts=of_experts) + _HEADER_BYTES + names
    raw_config = _read(files.config, MAX_CONFIG_BYTES)
    said = parse_adapter_config(raw_config)
    if said.max_rank > max_rank:
        raise AdapterRefusedError(f"the adapter's rank is {said.max_rank}; this engine takes adapters up to {max_rank}")
    if not of_experts:
        _refuse_experts(_names(files.weights), config)  # before memory is taken for gigabytes of experts
    raw_weights = _read(files.weights, most)
    found = digest_of(hashlib.sha256(raw_config).hexdigest(), hashlib.sha256(raw_weights).hexdigest())
    if digest and found != digest.lower():
        raise AdapterRefusedError(f"the adapter has the digest {found}, and {digest} was requested")
    if said.base_digest and base_digest is not None and said.base_digest.lower() != (ours := base_digest()):
        raise AdapterRefusedError(
            f"the adapter was made for a base model with the digest {said.base_digest[:80]}; this one has {ours}"
        )
    tensors = _tensors(raw_weights)
    if not of_experts:
        _refuse_experts(tensors, config)
    matrices = {}
    for name, (a, b) in pairs_of(tensors, said, config).items():
        a, b = _share_of(a, b, modules[name], config, share)
        ready = a.to(dtype).contiguous(), b.to(dtype).contiguous()
        matrices[name] = (ready[0].pin_memory(), ready[1].pin_memory()) if pin_memory else ready
    return HostAdapter(
        digest=found,
        rank=max(a.shape[-2] for a, _ in matrices.values()),
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


def _names(file: Path) -> tuple[str, ...]:
    """The names of the file's tensors; none if its header is broken, which `_tensors` reports."""
    try:
        with safe_open(file, "pt") as opened:
            return tuple(opened.keys())
    except SafetensorError:
        return ()


def _refuse_experts(names: Iterable[str], config: ModelConfig) -> None:
    if changes_experts(names, config):
        raise AdapterRefusedError(NO_ROOM_FOR_EXPERTS)


def _tensors(content: bytes) -> dict[str, Tensor]:
    try:
        return load(content)
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise AdapterRefusedError(f"{WEIGHTS} is broken, cut off, or not a safetensors file") from error


def _share_of(a: Tensor, b: Tensor, module: Module, config: ModelConfig, share: Shard) -> tuple[Tensor, Tensor]:
    """A rank's part. a: ([E,] r, in)  b: ([E,] r, out), by rows of the checkpoint -> by rows of this engine."""
    own = module.part_of(share, config)
    if module.is_cut_by_inputs:
        return a[..., own], b
    b = b[..., own]
    if module.kind not in ("q", "k") or not (config.rotary_dim or config.interleaved):
        return a, b
    turned = config.rotary_dim or config.head_dim
    order = reorder_rotary_dims(torch.arange(b.shape[-1]), config.head_dim, turned, interleaved=config.interleaved)
    return a, b[..., order]
