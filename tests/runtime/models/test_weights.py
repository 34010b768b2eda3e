"""Only safetensors is read, and every tensor is accounted for."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipway_runtime.engine.build import build_engine
from slipway_runtime.models.config import ModelRefusedError
from slipway_runtime.models.weights import Checkpoint
from tests.runtime.checkpoints import a_checkpoint

CPU = torch.device("cpu")


@pytest.mark.capability("ST-2")
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights_are_refused_with_a_sentence(name, tmp_path):
    a_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / name)
    with pytest.raises(ModelRefusedError, match=rf"the weights are pickled \({name}\): loading them could run code"):
        build_engine(tmp_path)


@pytest.mark.capability("ST-2")
def test_a_pickle_under_a_safetensors_name_is_not_opened(tmp_path):
    a_checkpoint(tmp_path)
    torch.save({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelRefusedError, match=r"model\.safetensors is not a safetensors file"):
        build_engine(tmp_path)


@pytest.mark.capability("ST-2")
def test_the_file_is_mapped_and_not_read_whole(tmp_path):
    save_file({"big": torch.zeros(64 << 20, dtype=torch.uint8), "small": torch.ones(4)}, tmp_path / "a.safetensors")

    def resident_bytes() -> int:
        with open("/proc/self/smaps_rollup") as rollup:
            return next(int(line.split()[1]) * 1024 for line in rollup if line.startswith("Rss:"))

    before = resident_bytes()
    checkpoint = Checkpoint(tmp_path, torch.float32, CPU)
    assert checkpoint.take("small", 4).tolist() == [1, 1, 1, 1]
    assert resident_bytes() - before < 32 << 20


@pytest.mark.capability("ST-9")
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda t: t.pop("model.norm.weight"), "the checkpoint lacks the tensor model.norm.weight"),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(12)}),
            "no place for: model.layers.0",
        ),
        (lambda t: t.update({"model.norm.weight": torch.ones(5)}), r"has the shape \(5,\); config.json says \(48,\)"),
        (lambda t: t.update({"model.norm.weight": torch.ones(48, dtype=torch.int8)}), "quantized checkpoints are not"),
    ],
)
def test_missing_unexpected_and_misshapen_tensors_are_refused(change, sentence, tmp_path):
    a_checkpoint(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelRefusedError, match=sentence):
        build_engine(tmp_path)


def test_derived_tensors_of_older_checkpoints_are_ignored(tmp_path):
    a_checkpoint(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(6)
    save_file(tensors, tmp_path / "model.safetensors")
    build_engine(tmp_path, kv_cache_bytes=1 << 20)


def test_a_checkpoint_in_several_files_is_one_checkpoint(tmp_path):
    a_checkpoint(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"one.safetensors": names[:5], "two.safetensors": names[5:]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, tmp_path / file)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    build_engine(tmp_path, kv_cache_bytes=1 << 20)
    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(ModelRefusedError, match=r"names two\.safetensors, which is not there"):
        build_engine(tmp_path)


def test_an_index_cannot_point_outside_the_checkpoint(tmp_path):
    a_checkpoint(tmp_path / "model")
    index = {"weight_map": {"x": "../secret.safetensors"}}
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelRefusedError, match="points outside the checkpoint"):
        build_engine(tmp_path / "model")
