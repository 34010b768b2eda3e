"""What a checkpoint is called: by its content, wherever it lies, and without reading it all."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipway_runtime.models.checkpoint_files import checkpoint_digest
from tests.runtime.checkpoints import a_checkpoint


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("original")
    a_checkpoint(path)
    return path


def bytes_read() -> int:
    """By this process, from files and from the cache of the kernel."""
    return int(Path("/proc/self/io").read_text().split()[1])


def trained_on(path: Path) -> None:
    """Every weight of one matrix moves a little, and nothing else."""
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.1.self_attn.q_proj.weight"] *= 1.001
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def one_bias(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    tensors["model.norm.weight"][17] += 1
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def reshaped(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    tensors = {name: tensor.T.contiguous() if tensor.ndim == 2 else tensor for name, tensor in tensors.items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def configured(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"rope_theta": 500_000.0}))


def another_seed(path: Path) -> None:
    shutil.rmtree(path)
    a_checkpoint(path, seed=1)


@pytest.mark.capability("KV-3", "PF-25")
@pytest.mark.parametrize("change", [trained_on, one_bias, reshaped, configured, another_seed])
def test_other_weights_have_another_name(change: Callable[[Path], None], original: Path, tmp_path: Path):
    copy = tmp_path / "copy"
    shutil.copytree(original, copy)
    assert checkpoint_digest(copy) == checkpoint_digest(original), "the same files, elsewhere"

    change(copy)

    assert checkpoint_digest(copy) != checkpoint_digest(original)


def test_what_lies_beside_the_weights_changes_nothing(original: Path, tmp_path: Path):
    shutil.copytree(original, tmp_path / "copy")
    (tmp_path / "copy" / "generation_config.json").write_text("{}")
    (tmp_path / "copy" / "model.safetensors").rename(tmp_path / "copy" / "weights.safetensors")

    assert checkpoint_digest(tmp_path / "copy") == checkpoint_digest(original)


def test_a_large_tensor_is_sampled_and_the_page_says_where_it_is_not(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    ones = torch.ones(100, 1000)
    digests = []
    for row in (None, 0, 25, 50, 99):
        changed = ones.clone()
        if row is not None:
            changed[row] = 2
        save_file({"big": changed}, tmp_path / "model.safetensors")
        digests.append(checkpoint_digest(tmp_path))

    same, start, between, middle, end = digests
    assert between == same
    assert len({same, start, middle, end}) == 4


@pytest.mark.capability("KV-3")
def test_the_name_of_a_hundred_gigabytes_costs_kilobytes(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    size, tensors = 10 << 30, 10
    header = json.dumps({
        f"t{i}": {"dtype": "U8", "shape": [size], "data_offsets": [i * size, (i + 1) * size]} for i in range(tensors)
    }).encode()  # fmt: skip
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + tensors * size)  # a hole: it takes no room on the disk

    before = bytes_read()
    checkpoint_digest(tmp_path)

    assert bytes_read() - before < len(header) + 3 * 1024 * tensors + 4096
