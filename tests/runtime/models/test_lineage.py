"""Weights that were rounded twice are warned of."""

import pytest

from slipway_runtime.models.config import parse_config
from slipway_runtime.models.lineage import name_of_format, quantization_warnings
from tests.runtime.models.test_published import published


@pytest.mark.capability("QZ-4")
@pytest.mark.parametrize(
    ("file", "origin", "asked", "words"),
    [
        ("llama-3.2-1b", "", "int8", None),
        ("llama-3.2-1b", "unsloth/Llama-3.2-1B-bnb-4bit", "none", None),  # rounded once, and that is past
        ("llama-3.2-1b", "unsloth/Llama-3.2-1B-bnb-4bit", "int8", "looks like bitsandbytes NF4, and are quant"),
        ("qwen2.5-7b-instruct-awq", "unsloth/Qwen2.5-7B-bnb-4bit", "none", "looks like bitsandbytes NF4"),
        ("qwen2.5-7b-instruct-awq", "Qwen/Qwen2.5-7B-Instruct-AWQ", "none", None),  # a copy of itself
        ("qwen2.5-7b-instruct-gptq-int4", "Qwen/Qwen2.5-7B-Instruct-AWQ", "none", "looks like AWQ, and are quantized"),
        ("qwen3-8b-fp8", "Qwen/Qwen3-8B", "none", None),
        ("qwen3-8b-fp8", "", "int8", "is quantized (fp8, fp8) and --quantization int8 rounds it again"),
        ("llama-3.1-8b-instruct-w4a16", "", "none", None),
    ],
)  # fmt: skip
def test_a_second_rounding_is_warned_of(file, origin, asked, words):
    config = parse_config(published(file) | {"_name_or_path": origin})
    warnings = quantization_warnings(config, asked)
    assert len(warnings) == (words is not None)
    assert words is None or words in warnings[0]


@pytest.mark.parametrize(
    ("file", "asked", "name"),
    [
        ("llama-3.2-1b", "none", "none"),
        ("llama-3.2-1b", "fp8", "fp8"),
        ("qwen2.5-7b-instruct-awq", "none", "int4"),
        ("llama-3.1-8b-instruct-w8a8", "none", "int8"),
        ("gpt-oss-20b", "none", "mxfp4"),
    ],
)
def test_the_format_of_the_weights_has_a_name(file, asked, name):
    assert name_of_format(parse_config(published(file)), asked) == name
