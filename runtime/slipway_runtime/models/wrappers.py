"""The text part of multimodal checkpoints: the keys of config.json that describe it, and its tensors. Pure.

| model_type           | published as                       | text part            |
|----------------------|------------------------------------|----------------------|
| gemma3               | Gemma 3 4B to 27B                  | gemma3_text          |
| mistral3             | Mistral Small 3.1 and 3.2          | mistral, ministral   |
| llava, llava_next    | LLaVA, Pixtral                     | that of text_config  |
| internvl             | InternVL 3                         | that of text_config  |
| qwen2_vl, qwen2_5_vl | Qwen2-VL, Qwen2.5-VL               | qwen2                |
| qwen3_vl             | Qwen3-VL, dense                    | qwen3                |
| qwen3_vl_moe         | Qwen3-VL with experts              | qwen3_moe            |
| llama4               | Llama 4                            | llama4_text          |

Only text is served; the server refuses images. Qwen's models rotate positions in three sections, for time, height and
width of an image. For text the three positions are equal, so the sections have no effect. Qwen3-VL adds features of an
image to its first layers; without an image there are none.
"""

from collections.abc import Mapping
from typing import Any, Final, TypeVar

import structlog

from slipway_runtime.models.config_keys import may_compute
from slipway_runtime.models.config_values import ModelRefusedError, shown
from slipway_runtime.models.families import words

_DEFAULT_TEXT: Final = {  # the type of text_config if it names none, as in transformers
    "gemma3": "gemma3_text",
    "mistral3": "mistral",
    "llava": "llama",
    "llava_next": "llama",
    "internvl": "qwen2",
    "qwen2_vl": "qwen2_vl_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "llama4": "llama4_text",
}
WRAPPERS: Final = frozenset(_DEFAULT_TEXT)
_TEXT_TYPES: Final = {  # of text_config, and the family that computes the same
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen2_vl": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
# Keys beside text_config that are about images, or repeat what the text part has.
_OF_IMAGES: Final = words(
    "vision_config image_token_id image_token_index video_token_id video_token_index vision_start_token_id "
    "vision_end_token_id vision_token_id boi_token_index eoi_token_index mm_tokens_per_image spatial_merge_size "
    "vision_feature_layer vision_feature_select_strategy projector_hidden_act multimodal_projector_bias "
    "boi_token_id eoi_token_id image_seq_length image_grid_pinpoints downsample_ratio use_image_newline_parameter"
)
_SHARED: Final = words("tie_word_embeddings eos_token_id quantization_config dtype torch_dtype")  # of the whole model
_SECTIONS: Final = words("mrope_section mrope_interleaved")
_PREFIXES: Final = (("language_model.model.", "model."), ("language_model.", ""), ("model.language_model.", "model."))
_IMAGE_TENSORS: Final = tuple(
    f"{start}{part}"
    for start in ("", "model.")
    for part in (
        "vision_tower.",
        "vision_model.",
        "visual.",
        "multi_modal_projector.",
        "mm_projector.",
        "image_newline",
    )
)

T = TypeVar("T")
log = structlog.get_logger()


def text_part(raw: dict[str, Any]) -> dict[str, Any]:
    """The keys of the text model: `raw` itself, if it is one. Raises ModelRefusedError."""
    outer = raw.get("model_type")
    if not isinstance(outer, str) or outer not in WRAPPERS:
        return raw
    inner = raw.get("text_config")
    if inner is None and outer in _TEXT_TYPES:  # the first files of Qwen's models have both parts in one
        inner = {key: value for key, value in raw.items() if key not in _OF_IMAGES}
    elif isinstance(inner, dict):
        beside = raw.keys() - _OF_IMAGES - _SHARED - {"text_config", "is_causal"}
        if unknown := sorted(key for key in beside if raw[key] and may_compute(key)):
            raise ModelRefusedError(f"config.json asks for what this engine does not know: {', '.join(unknown)}")
    else:
        raise ModelRefusedError(f"config.json: text_config is {shown(inner)}; a {outer} model needs an object")
    shared = {key: raw[key] for key in _SHARED if raw.get(key) is not None}  # as in transformers, these win
    said = inner.get("model_type", _DEFAULT_TEXT[outer])
    if said == "qwen3_vl_moe_text":  # it has no key for it
        inner = {**inner, "norm_topk_prob": True}
    text = {**inner, **shared, "model_type": _TEXT_TYPES.get(said, said) if isinstance(said, str) else said}
    return {
        key: _without_sections(value) if key in ("rope_scaling", "rope_parameters") else value
        for key, value in text.items()
        if key not in _OF_IMAGES
    }


def text_tensors(places: Mapping[str, T]) -> dict[str, T]:
    """The tensors of the text model by the names that they have in a model of text alone.

    {"model.language_model.norm.weight": a, "model.visual.x": b} -> {"model.norm.weight": a}
    """
    if not any(name.startswith((*(prefix for prefix, _ in _PREFIXES), *_IMAGE_TENSORS)) for name in places):
        return dict(places)
    found, skipped = dict[str, T](), 0
    for name, place in places.items():
        if name.startswith(_IMAGE_TENSORS):
            skipped += 1
            continue
        prefix, own = next((pair for pair in _PREFIXES if name.startswith(pair[0])), ("", ""))
        found[own + name.removeprefix(prefix)] = place
    log.info("only the text part of the model is loaded", tensors=len(found), tensors_of_images=skipped)
    return found


def _without_sections(block: Any) -> Any:
    if not isinstance(block, dict):
        return block
    kept = {key: value for key, value in block.items() if key not in _SECTIONS}
    return {
        key: "default" if key in ("type", "rope_type") and value == "mrope" else value for key, value in kept.items()
    }
