"""Adapters are refused with a sentence before anything computes with them, and read exactly as PEFT means them."""

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from slipway_runtime.models.adapter_files import (
    AdapterRefusedError,
    adapter_digest,
    check_adapter_name,
    parse_adapter_config,
    read_adapter_config,
)
from slipway_runtime.models.adapter_weights import HostAdapter, lora_modules, read_adapter
from slipway_runtime.models.config import read_config
from tests.runtime.adapter_folders import an_adapter, write_adapter
from tests.runtime.checkpoints import a_checkpoint

Q0 = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    path = tmp_path_factory.mktemp("base")
    return path, a_checkpoint(path)


@pytest.fixture
def folder(base: tuple[Path, PreTrainedModel], tmp_path: Path) -> Path:
    return an_adapter(tmp_path / "adapter", base[1], rank=4, modules=("q_proj", "down_proj"))


def read(folder: Path, base: tuple[Path, PreTrainedModel], **options: Any) -> HostAdapter:
    return read_adapter(folder, read_config(base[0]), **{"max_rank": 8, "dtype": torch.float32, **options})


def change(folder: Path, tensors: Callable[[Tensors], object] = lambda _: None, **config: object) -> None:
    """Rewrite an adapter with other tensors or another description; None takes a key away."""
    found = load_file(folder / "adapter_model.safetensors")
    tensors(found)
    said = json.loads((folder / "adapter_config.json").read_text()) | config
    write_adapter(folder, found, {key: value for key, value in said.items() if value is not None})


def rename(old: str, new: str) -> Callable[[Tensors], object]:
    return lambda t: [t.update({name.replace(old, new): t.pop(name)}) for name in list(t) if old in name]


@pytest.mark.capability("ML-1")
@pytest.mark.parametrize("rslora", [False, True])
def test_the_matrices_are_those_of_the_file_with_the_scaling_in_the_second(rslora, base, folder):
    change(folder, use_rslora=rslora, lora_alpha=6, alpha_pattern={"layers.1.self_attn.q_proj": 3})
    adapter, tensors = read(folder, base), load_file(folder / "adapter_model.safetensors")
    root = 2 if rslora else 4
    for layer, alpha in ((0, 6), (1, 3)):
        module = f"model.layers.{layer}.self_attn.q_proj"
        a, b = adapter.matrices[module]
        assert torch.equal(a, tensors[f"base_model.model.{module}.lora_A.weight"])
        torch.testing.assert_close(b, tensors[f"base_model.model.{module}.lora_B.weight"].T * alpha / root)
    assert sorted(adapter.matrices) == sorted(m for m in lora_modules(read_config(base[0])) if m[-6:-5] in "qn")
    assert adapter.rank == 4
    assert adapter.bytes == sum(t.nbytes for t in tensors.values())


def test_matrices_come_in_the_number_format_of_the_engine(base, folder):
    a, b = read(folder, base, dtype=torch.bfloat16).matrices["model.layers.0.self_attn.q_proj"]
    assert a.dtype == b.dtype == torch.bfloat16


@pytest.mark.capability("ML-3")
@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"r": 9}, r"rank is 9; this engine takes adapters up to 8"),
        ({"rank_pattern": {"q_proj": 64}}, r"rank is 64; this engine takes adapters up to 8"),
        ({"rank_pattern": {"q_proj": 2}}, r"has the shape \(4, 48\); rank 2 asks for \(2, 48\)"),
        ({"rank_pattern": {"(a+)+$": 2}}, r"rank_pattern has '\(a\+\)\+\$'; only plain module names"),
        ({"alpha_pattern": {"q_proj": "much"}}, r"alpha_pattern is 'much'; a number is needed"),
        ({"r": 0}, "r is 0; a positive whole number is needed"),
        ({"r": True}, "r is True; a positive whole number is needed"),
        ({"lora_alpha": float("inf")}, "lora_alpha is inf; a number is needed"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; only 'LORA'"),
        ({"use_dora": True}, "DoRA"),
        ({"lora_bias": True}, "biases"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"trainable_token_indices": [1]}, "embeddings"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"init_lora_weights": "pissa"}, "belongs to a base model that was changed"),
        ({"target_modules": ["q_proj", "c_attn"]}, "does not adapt: c_attn; it knows q_proj"),
        ({"target_modules": ["q_proj", "lm_head"]}, "the adapter changes lm_head: embeddings and the output layer"),
        ({"target_modules": ["q_proj"]}, "changes down_proj, which target_modules does not name"),
        ({"target_modules": ["q_proj", "down_proj", "v_proj"]}, "names v_proj, and .* has no tensors of it"),
        ({"target_modules": 7}, "neither a list of names nor an expression"),
        ({"layers_to_transform": [0]}, "changes layer 1, which layers_to_transform does not name"),
        ({"layers_to_transform": "some"}, "neither a layer nor a list of layers"),
        ({"mixture": {"experts": 4}}, "asks for what this engine does not know: mixture"),
    ],
)
def test_a_description_that_cannot_be_honoured_is_refused(config, sentence, base, folder):
    change(folder, **config)
    with pytest.raises(AdapterRefusedError, match=sentence):
        read(folder, base)


