"""The matrices that an adapter may change, and the names that files have for them.

| name in the file                                        | is                                                       |
|---------------------------------------------------------|----------------------------------------------------------|
| self_attn.q_proj, mlp.gate_proj, …                      | a matrix                                                 |
| self_attn.qkv_proj, mlp.gate_up_proj                    | several matrices with the same inputs: B is cut by rows  |
| mlp.experts.N.gate_proj, block_sparse_moe.experts.N.w1  | a matrix of one expert                                   |
| mlp.experts, mlp.experts.base_layer                     | PEFT's target_parameters: gate_up_proj or down_proj of   |
|                                                         | all experts; the shapes tell which                       |

Experts are one module here, `…experts.gate_proj`, with matrices of all experts stacked.
"""

import re
from dataclasses import dataclass
from typing import Final, Literal

from slipway_runtime.models.config import ModelConfig
from slipway_runtime.models.sharding import Shard

_EXPERT: Final = re.compile(r"(.+)\.experts\.(\d+)\.(\w+)")
_FUSED: Final = re.compile(r"(.+)\.experts(?:\.base_layer)?")
GATE_UP_DOWN: Final = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Module:
    """A matrix that an adapter may change, or this matrix of all experts of a layer."""

    out_size: int
    in_size: int
    kind: Literal["q", "k", "v", "o", "up", "down"]
    experts: int = 0  # of the layer; 0: one matrix
    inner: int = 0  # inner features of the MLP; 0: of attention

    @property
    def values_per_rank(self) -> int:
        """Numbers of an adapter of rank 1."""
        return max(1, self.experts) * (self.out_size + self.in_size)

    @property
    def is_cut_by_inputs(self) -> bool:
        """Whether a tensor-parallel rank has columns of A instead of rows of B."""
        return self.kind in ("o", "down")

    def part_of(self, share: Shard, config: ModelConfig) -> slice:
        """The rows of B, or the columns of A, that are a rank's. config: of the whole model."""
        if self.inner:
            return share.of_features(self.inner)
        return share.of_heads(config.num_kv_heads if self.kind in ("k", "v") else config.num_q_heads, config.head_dim)


@dataclass(frozen=True, slots=True)
class OfExperts:
    """What a name in a file means that is of experts: a matrix of one, or PEFT's parameters of all."""

    block: str  # such as "model.layers.3.mlp"
    projection: str = ""  # gate_proj, up_proj or down_proj; "": a parameter of all experts
    expert: int = -1  # -1: all


def adapted_modules(config: ModelConfig, *, of_experts: bool = True) -> dict[str, Module]:
    """The modules of a model, or of a rank's part, that an adapter may change, by name.

    of_experts: including the experts of sparse layers; the shared expert is always among them.
    """
    hidden = config.hidden_size
    q_size, kv_size = config.num_q_heads * config.head_dim, config.num_kv_heads * config.head_dim
    modules: dict[str, Module] = {}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        modules |= {
            f"{prefix}.self_attn.q_proj": Module(q_size, hidden, "q"),
            f"{prefix}.self_attn.k_proj": Module(kv_size, hidden, "k"),
            f"{prefix}.self_attn.v_proj": Module(kv_size, hidden, "v"),
            f"{prefix}.self_attn.o_proj": Module(hidden, q_size, "o"),
        }
        if config.experts is None or layer not in config.experts.layers:
            mlp = config.mlp
            names = (mlp.gate, mlp.up, mlp.down)
            modules |= _of_mlp(f"{prefix}.{mlp.block}", names, hidden, config.intermediate_size)
            continue
        about, keys = config.experts, config.experts.keys
        block = f"{prefix}.{keys.block}"
        if of_experts:
            modules |= _of_mlp(f"{block}.experts", GATE_UP_DOWN, hidden, about.intermediate_size, experts=about.count)
        if about.shared_size:
            modules |= _of_mlp(shared_block(config, layer), GATE_UP_DOWN, hidden, about.shared_size)
    return modules


def _of_mlp(block: str, names: tuple[str, str, str], hidden: int, inner: int, *, experts: int = 0) -> dict[str, Module]:
    gate, up, down = names
    inputs = {
        f"{block}.{name}": Module(inner, hidden, "up", experts=experts, inner=inner) for name in (gate, up) if name
    }
    return inputs | {f"{block}.{down}": Module(hidden, inner, "down", experts=experts, inner=inner)}


def shared_block(config: ModelConfig, layer: int) -> str:
    """Where the expert of all tokens is in a sparse layer."""
    assert config.experts is not None
    keys = config.experts.keys
    between = "" if keys.shared_fused else f"{keys.block}."
    return f"model.layers.{layer}.{between}{keys.shared_name}"


def parts_of(name: str, config: ModelConfig) -> tuple[str, ...]:
    """The modules that the name of one matrix stands for, in the order of its outputs; itself if it is not merged."""
    block, _, leaf = name.rpartition(".")
    if leaf == "qkv_proj":
        return tuple(f"{block}.{part}_proj" for part in "qkv")
    if leaf == "gate_up_proj" and config.mlp.gate:
        return f"{block}.{config.mlp.gate}", f"{block}.{config.mlp.up}"
    fused = config.experts.keys.shared_fused if config.experts is not None else None
    if fused is not None and leaf == fused[0]:
        return f"{block}.gate_proj", f"{block}.up_proj"
    return (f"{block}.down_proj",) if fused is not None and leaf == fused[1] else (name,)


def of_experts(name: str, config: ModelConfig) -> OfExperts | None:
    """What a name of experts means, with the block as this engine names it; None: it is not of experts."""
    if config.experts is None:
        return None
    keys = config.experts.keys
    one, every = _EXPERT.fullmatch(name), _FUSED.fullmatch(name)
    found = one or every
    if found is None:
        return None
    layer, _, block = found[1].rpartition(".")
    if block not in (keys.block, "mlp"):  # transformers 5 calls the block of all families mlp
        return None
    if every is not None:
        return OfExperts(f"{layer}.{keys.block}")
    assert one is not None
    named = dict(zip(keys.names, GATE_UP_DOWN, strict=True)) | {leaf: leaf for leaf in GATE_UP_DOWN}
    projection = named.get(one[3])
    return None if projection is None else OfExperts(f"{layer}.{keys.block}", projection, int(one[2]))
