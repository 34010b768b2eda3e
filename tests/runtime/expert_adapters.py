"""Random adapters of merged matrices and of experts, in each form that files have, and the merged models."""

import copy
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.runtime.adapter_folders import write_adapter

SCALING = 1.5  # alpha 6, rank 4
RANK = 4


def an_expert_adapter(path: Path, model: PreTrainedModel, form: str, *, seed: int) -> PreTrainedModel:
    """Write a random adapter of all experts; the model that it becomes.

    form: "modules" (one matrix of each expert, as for models of transformers 4), "w1" (the same, with Mixtral's names),
    "parameters" (PEFT's target_parameters), or "reversed" (as some versions of PEFT write these: A of the outputs).
    """
    model, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        block, _, leaf = name.rpartition(".")
        if leaf not in ("gate_up_proj", "down_proj") or not block.endswith("experts"):
            continue
        count, hidden = len(parameter), model.config.hidden_size
        inner = parameter.numel() // count // hidden // (2 if leaf == "gate_up_proj" else 1)
        sizes = (hidden, 2 * inner) if leaf == "gate_up_proj" else (inner, hidden)
        by_outputs = parameter.shape[1:] == (sizes[1], sizes[0]) and model.config.model_type not in _BY_INPUTS
        if form in ("modules", "w1"):
            change, more = _of_modules(block, leaf, count, sizes, generator, mixtral=form == "w1")
            if model.config.model_type == "gpt_oss" and leaf == "gate_up_proj":
                change = torch.stack(change.chunk(2, dim=1), dim=2).flatten(1, 2)  # gate and up interleaved
        else:
            change, more = _of_parameters(block, leaf, count, sizes, generator, is_reversed=form == "reversed")
        tensors |= more
        with torch.no_grad():
            parameter += change if by_outputs else change.transpose(1, 2)
    leaves = ["w1", "w3", "w2"] if form == "w1" else ["gate_proj", "up_proj", "down_proj"]
    chosen: dict[str, object] = {"target_modules": leaves}
    if form in ("parameters", "reversed"):
        chosen = {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
    write_adapter(path, tensors, {"peft_type": "LORA", "r": RANK, "lora_alpha": 6, **chosen})
    return model


_BY_INPUTS = ("gpt_oss", "llama4_text")  # their tensors of experts are (E, in, out)


def _of_modules(
    block: str, leaf: str, count: int, sizes: tuple[int, int], generator: torch.Generator, *, mixtral: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """The change of all experts (E, out, in), and the tensors of the file."""
    if mixtral:
        block = block.replace(".mlp.", ".block_sparse_moe.")
    names = ["down_proj"] if leaf == "down_proj" else ["gate_proj", "up_proj"]
    tensors, changes = {}, []
    for expert in range(count):
        parts = []
        for name in names:
            a = _random(RANK, sizes[0], generator=generator)
            b = _random(sizes[1] // len(names), RANK, generator=generator)
            renamed = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}[name] if mixtral else name
            prefix = f"base_model.model.{block}.{expert}.{renamed}"
            tensors |= {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}
            parts.append(SCALING * b @ a)
        changes.append(torch.cat(parts))
    return torch.stack(changes), tensors


def _of_parameters(
    block: str, leaf: str, count: int, sizes: tuple[int, int], generator: torch.Generator, *, is_reversed: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    first, second = reversed(sizes) if is_reversed else sizes
    a = _random(count * RANK, first, generator=generator)
    b = _random(second, RANK * count, generator=generator)
    prefix = f"base_model.model.{block}{'.base_layer' if leaf == 'down_proj' else ''}"
    change = SCALING * torch.einsum("ore,eri->eoi", b.view(second, RANK, count), a.view(count, RANK, first))
    tensors = {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}
    return change.transpose(1, 2) if is_reversed else change, tensors


def a_merged_adapter(path: Path, model: PreTrainedModel, *, seed: int) -> PreTrainedModel:
    """Write a random adapter of qkv_proj and gate_up_proj of a model that may have q, k, v, gate and up apart."""
    model, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for layer in range(model.config.num_hidden_layers):
        for block, fused, parts in (
            ("self_attn", "qkv_proj", ("q_proj", "k_proj", "v_proj")),
            ("mlp", "gate_up_proj", ("gate_proj", "up_proj")),
        ):
            place = model.get_submodule(f"model.layers.{layer}.{block}")
            modules = [place.get_submodule(name) for name in ((fused,) if hasattr(place, fused) else parts)]
            a = _random(RANK, model.config.hidden_size, generator=generator)
            b = _random(sum(module.out_features for module in modules), RANK, generator=generator)
            prefix = f"base_model.model.model.layers.{layer}.{block}.{fused}"
            tensors |= {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}
            changes = (SCALING * b @ a).split([module.out_features for module in modules])
            with torch.no_grad():
                for module, change in zip(modules, changes, strict=True):
                    module.weight += change
    names = ["qkv_proj", "gate_up_proj"]
    write_adapter(path, tensors, {"peft_type": "LORA", "r": RANK, "lora_alpha": 6, "target_modules": names})
    return model


def _random(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator) * 0.3