@pytest.mark.capability("ML-3")
@pytest.mark.parametrize(
    ("tensors", "config", "sentence"),
    [
        (rename("q_proj", "c_attn"), {"target_modules": "x"}, "does not adapt: c_attn"),
        (rename("self_attn.q_proj", "embed_tokens"), {"target_modules": "x"}, "changes embed_tokens"),
        (rename("layers.1.", "layers.7."), {}, "another base model: it changes layer 7, .* the layers 0 to 1"),
        (rename("layers.1.", "blocks.1."), {}, "another base model: there is no model.blocks.1"),
        (rename("lora_A.weight", "lora_magnitude_vector"), {}, "is not a matrix of a LoRA adapter"),
        (lambda t: t.pop(Q0 + "B.weight"), {}, "lacks lora_B of model.layers.0.self_attn.q_proj"),
        (lambda t: t.update({Q0 + "A.default.weight": t[Q0 + "A.weight"].clone()}), {}, "holds lora_A of .* twice"),
        (lambda t: t.clear(), {}, "holds no tensors"),
        (lambda t: t.update({Q0 + "A.weight": torch.ones(4, 64)}), {}, "takes 64 values there and 48 here"),
        (lambda t: t.update({Q0 + "B.weight": torch.ones(64, 4)}), {}, "gives 64 values there and 48 here"),
        (lambda t: t.update({Q0 + "A.weight": torch.ones(3, 48)}), {}, r"shape \(3, 48\); rank 4 asks for \(4, 48\)"),
        (lambda t: t.update({Q0 + "A.weight": torch.ones(4 * 48)}), {}, r"has the shape \(192,\)"),
        (lambda t: t.update({Q0 + "A.weight": torch.ones(4, 48).int()}), {}, "holds torch.int32"),
        (lambda t: t.update({Q0 + "A.weight": torch.full((4, 48), torch.nan)}), {}, "has NaN or infinite values"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tensors, config, sentence, base, folder):
    change(folder, tensors, **config)
    with pytest.raises(AdapterRefusedError, match=sentence):
        read(folder, base)


@pytest.mark.capability("ML-3")
def test_an_adapter_of_another_base_is_refused_by_its_shapes_and_by_the_digest_it_names(base, folder, tmp_path):
    other = a_checkpoint(tmp_path / "other", hidden_size=32, intermediate_size=96)
    foreign = an_adapter(tmp_path / "foreign", other)
    with pytest.raises(
        AdapterRefusedError, match=r"made for another base model: model\.layers\.0\.mlp\.down_proj takes 96"
    ):
        read(foreign, base)
    change(folder, base_model_digest="sha256:one")
    with pytest.raises(AdapterRefusedError, match="with the digest sha256:one; this one has sha256:two"):
        read(folder, base, base_digest=lambda: "sha256:two")
    read(folder, base, base_digest=lambda: "sha256:one")


def test_the_base_is_not_summed_for_an_adapter_that_names_none(base, folder):
    read(folder, base, base_digest=lambda: pytest.fail("summed"))


@pytest.mark.capability("ML-3")
@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.pt"])
def test_a_pickled_adapter_is_refused_and_never_opened(name, base, folder):
    (folder / "adapter_model.safetensors").rename(folder / name)
    (folder / name).write_bytes(b"not even a pickle")
    for ask in (lambda: read(folder, base), lambda: adapter_digest(folder)):
        with pytest.raises(AdapterRefusedError, match=rf"pickled \({name}\): loading it could run code"):
            ask()


@pytest.mark.capability("ML-3")
@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff" * 8 + b"{}", b"\x02" + b"\0" * 7 + b"{}extra", b"\x80\x04K\x01."], ids=repr
)
def test_a_file_that_is_not_safetensors_is_refused(content, base, folder):
    (folder / "adapter_model.safetensors").write_bytes(content)
    with pytest.raises(AdapterRefusedError, match=r"broken, cut off, or not a safetensors|holds no tensors"):
        read(folder, base)


@pytest.mark.capability("ML-3")
def test_a_file_that_was_cut_off_anywhere_is_refused(base, folder):
    file = folder / "adapter_model.safetensors"
    whole = file.read_bytes()
    for length in range(0, len(whole), 997):
        file.write_bytes(whole[:length])
        with pytest.raises(AdapterRefusedError, match="broken, cut off"):
            read(folder, base)


@pytest.mark.capability("ML-3")
@pytest.mark.parametrize("text", [b"", b"[]", b"{", b"\xff\xfe", b"[" * 100_000, b'"' + b"x" * (1 << 20) + b'"'])
def test_a_description_that_is_no_json_object_is_refused(text):
    with pytest.raises(AdapterRefusedError, match=r"is not JSON|no JSON object|larger than"):
        parse_adapter_config(text)


@pytest.mark.capability("ML-3")
def test_a_file_larger_than_any_adapter_is_not_read(base, folder):
    with (folder / "adapter_model.safetensors").open("ab") as file:
        file.truncate(1 << 40)  # a hole: reading it all would take a terabyte
    with pytest.raises(AdapterRefusedError, match="which no adapter for this engine needs"):
        read(folder, base)


@pytest.mark.capability("ML-3", "SE-2")
@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_links_do_not_lead_out_of_the_folder(name, base, folder, tmp_path):
    (folder / name).rename(tmp_path / "secret")
    (folder / name).symlink_to("../secret")
    for ask in (lambda: read(folder, base), lambda: adapter_digest(folder)):
        with pytest.raises(AdapterRefusedError, match=f"^{name} is a link out of the adapter's directory$"):
            ask()


def test_a_snapshot_of_the_hub_is_a_folder_of_links(base, folder, tmp_path):
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "abc", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in folder.iterdir():
        file.rename(blobs / file.name[::-1])
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name[::-1]}")
    assert read(snapshot, base).digest == adapter_digest(snapshot)


