"""Adapters of merged projections and of experts, through the whole engine: the text of the merged model."""

from pathlib import Path

import peft
import pytest
import torch
from transformers import PreTrainedModel

from slipway_api.memory import adapter_slot_bytes
from slipway_runtime.messages import LoadAdapter, Reply, Sleep, WakeUp
from slipway_runtime.models.adapter_files import NO_ROOM_FOR_EXPERTS
from slipway_runtime.models.adapter_weights import AdapterRefusedError, adapter_digest, read_adapter, slot_bytes
from slipway_runtime.models.config import read_config
from slipway_runtime.models.sharding import part_of
from tests.runtime.adapter_folders import ATTENTION, MLP, an_adapter, merged, write_adapter
from tests.runtime.checkpoints import a_checkpoint, greedy
from tests.runtime.engine.test_adapters import SHARED, Served
from tests.runtime.engine.test_families import FAMILIES
from tests.runtime.expert_adapters import a_merged_adapter, an_expert_adapter

TWO = {"tensor_parallel_size": 2, "device": "cpu", "threads": 1}
SPARSE = {
    "mixtral": FAMILIES["mixtral"],
    "qwen3_moe": ("qwen3_moe", {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20,
                                "num_hidden_layers": 3, "mlp_only_layers": [1], "head_dim": 12}),
    "gpt_oss": FAMILIES["gpt_oss"],
    "granitemoeshared": FAMILIES["granitemoeshared"],
    "glm4_moe": FAMILIES["glm4_moe"],
    "llama4_text": ("llama4_text", {**FAMILIES["llama4_text"][1], "intermediate_size": 20}),
}  # fmt: skip
PARTIAL = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}, "head_dim": 16}
DENSE = {
    "phi3": FAMILIES["phi3"],
    "phi3, half of a head rotated": ("phi3", {"num_attention_heads": 3, "num_key_value_heads": 1, **PARTIAL}),
    "llama": ("llama", {}),
    "glm": FAMILIES["glm"],
}


def compare(
    path: Path, model: PreTrainedModel, adapters: dict[str, tuple[Path, PreTrainedModel]], **settings: object
) -> Served:
    """All adapters and the base in one batch, twice: each request gets the text of its merged model."""
    served = Served(
        path, max_adapters=len(adapters), max_cpu_adapters=4, max_rank=8, max_num_batched_tokens=48, max_model_len=160,
        **{"lora_experts": True, **settings},
    )  # fmt: skip
    digests = {"": ""} | {name: served.load(folder) for name, (folder, _) in adapters.items()}
    models = {"": model} | {name: merged_model for name, (_, merged_model) in adapters.items()}
    prompts = {f"{turn}{name}": (name, [*SHARED, 3 + turn]) for turn in range(2) for name in models}
    for id, (name, prompt) in prompts.items():
        served.ask(id, prompt, digests[name], max_tokens=10)
    served.finish(len(prompts))
    assert served.texts == {id: greedy(models[name], prompt, 10) for id, (name, prompt) in prompts.items()}
    assert len({tuple(served.texts[f"0{name}"]) for name in models}) == len(models)  # each adapter changes the text
    return served


@pytest.mark.capability("ML-11")
@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("mixtral", "w1"),
        ("qwen3_moe", "modules"),  # with a dense layer between sparse ones
        ("gpt_oss", "parameters"),  # gate and up are interleaved
        ("granitemoeshared", "parameters"),  # the shared expert has names of its own
        ("llama4_text", "reversed"),  # the weight of an expert multiplies its input
    ],
)
def test_adapters_of_experts_give_the_text_of_the_merged_model(family, form, tmp_path):
    kind, shape = SPARSE[family]
    model = a_checkpoint(tmp_path / "model", kind, **shape)
    attention = an_adapter(tmp_path / "attention", model, modules=ATTENTION, seed=3)
    compare(tmp_path / "model", model, {
        "experts": (tmp_path / "experts", an_expert_adapter(tmp_path / "experts", model, form, seed=1)),
        "others": (tmp_path / "others", an_expert_adapter(tmp_path / "others", model, form, seed=2)),
        "attention": (attention, merged(model, attention)),
    })  # fmt: skip


