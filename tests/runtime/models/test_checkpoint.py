"""A checkpoint on disk: its digest, and its tensors: only safetensors is read, and every tensor is accounted for."""

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipway_runtime.engine.build import build_engine
from slipway_runtime.models.checkpoint import Checkpoint, checkpoint_digest
from slipway_runtime.models.config import ModelRefusedError
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


CPU = torch.device("cpu")


def resident_bytes() -> int:
    with open("/proc/self/smaps_rollup") as rollup:
        return next(int(line.split()[1]) * 1024 for line in rollup if line.startswith("Rss:"))


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
        (
            lambda t: t.update({"model.norm.weight": torch.ones(48, dtype=torch.int8)}),
            "holds torch.int8, and config.json has no quantization_config",
        ),
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


@pytest.mark.capability("ST-2")
def test_a_load_holds_the_weights_and_a_piece_for_each_thread(tmp_path, monkeypatch):
    """The file is as large as the weights: were it kept in memory too, the peak would be twice theirs."""
    monkeypatch.setattr("slipway_runtime.models.checkpoint.PIECE_BYTES", 1 << 20)
    count, each = 12, 8 << 20
    tensors = {f"t{index}": torch.full((each // 2,), index, dtype=torch.bfloat16) for index in range(count)}
    save_file(tensors, tmp_path / "a.safetensors")
    del tensors
    highest, before = 0, resident_bytes()
    seen: list[tuple[int, int]] = []

    def look(done: int, total: int) -> None:
        nonlocal highest
        highest = max(highest, resident_bytes())
        seen.append((done, total))

    with Checkpoint(tmp_path, torch.bfloat16, CPU, on_progress=look) as checkpoint:
        taken = checkpoint.in_parallel(lambda index: checkpoint.take(f"t{index}", each // 2), count)

    assert [int(tensor[-1]) for tensor in taken] == list(range(count))
    assert checkpoint.bytes == count * each
    assert highest - before < count * each + (24 << 20)
    assert [done for done, _ in seen] == [(step + 1) << 20 for step in range(count * 8)]
    assert {total for _, total in seen} == {count * each}


@pytest.mark.capability("ST-7")
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one processor loads with one thread")
def test_a_layer_is_built_while_the_next_is_read_piece_by_piece(tmp_path, monkeypatch):
    """Loading one after another would never end the wait of the first."""
    monkeypatch.setattr("slipway_runtime.models.checkpoint.PIECE_BYTES", 1 << 10)
    save_file({f"t{index}": torch.full((2048,), float(index)) for index in range(2)}, tmp_path / "a.safetensors")
    second_is_read, pieces = threading.Event(), []

    def build(index: int) -> bool:
        checkpoint.take(f"t{index}", 2048)
        if index:
            second_is_read.set()
        return second_is_read.wait(30)

    with Checkpoint(tmp_path, torch.float32, CPU, on_progress=lambda done, total: pieces.append(done)) as checkpoint:
        assert checkpoint.in_parallel(build, 2) == [True, True]

    assert pieces == [1024 * (number + 1) for number in range(16)]


def test_types_change_on_the_way_even_where_tensors_are_not_aligned(tmp_path, monkeypatch):
    monkeypatch.setattr("slipway_runtime.models.checkpoint.PIECE_BYTES", 24)
    values = torch.randn(7, 5, dtype=torch.float64)
    for kind in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        header = json.dumps({"odd": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}, "x": {
            "dtype": safetensors_name(kind), "shape": [7, 5], "data_offsets": [3, 3 + 35 * kind.itemsize],
        }}).encode()  # fmt: skip
        data = bytes(3) + values.to(kind).flatten().view(torch.uint8).numpy().tobytes()
        (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
        with Checkpoint(tmp_path, torch.float32, CPU) as checkpoint:
            checkpoint.ignore("odd")
            assert checkpoint.take("x", 7, 5).equal(values.to(kind).float())


def safetensors_name(kind: torch.dtype) -> str:
    return {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}[kind]


def lying(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data


@pytest.mark.capability("ST-2")
@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "it has 0 bytes"),
        (b"1234", "it has 4 bytes"),
        (lying(b"{}", length=1 << 62), "it claims a header of 4611686018427387904 bytes"),
        (lying(b"{}", length=17 << 20), "it claims a header of 17825792 bytes"),
        (lying(b"{}", length=4096), "is not a safetensors file"),
        (lying(b"not json"), "is not a safetensors file"),
        (lying(b"[" * 100_000), "is not a safetensors file"),
        (lying(b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'), "is not a safetensors file"),
        (lying(b'{"a": {"dtype": "F32", "shape": [1099511627776], "data_offsets": [0, 8]}}', bytes(8)),
         "is not a safetensors file"),
        (lying(b'{"a": {"dtype": "F32", "shape": [4294967296, 4294967296, 4], "data_offsets": [0, 0]}}'),
         "is not a safetensors file"),
        (lying(b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, '
               b'"b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}', bytes(12)),
         "is not a safetensors file"),  # they overlap
        (lying(b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}', bytes(8)),
         "is not a safetensors file"),
        (lying(b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}', bytes(16)),
         "is not a safetensors file"),  # bytes that belong to nobody
    ],
)  # fmt: skip
def test_headers_that_lie_are_refused_with_a_sentence(content, sentence, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelRefusedError, match=sentence) as refused:
        Checkpoint(tmp_path, torch.float32, CPU)
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_what_is_no_file_is_not_opened(name, tmp_path):
    a_checkpoint(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("/dev/zero")
    with pytest.raises(ModelRefusedError, match=f"{name} is not a file"):
        build_engine(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path):
    for name in ("a", "b"):
        save_file({"x": torch.ones(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ModelRefusedError, match="holds the tensor x twice"):
        Checkpoint(tmp_path, torch.float32, CPU)


@pytest.mark.parametrize(
    ("index", "sentence"),
    [
        ({"weight_map": {"x": "../secret.safetensors"}}, "points outside the checkpoint"),
        ({"weight_map": {"x": "/etc/secret.safetensors"}}, "points outside the checkpoint"),
        ({"weight_map": {"x": "a/../../secret.safetensors"}}, "points outside the checkpoint"),
        ({"weight_map": {"x": "config.json"}}, "points outside the checkpoint"),
        ({"weight_map": {"x": 7}}, "has no weight_map of names"),
        ({"weight_map": ["x"]}, "has no weight_map of names"),
        ({}, "has no weight_map of names"),
    ],
)
def test_an_index_cannot_point_outside_the_checkpoint(index, sentence, tmp_path):
    a_checkpoint(tmp_path / "model")
    (tmp_path / "secret.safetensors").write_bytes(b"")
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelRefusedError, match=sentence):
        build_engine(tmp_path / "model")


@pytest.mark.capability("ST-9")
def test_a_context_that_no_memory_holds_builds_no_table(tmp_path):
    """A table of sixteen million positions would take gigabytes before anything is refused."""
    a_checkpoint(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_position_embeddings": 1 << 24}))
    before = resident_bytes()
    news: list[object] = []

    engine = build_engine(tmp_path, kv_cache_bytes=1 << 20, on_progress=news.append)

    assert engine.facts.max_model_len == engine.facts.num_blocks * 16
    assert resident_bytes() - before < 200 << 20
    assert news[-2].bytes_done == news[-2].bytes_total > 0, "the last word before warming up"
