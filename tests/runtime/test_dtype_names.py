"""Number formats have the names of vLLM and config.json beside our own. review/engine.md F14."""

import pytest

from slipway_runtime.command_line import parse_arguments

pytestmark = pytest.mark.capability("ST-9")


@pytest.mark.parametrize(
    ("names", "dtype"),
    [(("bf16", "bfloat16"), "bf16"), (("fp16", "float16", "half"), "fp16"), (("fp32", "float32", "float"), "fp32")],
)
def test_every_name_of_a_dtype_means_the_same(names, dtype):
    assert {parse_arguments(["serve", "model", "--dtype", name]).dtype for name in names} == {dtype}


def test_names_of_the_cache_and_names_that_are_unknown(capsys):
    assert parse_arguments(["serve", "model", "--kv-cache-dtype", "fp8_e4m3"]).kv_cache_dtype == "fp8"
    with pytest.raises(SystemExit):
        parse_arguments(["serve", "model", "--dtype", "bf8"])
    assert "invalid choice: 'bf8'" in capsys.readouterr().err
