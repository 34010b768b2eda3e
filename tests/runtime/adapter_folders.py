"""Random adapters as PEFT writes them, and the model that each becomes when it is merged into its base."""

import copy
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def an_adapter(
    path: Path,
    model: PreTrainedModel,
    *,
    rank: int = 4,
    alpha: float = 8,
    rslora: bool = False,
    modules: tuple[str, ...] = ATTENTION + MLP,
    layers: tuple[int, ...] | None = None,
    ranks: dict[str, int] | None = None,
    alphas: dict[str, float] | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **config: object,
) -> Path:
    """Write a random adapter of `model`. ranks and alphas: PEFT's patterns, by the end of a module's name."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] not in modules or (layers and int(name.split(".")[2]) not in layers):
            continue
        own = of_pattern(ranks, name, rank)
        shapes = {"A": (own, module.in_features), "B": (module.out_features, own)}
        for half, shape in shapes.items():
            values = torch.randn(shape, generator=generator) * 0.3
            tensors[f"base_model.model.{name}.lora_{half}.weight"] = values.to(dtype)
    write_adapter(path, tensors, {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "somewhere/else",
        "r": rank, "lora_alpha": alpha, "use_rslora": rslora, "target_modules": list(modules),
        "layers_to_transform": list(layers) if layers else None, "rank_pattern": ranks or {},
        "alpha_pattern": alphas or {}, "bias": "none", "lora_dropout": 0.1, "inference_mode": True, **config,
    })  # fmt: skip
    return path


def write_adapter(path: Path, tensors: dict[str, torch.Tensor], config: dict[str, object]) -> None:
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
    (path / "adapter_config.json").write_text(json.dumps(config))


def of_pattern(pattern: dict[str, float] | None, module: str, default: float) -> float:
    return next((value for key, value in (pattern or {}).items() if module.endswith("." + key)), default)


def merged(model: PreTrainedModel, path: Path) -> PreTrainedModel:
    """W + scaling · B A, for every matrix that the adapter changes."""
    from safetensors.torch import load_file

    model, config = copy.deepcopy(model), json.loads((path / "adapter_config.json").read_text())
    tensors = load_file(path / "adapter_model.safetensors")
    with torch.no_grad():
        for name, a in tensors.items():
            if ".lora_A." not in name:
                continue
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            alpha = of_pattern(config["alpha_pattern"], module, config["lora_alpha"])
            scaling = alpha / (a.shape[0] ** 0.5 if config["use_rslora"] else a.shape[0])
            b = tensors[name.replace(".lora_A.", ".lora_B.")]
            model.get_submodule(module).weight += scaling * (b.double() @ a.double()).float()
    return model
