"""Published config.json files parse as they are, and models of their architectures answer as `transformers` does.

published/README.md says which repository each file is from. The sizes of a model are shrunken here; every other key
stays as published, so that what is tested is what people download.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from slipway_runtime.kernels import gpu
from slipway_runtime.models.config import ModelRefusedError, parse_config
from slipway_runtime.models.quantized_checkpoint import parse_quantization
from tests.runtime.models.logits import Bench, assert_close, check_logits, oracle, some_tokens

FOLDER = Path(__file__).parent / "published"
FILES = sorted(path.stem for path in FOLDER.glob("*.json"))
PLAIN = [name for name in FILES if "quantization_config" not in json.loads((FOLDER / f"{name}.json").read_text())]
ROWS = {row[0]: row[1:] for row in [
    # file, parameters in billions (as its publisher says), longest context, layers with a window, what is peculiar
    ("gemma-2-2b", 2.61, 8192, 13, {"attention_softcap": 50.0, "logit_softcap": 30.0, "tied_embeddings": True}),
    ("gemma-2-9b", 9.24, 8192, 21, {"attention_scale": 256**-0.5, "embedding_scale": 3584**0.5}),
    ("gemma-3-1b-it", 1.00, 32768, 22, {"local_rope_theta": 1e4, "rope_theta": 1e6, "sliding_window": 512}),
    ("gpt-oss-20b", 20.91, 131072, 12, {"attention_sinks": True, "out_bias": True}),
    ("llama-3.1-8b-instruct", 8.03, 131072, 0, {"eos_token_ids": (128001, 128008, 128009)}),
    ("llama-3.2-1b", 1.24, 131072, 0, {"tied_embeddings": True, "head_dim": 64}),
    ("mistral-7b-v0.1", 7.24, 32768, 32, {"sliding_window": 4096}),
    ("mistral-7b-instruct-v0.3", 7.25, 32768, 0, {"sliding_window": None}),
    ("mistral-nemo-instruct-2407", 12.25, 131072, 0, {"head_dim": 128}),
    ("mixtral-8x7b-instruct-v0.1", 46.70, 32768, 0, {}),
    ("phi-3-mini-4k-instruct", 3.82, 4096, 32, {"fused_projections": True, "head_dim": 96}),
    ("phi-3.5-mini-instruct", 3.82, 131072, 32, {"default_position": 4096}),
    ("phi-4", 14.66, 16384, 0, {"rope_theta": 250_000.0}),
    ("phi-4-mini-instruct", 3.84, 131072, 32, {"rotary_dim": 96, "tied_embeddings": True}),
    ("qwen2.5-7b-instruct", 7.62, 32768, 0, {"qkv_bias": True, "out_bias": False}),
    ("qwen3-30b-a3b", 30.53, 40960, 0, {"qk_norm": True}),
    ("qwen3-8b", 8.19, 40960, 0, {"qk_norm": True, "tied_embeddings": False}),
    ("smollm2-135m", 0.1345, 8192, 0, {"tied_embeddings": True}),
    ("smollm3-3b", 3.07, 65536, 0, {"layers_without_positions": frozenset(range(3, 36, 4)), "tied_embeddings": True}),
]}  # fmt: skip


def published(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.json").read_text())


@pytest.mark.capability("API-20")
@pytest.mark.parametrize("name", ROWS)
def test_a_published_configuration_is_read_as_its_authors_meant_it(name):
    billions, context, sliding, peculiar = ROWS[name]
    config = parse_config(published(name))
    assert config.num_parameters == pytest.approx(billions * 1e9, rel=0.005)
    assert config.max_position == context
    assert len(config.sliding_layers) == sliding
    assert {key: getattr(config, key) for key in peculiar} == peculiar


@pytest.mark.capability("API-20")
@pytest.mark.parametrize("name", FILES)
def test_every_published_file_is_accepted(name):
    config = parse_config(published(name))
    assert (parse_quantization(config.quantization) is None) == (name in PLAIN)


def shrunken(name: str) -> dict[str, Any]:
    """The published file with small sizes: the same family, the same features."""
    raw = published(name) | {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 80}
    raw.pop("quantization_config", None)
    gemma3, layers = raw["model_type"] == "gemma3_text", 4
    raw |= {"num_hidden_layers": 7 if gemma3 else layers, "num_attention_heads": 4, "num_key_value_heads": 2}
    raw |= {key: value for key in ("bos_token_id", "eos_token_id", "pad_token_id") if (value := 1) and raw.get(key)}
    if "head_dim" in raw:
        raw["head_dim"] = 16
    if raw.get("partial_rotary_factor"):
        raw["hidden_size"] = 64
    if raw.get("sliding_window"):
        raw["sliding_window"] = 9
    if raw.get("query_pre_attn_scalar"):
        raw["query_pre_attn_scalar"] = 20
    for key in ("layer_types", "no_rope_layers"):
        if key in raw:
            raw[key] = raw[key][:layers]
    for key, value in {"num_experts": 6, "num_local_experts": 6, "num_experts_per_tok": 2,
                       "moe_intermediate_size": 24, "swiglu_limit": 1.0}.items():  # fmt: skip
        if key in raw:
            raw[key] = value
    if "short_factor" in (raw.get("rope_scaling") or {}):
        for key in ("short_factor", "long_factor"):
            raw["rope_scaling"][key] = raw["rope_scaling"][key][::8]
    return raw


def a_model_of(raw: dict[str, Any], path: Path) -> PreTrainedModel:
    """Random weights; what stands in config.json is the published spelling."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(**json.loads(json.dumps(raw)))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in key else 0.0, 0.2 if parameter.ndim < 2 else 0.3)
    model.save_pretrained(path)
    (path / "config.json").write_text(json.dumps(raw))
    (path / "generation_config.json").unlink(missing_ok=True)
    return model


