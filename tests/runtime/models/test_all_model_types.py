"""Every model type of `transformers` is loaded, or refused in a sentence that names what is missing."""

import json

import pytest
from huggingface_hub.errors import StrictDataclassClassValidationError
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from slipway_runtime.models.config import ModelRefusedError, parse_config
from slipway_runtime.models.families import FAMILIES
from slipway_runtime.models.wrappers import WRAPPERS

TYPES = sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES})


def as_saved(model_type: str) -> dict:
    """What `save_pretrained` writes for the default configuration of a type."""
    return json.loads(AutoConfig.for_model(model_type).to_json_string(use_diff=False))


@pytest.mark.capability("API-28")
@pytest.mark.parametrize("model_type", TYPES)
def test_a_model_type_is_loaded_or_refused_in_a_sentence(model_type):
    """review/engine.md F1: never a KeyError, and never a model that computes something else."""
    try:
        raw = as_saved(model_type)
    except StrictDataclassClassValidationError as error:
        pytest.skip(f"transformers makes no default configuration: {error}")
    try:
        parse_config(raw)
    except ModelRefusedError as refusal:
        said = str(refusal)
        if model_type in FAMILIES or model_type in WRAPPERS:
            assert said.startswith("config.json"), said
        else:
            assert said.startswith(f"model_type is {raw['model_type']!r}: this engine runs "), said
    else:
        assert model_type in FAMILIES or model_type in WRAPPERS
