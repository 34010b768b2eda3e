"""The table of measured tiles: read, checked, and kept apart from what a CPU does."""

import json

import pytest
import torch

from slipway_runtime.kernels import tiles


@pytest.mark.capability("KN-4")
def test_a_gpu_takes_what_was_measured_on_its_kind_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "tiles.json"
    path.write_text(json.dumps({"sm90": {"decode": {"d128-16bit": {"BLOCK_N": 128, "num_warps": 8}}}}))
    monkeypatch.setattr(tiles, "_TABLE", tiles.read_table(path))
    monkeypatch.setattr(tiles, "_capability", lambda _: "sm90")
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert tiles.tuned("decode", head_dim=128, itemsize=2, device=gpu) == {"BLOCK_N": 128, "num_warps": 8}
    assert tiles.tuned("decode", head_dim=64, itemsize=2, device=gpu) == {}
    assert tiles.tuned("extend", head_dim=128, itemsize=2, device=gpu) == {}
    assert tiles.tuned("decode", head_dim=128, itemsize=2, device=cpu) == {}
    monkeypatch.setattr(tiles, "_capability", lambda _: "sm80")
    assert tiles.tuned("decode", head_dim=128, itemsize=2, device=gpu) == {}


@pytest.mark.capability("KN-4")
def test_a_table_with_what_no_kernel_takes_is_refused(tmp_path):
    path = tmp_path / "tiles.json"
    path.write_text(json.dumps({"sm90": {"decode": {"d128-16bit": {"BLOCK_K": 128}}}}))
    with pytest.raises(ValueError, match=r"tiles.json: sm90 decode d128-16bit has BLOCK_K"):
        tiles.read_table(path)
    assert tiles.read_table() == tiles._TABLE