ARCHITECTURES = [name for name in ROWS if name not in ("gemma-2-9b", "mistral-7b-instruct-v0.3")]


@pytest.mark.capability("API-20")
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in
                                  ("mixtral-8x7b-instruct-v0.1", "qwen3-30b-a3b", "gpt-oss-20b")])  # fmt: skip
def test_a_model_of_a_published_configuration_answers_as_transformers_does(name, tmp_path):
    check_logits(a_model_of(shrunken(name), tmp_path), tmp_path)


@pytest.mark.capability("API-21")
@pytest.mark.parametrize("name", ["mixtral-8x7b-instruct-v0.1", "qwen3-30b-a3b", "gpt-oss-20b"])
def test_a_mixture_of_experts_of_a_published_configuration_answers_as_transformers_does(name, tmp_path):
    check_logits(a_model_of(shrunken(name), tmp_path), tmp_path)


@pytest.mark.capability("API-20")
@pytest.mark.parametrize("name", ["gemma-2-2b", "gpt-oss-20b"])
def test_the_triton_kernels_answer_as_transformers_does(name, tmp_path):
    raw = shrunken(name) | {"num_hidden_layers": 2}
    if "layer_types" in raw:
        raw["layer_types"] = raw["layer_types"][:2]
    model = a_model_of(raw, tmp_path)
    bench, tokens = Bench(tmp_path, kernels=gpu), some_tokens(12, seed=3)
    theirs = oracle(model, tokens)
    (chunk,) = bench.step((0, tokens, 0, 11))
    (decode,) = bench.step((0, tokens, 11, 12))
    assert_close(chunk, theirs[:11])
    assert_close(decode, theirs[11:])


@pytest.mark.capability("API-20")
@pytest.mark.parametrize("name", ["gemma-2-2b", "gemma-3-1b-it"])
def test_bfloat16_is_no_further_from_the_truth_than_transformers_is(name, tmp_path):
    model = a_model_of(shrunken(name), tmp_path)
    prompts = [some_tokens(40, seed=seed) for seed in range(4)]
    exact = torch.cat([oracle(model, tokens) for tokens in prompts])
    model.to(torch.bfloat16)
    theirs = torch.cat([oracle(model, tokens) for tokens in prompts])
    bench = Bench(tmp_path, torch.bfloat16)
    ours = torch.cat([bench.step((row, tokens, 0, 40))[0] for row, tokens in enumerate(prompts)])
    assert (ours - exact).abs().mean() < 1.3 * (theirs - exact).abs().mean()


@pytest.mark.capability("API-20")
def test_a_harmless_key_is_logged_once_and_a_harmful_one_refused_in_a_sentence():
    raw = published("qwen3-8b") | {"unsloth_version": "2025.9", "comment_of_the_author": "hello"}
    with structlog.testing.capture_logs() as logs:
        parse_config(raw)
    (line,) = [line for line in logs if "not used" in line["event"]]
    assert line["keys"] == ["'comment_of_the_author'", "'unsloth_version'"]
    for key, value in {"attention_sinks": True, "attn_logit_softcapping": 30.0, "use_parallel_residual": True,
                       "rope_interleaved": True, "num_nextn_predict_layers": 1, "qk_layernorm_per_layer": True,
                       "use_bidirectional_attention": True, "logit_scale": 0.06}.items():  # fmt: skip
        with pytest.raises(ModelRefusedError, match=f"asks for what this engine does not know: {key}"):
            parse_config(raw | {key: value})
    with pytest.raises(ModelRefusedError, match="hidden_act is 'gelu'; only 'silu'"):
        parse_config(raw | {"hidden_act": "gelu"})