@pytest.mark.capability("ML-11")
@pytest.mark.parametrize("family", ["qwen2_moe", "glm4_moe"])
def test_adapters_of_dense_layers_and_shared_experts_need_no_room_for_experts(family, tmp_path):
    kind, shape = FAMILIES[family]
    model = a_checkpoint(tmp_path / "model", kind, **shape)
    folder = an_adapter(tmp_path / "adapter", model, modules=ATTENTION + MLP, seed=5)
    compare(tmp_path / "model", model, {"shared": (folder, merged(model, folder))}, lora_experts=False)


@pytest.mark.capability("ML-11")
@pytest.mark.parametrize("family", ["phi3, half of a head rotated", "llama", "glm"])
def test_adapters_of_merged_projections_give_the_text_of_the_merged_model(family, tmp_path):
    """Whether the checkpoint has the matrices merged, as Phi, or apart, as Llama."""
    kind, shape = DENSE[family]
    model = a_checkpoint(tmp_path / "model", kind, **shape)
    compare(tmp_path / "model", model, {
        "first": (tmp_path / "first", a_merged_adapter(tmp_path / "first", model, seed=1)),
        "second": (tmp_path / "second", a_merged_adapter(tmp_path / "second", model, seed=2)),
    })  # fmt: skip


@pytest.mark.capability("ML-11")
@pytest.mark.parametrize("family", ["cohere2", "starcoder2"])
def test_adapters_of_models_that_rotate_neighbours_or_have_no_gate(family, tmp_path):
    kind, shape = FAMILIES[family]
    model = a_checkpoint(tmp_path / "model", kind, **shape)
    names = ("c_fc", "c_proj") if family == "starcoder2" else MLP
    folder = an_adapter(tmp_path / "adapter", model, modules=ATTENTION + names, seed=5)
    compare(tmp_path / "model", model, {"one": (folder, merged(model, folder))})


@pytest.mark.capability("ML-11")
def test_an_adapter_of_split_projections_on_a_checkpoint_that_merges_them(tmp_path):
    """The same change, in Llama's names on Phi's checkpoint and in Phi's names."""
    kind, shape = DENSE["phi3"]
    model = a_checkpoint(tmp_path / "model", kind, **shape)
    whole = a_merged_adapter(tmp_path / "whole", model, seed=1)
    config = read_config(tmp_path / "model")
    found = read_adapter(tmp_path / "whole", config, max_rank=8, dtype=torch.float32)
    tensors = {}
    for module, (a, b) in found.matrices.items():
        tensors |= {f"{module}.lora_A.weight": a.clone(), f"{module}.lora_B.weight": (b.T / 1.5).contiguous()}
    names = sorted({module.rpartition(".")[2] for module in found.matrices})
    assert names == ["gate_proj", "k_proj", "q_proj", "up_proj", "v_proj"]
    write_adapter(tmp_path / "split", tensors, {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": names})
    compare(tmp_path / "model", model, {"split": (tmp_path / "split", whole)})


@pytest.mark.capability("ML-11", "DD-3")
@pytest.mark.parametrize("form", ["parameters", "merged"])
def test_two_ranks_with_adapters_of_experts_and_of_merged_projections(form, tmp_path):
    kind, shape = DENSE["phi3"] if form == "merged" else SPARSE["mixtral"]
    model = a_checkpoint(tmp_path / "model", kind, **shape)
    if form == "merged":
        changed = a_merged_adapter(tmp_path / "adapter", model, seed=1)
    else:
        changed = an_expert_adapter(tmp_path / "adapter", model, form, seed=1)
    compare(tmp_path / "model", model, {"one": (tmp_path / "adapter", changed)}, **TWO)


@pytest.mark.capability("ML-11")
def test_peft_itself_writes_adapters_of_experts_that_give_its_text(tmp_path):
    kind, shape = SPARSE["qwen3_moe"]
    model = a_checkpoint(tmp_path / "model", kind, **shape)
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=["q_proj"], target_parameters=names, init_lora_weights=False
    )
    torch.manual_seed(3)
    wrapped = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, 0.3)
    wrapped.save_pretrained(tmp_path / "adapter")
    changed = wrapped.merge_and_unload()
    base = a_checkpoint(tmp_path / "model", kind, **shape)
    compare(tmp_path / "model", base, {"one": (tmp_path / "adapter", changed)})


