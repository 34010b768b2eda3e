"""The matrices of a LoRA adapter, from the tensors of its file: by module, checked against the model, scaled.

Names of merged matrices become those of their parts, and matrices of experts are stacked (see `adapter_modules`).
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from torch import Tensor

from slipway_runtime.models.adapter_files import WEIGHTS, AdapterConfig, AdapterRefusedError, refuse_modules
from slipway_runtime.models.adapter_modules import (
    GATE_UP_DOWN,
    Module,
    OfExperts,
    adapted_modules,
    of_experts,
    parts_of,
)
from slipway_runtime.models.config import ModelConfig

__all__ = ["Pair", "changes_experts", "pairs_of"]

_TENSOR: Final = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")
_LAYER: Final = re.compile(r"model\.layers\.(\d+)\.")
Pair = tuple[Tensor, Tensor]  # A (r, in) and B (r, out) with the scaling; of experts (E, r, in) and (E, r, out)


def pairs_of(tensors: Mapping[str, Tensor], said: AdapterConfig, config: ModelConfig) -> dict[str, Pair]:
    """A and B by module. Raises AdapterRefusedError, which names the tensor or key that does not fit."""
    halves = _halves(tensors)
    known = adapted_modules(config)
    meanings = {name: of_experts(name, config) for name in halves}
    parameters = {name for name, meaning in meanings.items() if meaning is not None and not meaning.projection}
    refuse_modules({name.rpartition(".")[2] for name in halves if name not in parameters})
    _check_choice(set(halves), parameters, said)
    found: dict[str, Pair] = {}
    experts: dict[str, dict[int, Pair]] = {}
    stacks = _Stacks(known, config, said)
    for name, both in sorted(halves.items()):
        if both.keys() != {"A", "B"}:
            raise AdapterRefusedError(f"{WEIGHTS} lacks lora_{'B' if 'A' in both else 'A'} of {name[:200]}")
        meaning = meanings[name]
        if meaning is None:
            _add(found, _parts(name, both, said, known, config))
        elif meaning.projection:
            module = f"{meaning.block}.experts.{meaning.projection}"
            _check_known(name, [module], known, config)
            if meaning.expert >= known[module].experts:
                raise AdapterRefusedError(
                    f"the adapter was made for another base model: it changes {name[:200]}, and a layer has the "
                    f"experts 0 to {known[module].experts - 1} here"
                )
            experts.setdefault(module, {})[meaning.expert] = _checked(name, both, said, known[module])
        else:
            stacks.add(name, meaning, both)
    _add(found, {module: _stacked(pairs, known[module].experts) for module, pairs in experts.items()})
    _add(found, stacks.pairs())
    return found


def changes_experts(names: Iterable[str], config: ModelConfig) -> bool:
    """Whether tensors of these names change experts of sparse layers."""
    matches = (_TENSOR.fullmatch(name) for name in names)
    return any(of_experts(match[1], config) is not None for match in matches if match is not None)


def _halves(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """lora_A and lora_B by the names of the file."""
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
    return halves


def _add(found: dict[str, Pair], more: Mapping[str, Pair]) -> None:
    for module, pair in more.items():
        if module in found:
            raise AdapterRefusedError(f"{WEIGHTS} changes {module} twice: by two names of the same matrix")
        found[module] = pair


def _check_choice(names: set[str], parameters: set[str], said: AdapterConfig) -> None:
    """Check that the tensors are for exactly what target_modules and target_parameters name, in their layers."""
    if said.target_modules is not None:
        leaves = {name.rpartition(".")[2] for name in names - parameters}
        if more := sorted(leaves - said.target_modules):
            raise AdapterRefusedError(f"{WEIGHTS} changes {', '.join(more)}, which target_modules does not name")
        if missing := sorted(said.target_modules - leaves):
            raise AdapterRefusedError(f"target_modules names {', '.join(missing)}, and {WEIGHTS} has no tensors of it")
    if parameters and not said.target_parameters:
        raise AdapterRefusedError(f"{WEIGHTS} changes {min(parameters)[:200]}, and there are no target_parameters")
    if said.target_parameters and not parameters:
        named = ", ".join(sorted(said.target_parameters))
        raise AdapterRefusedError(f"target_parameters names {named[:200]}, and {WEIGHTS} has no tensors of it")
    if said.layers is not None:
        layers = {int(match[1]) for name in names if (match := _LAYER.match(name))}
        if more_layers := sorted(layers - said.layers):
            raise AdapterRefusedError(
                f"{WEIGHTS} changes layer {more_layers[0]}, which layers_to_transform does not name"
            )


def _check_known(name: str, modules: list[str], known: dict[str, Module], config: ModelConfig) -> None:
    if all(module in known for module in modules):
        return
    layer = _LAYER.match(name)
    if layer and int(layer[1]) >= config.num_layers:
        raise AdapterRefusedError(
            f"the adapter was made for another base model: it changes layer {layer[1]}, and this model has the "
            f"layers 0 to {config.num_layers - 1}"
        )
    raise AdapterRefusedError(f"the adapter was made for another base model: there is no {name[:200]} here")


def _parts(
    name: str, both: dict[str, Tensor], said: AdapterConfig, known: dict[str, Module], config: ModelConfig
) -> dict[str, Pair]:
    """The module of this name, or all that it merges: each has the same A, and its own columns of B."""
    parts = list(parts_of(name, config))
    _check_known(name, parts, known, config)
    sizes = [known[part].out_size for part in parts]
    a, b = _checked(name, both, said, Module(sum(sizes), known[parts[0]].in_size, known[parts[0]].kind))
    starts = accumulate(sizes[:-1], initial=0)
    return {part: (a, b[..., start : start + known[part].out_size]) for part, start in zip(parts, starts, strict=True)}


def _checked(name: str, both: dict[str, Tensor], said: AdapterConfig, module: Module) -> Pair:
    """A and B of one matrix, B transposed and scaled."""
    a, b = both["A"], both["B"]
    rank, out_size, in_size = said.rank_of(name), module.out_size, module.in_size
    for half, tensor, expected in (("A", a, (rank, in_size)), ("B", b, (out_size, rank))):
        _check_numbers(name, half, tensor)
        if tensor.ndim == 2 and expected[half == "A"] != tensor.shape[half == "A"]:
            base = tensor.shape[half == "A"]
            raise AdapterRefusedError(
                f"the adapter was made for another base model: {name} {'takes' if half == 'A' else 'gives'} {base} "
                f"values there and {expected[half == 'A']} here"
            )
        if tuple(tensor.shape) != expected:
            raise AdapterRefusedError(
                f"lora_{half} of {name} has the shape {tuple(tensor.shape)}; rank {rank} asks for {expected}"
            )
    return a, (b.float() * said.scaling_of(name)).T


def _check_numbers(name: str, half: str, tensor: Tensor) -> None:
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        raise AdapterRefusedError(f"lora_{half} of {name} holds {tensor.dtype}: only 16 and 32 bit floats are read")
    if not bool(tensor.isfinite().all()):
        raise AdapterRefusedError(f"lora_{half} of {name} has NaN or infinite values")


def _stacked(pairs: Mapping[int, Pair], count: int) -> Pair:
    """The matrices of all experts: those that the adapter does not change, and unused ranks, are zeros."""
    rank = max(a.shape[0] for a, _ in pairs.values())
    some_a, some_b = next(iter(pairs.values()))
    a, b = (half.new_zeros(count, rank, half.shape[1]) for half in (some_a, some_b))
    for expert, (own_a, own_b) in pairs.items():
        a[expert, : len(own_a)], b[expert, : len(own_b)] = own_a, own_b
    return a, b


@dataclass(frozen=True, slots=True)
class _Parameter:
    """A and B of PEFT's target_parameters: a tensor of all experts of a layer."""

    name: str  # in the file
    module: str  # gate_proj, for gate_up_proj, or down_proj
    a: Tensor  # (E · r, size): ranks of an expert lie side by side
    b: Tensor  # (size, r · E): experts of a rank lie side by side
    rank: int
    inputs: int
    outputs: int


