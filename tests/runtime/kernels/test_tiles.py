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


@pytest.mark.capability("KN-4")
@pytest.mark.parametrize(
    ("card", "entry"),
    [
        ("sm80", "sm80"), ("sm86", "sm86"), ("sm87", "sm86"), ("sm89", "sm86"), ("sm90", "sm90"), ("sm100", "sm100"),
        ("sm103", "sm100"), ("sm110", "sm100"), ("sm120", "sm120"), ("sm121", "sm120"), ("sm130", "sm120"),
        ("sm75", ""),
    ],
)  # fmt: skip
def test_a_gpu_without_an_entry_takes_that_of_the_nearest_older_one_whose_tiles_fit(card, entry):
    """B300, L4, L40S, RTX 4090, A10 and RTX 50 had the defaults: one buffer of keys and values."""
    assert tiles.nearest(card, tiles._TABLE) == entry
    options = tiles.lookup(card, "decode", head_dim=128, itemsize=2)
    assert bool(options) == bool(entry)
    if entry:
        assert options == tiles.lookup(entry, "decode", head_dim=128, itemsize=2)


def test_a_gpu_of_little_shared_memory_takes_no_tiles_of_one_that_has_more():
    assert tiles.shared_bytes(86) == tiles.shared_bytes(89) == tiles.shared_bytes(120) == 99 << 10
    assert tiles.nearest("sm120", ["sm80", "sm90", "sm100"]) == ""
    assert tiles.nearest("sm90", ["sm80", "sm86"]) == "sm86"