@pytest.mark.capability("ML-11", "ST-7")
def test_adapters_of_experts_outlive_sleep_and_are_gone_when_their_slot_is_emptied(tmp_path):
    kind, shape = SPARSE["mixtral"]
    model = a_checkpoint(tmp_path / "model", kind, **shape)
    changed = an_expert_adapter(tmp_path / "one", model, "modules", seed=1)
    served = compare(tmp_path / "model", model, {"one": (tmp_path / "one", changed)})
    for message in (Sleep(call=1, level=2), WakeUp(call=2)):
        served.engine.control(message, 0.0)
        served.until(lambda: bool(served.replies))
        assert served.replies.pop().error == ""
    served.ask("after", SHARED, served.load(tmp_path / "one"), max_tokens=10)
    # One slot: the next adapter takes the place of the first, which changes matrices that it does not.
    attention = an_adapter(tmp_path / "attention", model, modules=("q_proj",), seed=3)
    served.ask("other", SHARED, served.load(attention), max_tokens=10)
    served.finish(6)
    assert served.texts["after"] == greedy(changed, SHARED, 10)
    assert served.texts["other"] == greedy(merged(model, attention), SHARED, 10)


@pytest.mark.capability("ML-11", "KV-5")
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "glm4_moe", "granitemoeshared", "phi3", "starcoder2"])
@pytest.mark.parametrize("of_experts", [False, True], ids=["attention", "experts"])
def test_the_planner_knows_the_memory_of_slots(family, of_experts, tmp_path):
    kind, shape = (FAMILIES | SPARSE)[family]
    a_checkpoint(tmp_path, kind, **shape)
    config = read_config(tmp_path)
    for own in (config, part_of(config, 2)):
        planned = adapter_slot_bytes(own.shape, 8, "fp32", of_experts=of_experts)
        assert planned == slot_bytes(own, 8, 4, of_experts=of_experts)
    served = Served(tmp_path, max_adapters=3, max_rank=8, max_model_len=160, lora_experts=of_experts)
    slots = served.engine._adapters._keep.__self__
    assert slots.nbytes == 3 * slot_bytes(config, 8, 4, of_experts=of_experts)


@pytest.mark.capability("ML-11", "ML-4")
@pytest.mark.parametrize("form", ["modules", "parameters"])
def test_without_room_for_experts_their_adapters_are_refused_and_the_base_serves_on(form, tmp_path):
    kind, shape = SPARSE["mixtral"]
    model = a_checkpoint(tmp_path / "model", kind, **shape)
    folder = tmp_path / "experts"
    an_expert_adapter(folder, model, form, seed=1)
    served = Served(tmp_path / "model", max_adapters=1, max_rank=8, max_model_len=160)
    served.engine.control(LoadAdapter(call=3, digest=adapter_digest(folder), path=str(folder)), 0.0)
    served.ask("base", SHARED)
    served.finish(1)
    served.until(lambda: bool(served.replies))
    assert served.replies == [Reply(call=3, error=NO_ROOM_FOR_EXPERTS)]
    assert "spec.runtime.lora.experts" in NO_ROOM_FOR_EXPERTS
    assert served.texts["base"] == greedy(model, SHARED, 16)


@pytest.mark.capability("ML-11", "ML-4")
def test_a_refused_adapter_of_experts_is_not_read_into_memory(mixtral, tmp_path):
    """Its names decide: the file is larger than all that such an engine reads."""
    tensors = {f"{_HERE}.0.gate_proj.lora_{half}.weight": torch.ones(4, 600_000) for half in "AB"}
    write_adapter(tmp_path, tensors, {"peft_type": "LORA", "r": 4, "target_modules": ["gate_proj"]})
    for of_experts, sentence in ((False, "spec.runtime.lora.experts"), (True, "is larger than")):
        with pytest.raises(AdapterRefusedError, match=sentence):
            read_adapter(tmp_path, read_config(mixtral[0]), max_rank=8, dtype=torch.float32, of_experts=of_experts)


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    path = tmp_path_factory.mktemp("mixtral")
    return path, a_checkpoint(path, "mixtral", num_local_experts=4, num_experts_per_tok=2)