@pytest.mark.capability("ML-3", "SE-2")
def test_with_roots_only_what_lies_inside_is_found_and_no_path_is_told(folder, tmp_path):
    inside, root = folder.parent / "inside", folder.parent
    inside.mkdir()
    assert adapter_digest(folder, [root]).startswith("sha256:")
    (inside / "link").symlink_to(folder)
    for path in (folder, inside / ".." / "adapter", inside / "link", Path("/etc")):
        with pytest.raises(AdapterRefusedError, match="outside the directories") as refused:
            adapter_digest(path, [inside])
        assert str(tmp_path) not in str(refused.value)
    for missing in (inside / "nothing", inside):
        with pytest.raises(AdapterRefusedError, match="there is no") as refused:
            adapter_digest(missing)
        assert str(tmp_path) not in str(refused.value)


@pytest.mark.capability("ML-3", "SE-2")
@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/b", "a\\b", "/etc", "a..b", "x" * 254, "a b", "ä", "a\n", "-x"]
)
def test_what_is_no_name_is_refused(name):
    with pytest.raises(AdapterRefusedError, match="an adapter's name is made of"):
        check_adapter_name(name)


def test_names_as_people_give_them_are_taken():
    for name in ("sailor", "sql-v2", "Team.A_1", "x" * 253):
        check_adapter_name(name)


@pytest.mark.capability("ML-3", "ML-9")
def test_the_digest_is_of_the_content_and_reading_checks_it(base, folder, tmp_path):
    digest = adapter_digest(folder)
    listing = subprocess.run(
        ["sha256sum", "adapter_config.json", "adapter_model.safetensors"], cwd=folder, capture_output=True, check=True
    ).stdout
    assert digest == "sha256:" + hashlib.sha256(listing).hexdigest()
    folder.rename(tmp_path / "elsewhere")
    assert adapter_digest(tmp_path / "elsewhere") == digest == read(tmp_path / "elsewhere", base, digest=digest).digest
    change(tmp_path / "elsewhere", lora_alpha=9)
    assert adapter_digest(tmp_path / "elsewhere") != digest
    with pytest.raises(AdapterRefusedError, match=f"the adapter has the digest sha256:.*, and {digest} was requested"):
        read(tmp_path / "elsewhere", base, digest=digest)


def test_the_rank_is_known_without_reading_the_matrices(folder):
    (folder / "adapter_model.safetensors").write_bytes(b"")
    change_config = json.loads((folder / "adapter_config.json").read_text()) | {"rank_pattern": {"q_proj": 6}}
    (folder / "adapter_config.json").write_text(json.dumps(change_config))
    assert read_adapter_config(folder).max_rank == 6


def test_digests_and_descriptions_need_no_torch():
    code = (
        "import sys, slipway_runtime.models.adapter_files, slipway_runtime.models.adapter_files; "
        "sys.exit('torch' in sys.modules or 'safetensors' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