class _Stacks:
    """The adapters of tensors of all experts (E, …, …), as PEFT's target_parameters.

    A multiplies one of the tensor's two dimensions and B the other. Which one is A's has changed from one version of
    PEFT to the next, and differs between models: the shapes tell. If a matrix is square, the others of the file tell.
    """

    def __init__(self, known: dict[str, Module], config: ModelConfig, said: AdapterConfig) -> None:
        self._known = known
        self._config = config
        self._said = said
        self._parameters: list[_Parameter] = []

    def add(self, name: str, meaning: OfExperts, both: dict[str, Tensor]) -> None:
        """Check the two tensors of a parameter."""
        modules = [f"{meaning.block}.experts.{leaf}" for leaf in GATE_UP_DOWN]
        _check_known(name, modules, self._known, self._config)
        gate, _, down = (self._known[module] for module in modules)
        for half, tensor in both.items():
            _check_numbers(name, half, tensor)
        a, b = both["A"], both["B"]
        for leaf, module, inputs, outputs in (
            ("gate_up_proj", modules[0], gate.in_size, 2 * gate.out_size),
            ("down_proj", modules[2], down.in_size, down.out_size),
        ):
            rank = self._said.rank_of(f"{name.removesuffix('.base_layer')}.{leaf}")
            rows = rank * gate.experts
            for size, other in ((inputs, outputs), (outputs, inputs)):
                if a.shape == (rows, size) and b.shape == (other, rows):
                    self._check_named(name, leaf)
                    self._parameters.append(_Parameter(name, module, a, b, rank, inputs, outputs))
                    return
        raise AdapterRefusedError(
            f"lora_A and lora_B of {name} have the shapes {tuple(a.shape)} and {tuple(b.shape)}, which fit neither "
            f"gate_up_proj nor down_proj of the {gate.experts} experts here at the rank that {self._said.rank} or "
            "rank_pattern gives: the adapter was made for another base model"
        )

    def _check_named(self, name: str, leaf: str) -> None:
        if leaf not in {parameter.rpartition(".")[2] for parameter in self._said.target_parameters}:
            raise AdapterRefusedError(f"{WEIGHTS} changes {leaf} of {name}, which target_parameters does not name")

    def pairs(self) -> dict[str, Pair]:
        """A and B by module."""
        found: dict[str, Pair] = {}
        reversed_ones = {one.a.shape[1] == one.outputs for one in self._parameters if one.inputs != one.outputs}
        if self._parameters and len(reversed_ones) != 1:
            raise AdapterRefusedError(
                f"{WEIGHTS}: the shapes do not tell whether lora_A of {self._parameters[0].name} multiplies the inputs "
                "or the outputs; train with both gate_up_proj and down_proj in target_parameters, with one version of "
                "PEFT"
            )
        for one in self._parameters:
            _add(found, self._pairs_of(one, is_reversed=True in reversed_ones))
        return found

    def _pairs_of(self, one: _Parameter, *, is_reversed: bool) -> dict[str, Pair]:
        first = one.a.view(-1, one.rank, one.a.shape[1])  # (E, r, inputs)
        second = one.b.view(one.b.shape[0], one.rank, -1).permute(2, 1, 0)  # (E, r, outputs)
        a, b = (second, first) if is_reversed else (first, second)
        leaf = "down_proj" if one.module.endswith("down_proj") else "gate_up_proj"
        b = b.float() * self._said.scaling_of(f"{one.name.removesuffix('.base_layer')}.{leaf}")
        if leaf == "down_proj":
            return {one.module: (a, b)}
        experts = self._config.experts
        assert experts is not None
        if experts.biased:  # gpt-oss: gate and up are interleaved
            gate, up = b[..., 0::2], b[..., 1::2]
        else:
            gate, up = b.chunk(2, dim=-1)
        return {one.module: (a, gate), f"{one.module.removesuffix('gate_proj')}up_proj": (a, up)}
