"""The text part of multimodal checkpoints answers as `transformers` does, and their images are refused."""

import json

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from slipway_runtime.models.config import ModelRefusedError, parse_config
from slipway_runtime.models.wrappers import WRAPPERS, text_tensors
from tests.runtime.checkpoints import SMALL, save_random
from tests.runtime.models.logits import check_logits

TEXT = {**SMALL, "head_dim": 12}
EYE = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
SQUARE = {**EYE, "patch_size": 14}
QWEN_EYE = {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "patch_size": 14}
SECTIONS = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 2, 2]}
SHAPES = {
    "gemma3": {
        "text_config": {**TEXT, "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]},
        "vision_config": {**SQUARE, "model_type": "siglip_vision_model"},
        "mm_tokens_per_image": 4,
    },
    "mistral3": {
        "text_config": {**TEXT, "model_type": "mistral"},
        "vision_config": {**SQUARE, "model_type": "pixtral"},
    },
    "llava": {
        "text_config": {**TEXT, "model_type": "llama"},
        "vision_config": {**SQUARE, "model_type": "clip_vision_model"},
    },
    "llava_next": {
        "text_config": {**TEXT, "model_type": "mistral"},
        "vision_config": {**SQUARE, "model_type": "clip_vision_model"},
    },
    "internvl": {
        "text_config": {**TEXT, "model_type": "qwen2"},
        "vision_config": {**EYE, "image_size": [28, 28], "patch_size": [14, 14], "model_type": "internvl_vision"},
    },
    "qwen2_vl": {
        "text_config": {**TEXT, "rope_parameters": SECTIONS},
        "vision_config": {**QWEN_EYE, "hidden_size": 48},
    },
    "qwen2_5_vl": {
        "text_config": {**TEXT, "rope_parameters": SECTIONS},
        "vision_config": {**QWEN_EYE, "out_hidden_size": 48},
    },
    "qwen3_vl": {
        "text_config": {**TEXT, "rope_parameters": {**SECTIONS, "mrope_interleaved": True}},
        "vision_config": {**QWEN_EYE, "out_hidden_size": 48, "deepstack_visual_indexes": [0]},
    },
    "qwen3_vl_moe": {
        "text_config": {
            **TEXT,
            "rope_parameters": {**SECTIONS, "mrope_interleaved": True},
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
        },
        "vision_config": {**QWEN_EYE, "out_hidden_size": 48, "deepstack_visual_indexes": [0]},
    },
    "llama4": {
        "text_config": {**TEXT, "num_local_experts": 4, "intermediate_size": 24, "intermediate_size_mlp": 40},
        "vision_config": {**SQUARE, "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16},
    },
}


@pytest.fixture
def saved(request, tmp_path):
    """A random model of this type, and its folder."""
    config = AutoConfig.for_model(request.param, **SHAPES[request.param])
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    return save_random(model, tmp_path), tmp_path


@pytest.mark.capability("API-28")
@pytest.mark.parametrize("saved", SHAPES, indirect=True)
def test_the_text_part_of_a_multimodal_model_equals_transformers(saved):
    """review/engine.md F1: what people download is the multimodal checkpoint, also for text."""
    model, folder = saved
    check_logits(model, folder)


@pytest.mark.parametrize(("wrapper", "family"), [("qwen3_vl", "qwen3"), ("internvl", "qwen2"), ("mistral3", "mistral")])
def test_a_text_part_without_a_type_is_of_the_family_that_transformers_takes(wrapper, family):
    assert parse_config({"model_type": wrapper, "text_config": TEXT}).model_type == family


def test_every_wrapper_is_compared():
    assert set(SHAPES) == WRAPPERS


@pytest.mark.capability("API-28")
@pytest.mark.parametrize("saved", ["qwen2_5_vl"], indirect=True)
def test_the_first_files_of_qwen_have_both_parts_in_one(saved):
    """Qwen2.5-VL was published with the text's keys at the top, and with other names of tensors."""
    model, folder = saved
    raw = json.loads((folder / "config.json").read_text())
    text = raw.pop("text_config")
    block = text.pop("rope_parameters")
    text |= {"rope_theta": block.pop("rope_theta"), "rope_scaling": {"type": "mrope", "mrope_section": [2, 2, 2]}}
    (folder / "config.json").write_text(json.dumps({**raw, **text, "model_type": "qwen2_5_vl"}))
    file = folder / "model.safetensors"
    renamed = {name.replace("model.language_model.", "model."): one for name, one in load_file(file).items()}
    save_file({name.replace("model.visual.", "visual."): one for name, one in renamed.items()}, file)

    check_logits(model, folder)


@pytest.mark.capability("API-28")
@pytest.mark.parametrize("saved", ["qwen3_vl_moe"], indirect=True)
def test_the_published_experts_of_qwen3_vl_have_inputs_before_outputs(saved):
    """The files of the hub have (experts, in, out), those that `transformers` saves have (experts, out, in)."""
    model, folder = saved
    file = folder / "model.safetensors"
    turned = {
        name: one.transpose(1, 2).contiguous() if ".experts." in name else one for name, one in load_file(file).items()
    }
    save_file(turned, file)

    check_logits(model, folder)


def test_tensors_of_text_alone_keep_their_names():
    places = {"model.layers.0.x": 1, "lm_head.weight": 2, "embed_tokens.weight": 3}

    assert text_tensors(places) == places


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("language_model.model.norm", "language_model.lm_head", "vision_tower.a"), {"model.norm", "lm_head"}),
        (("model.language_model.norm", "lm_head", "model.visual.a"), {"model.norm", "lm_head"}),
        (("model.language_model.norm", "model.audio_tower.a"), {"model.norm", "model.audio_tower.a"}),
    ],
)
def test_tensors_of_images_are_left_out_and_no_others(names, expected):
    """A tensor that is left over is refused when the checkpoint is closed."""
    assert set(text_tensors(dict.fromkeys(names, 0))) == expected


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        ({"model_type": "gemma3"}, "text_config is None; a gemma3 model needs an object"),
        ({"model_type": "llava", "text_config": {**TEXT, "model_type": "vicuna"}}, "model_type is 'vicuna'"),
        ({"model_type": "llava", "text_config": TEXT, "gated_attention": True}, "does not know: gated_attention"),
    ],
)
def test_a_wrapper_that_is_not_understood_is_refused_in_a_sentence(raw, sentence):
    with pytest.raises(ModelRefusedError, match=sentence):
        parse_config(raw)