A, B = torch.ones(4, 48), torch.ones(80, 4)
_HERE = "model.layers.0.mlp.experts"
_PARAMETERS = {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj"]}


@pytest.mark.capability("ML-11", "ML-3")
@pytest.mark.parametrize(
    ("name", "shapes", "config", "sentence"),
    [
        (f"{_HERE}.9.gate_proj", ((4, 48), (80, 4)), {}, "the experts 0 to 3 here"),
        (f"{_HERE}.0.gate_proj", ((4, 48), (81, 4)), {}, "gives 81 values there and 80 here"),
        ("model.layers.7.mlp.experts.0.gate_proj", ((4, 48), (80, 4)), {}, "it changes layer 7"),
        ("model.layers.0.mlp.gate", ((4, 48), (4, 4)), {"target_modules": ["gate"]}, "does not adapt: gate"),
        ("model.layers.0.mlp.gate_proj", ((4, 48), (80, 4)), {}, "there is no model.layers.0.mlp.gate_proj here"),
        (_HERE, ((16, 48), (161, 16)), _PARAMETERS, "fit neither gate_up_proj nor down_proj of the 4 experts"),
        (_HERE, ((16, 80), (48, 16)), _PARAMETERS, "changes down_proj of .*, which target_parameters does not name"),
        (_HERE, ((16, 48), (160, 16)), {"target_modules": []}, "and there are no target_parameters"),
        (_HERE, ((16, 48), (160, 16)), {"target_parameters": ["norm.weight"]}, "target_parameters names norm.weight"),
        (f"{_HERE}.0.gate_proj", ((4, 48), (80, 4)), {"target_parameters": ["mlp.experts.down_proj"]},
         "target_parameters names mlp.experts.down_proj, and .* has no tensors of it"),
    ],
)  # fmt: skip
def test_adapters_of_experts_that_do_not_fit_are_refused(name, shapes, config, sentence, mixtral, tmp_path):
    tensors = {f"{name}.lora_{half}.weight": torch.ones(shape) for half, shape in zip("AB", shapes, strict=True)}
    said = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": ["gate_proj"]} | config
    write_adapter(tmp_path, tensors, said)
    with pytest.raises(AdapterRefusedError, match=sentence):
        read_adapter(tmp_path, read_config(mixtral[0]), max_rank=8, dtype=torch.float32, of_experts=True)


@pytest.mark.capability("ML-11", "ML-3")
def test_one_matrix_by_two_names_is_refused(tmp_path):
    model = a_checkpoint(tmp_path / "model")
    folder = an_adapter(tmp_path / "both", model, modules=("q_proj",))
    from safetensors.torch import load_file

    tensors = load_file(folder / "adapter_model.safetensors")
    prefix = "base_model.model.model.layers.0.self_attn.qkv_proj"
    tensors |= {f"{prefix}.lora_A.weight": torch.ones(4, 48), f"{prefix}.lora_B.weight": torch.ones(96, 4)}
    write_adapter(folder, tensors, {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj", "qkv_proj"]})
    with pytest.raises(AdapterRefusedError, match="q_proj twice: by two names of the same matrix"):
        read_adapter(folder, read_config(tmp_path / "model"), max_rank=8, dtype=torch.float32)


@pytest.mark.capability("ML-11", "ML-3")
def test_square_matrices_alone_do_not_tell_which_side_is_which(tmp_path):
    shape = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 48}
    model = a_checkpoint(tmp_path / "model", "mixtral", **shape)
    changed = an_expert_adapter(tmp_path / "both", model, "reversed", seed=1)
    compare(tmp_path / "model", model, {"both": (tmp_path / "both", changed)})  # gate_up_proj is not square
    tensors = {f"{_HERE}.lora_A.weight": torch.ones(16, 48), f"{_HERE}.lora_B.weight": torch.ones(48, 16)}
    said = {"target_modules": [], "target_parameters": ["mlp.experts.down_proj"]}
    write_adapter(tmp_path / "square", tensors, {"peft_type": "LORA", "r": 4, "lora_alpha": 6, **said})
    config = read_config(tmp_path / "model")
    with pytest.raises(AdapterRefusedError, match=r"do not tell whether lora_A of .* multiplies the inputs or"):
        read_adapter(tmp_path / "square", config, max_rank=8, dtype=torch.float32, of_experts=True)
