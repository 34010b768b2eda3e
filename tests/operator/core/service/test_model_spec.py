"""One body for a model: what the command line says and what POST /model says give a runtime the same settings."""

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from slipway_api.runtime_api import ModelSpec
from slipway_operator.core.service.replicas.pod import arguments, model_spec
from slipway_operator.core.service.rollout.revision import Revision
from slipway_runtime.command_line import parse_arguments, serve_settings
from slipway_runtime.settings import RuntimeSettings
from tests.builders import a_service

REVISION = Revision("bcdfghjklm", "slipway/runtime:1")
TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40)
HEX = st.text("0123456789abcdef", min_size=64, max_size=64)
MESSAGE = st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": TEXT})
WARM = st.one_of(
    st.fixed_dictionaries({"prompt": TEXT}),
    st.fixed_dictionaries({"messages": st.lists(MESSAGE, min_size=1, max_size=3)}),
)


def decimals(low: float, high: float) -> st.SearchStrategy[str]:
    return st.floats(low, high).map(lambda value: f"{value:.3f}")


def some(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Any of these fields, each present or not."""
    return st.fixed_dictionaries({}, optional=fields)


MODELS = some(
    servedName=st.from_regex("[A-Za-z0-9][A-Za-z0-9._:/-]{0,20}", fullmatch=True),
    digest=HEX.map("sha256:{}".format),
    tokenizer=some(uri=st.just("hf://org/tokenizer@abc"), sha256=HEX),
    chatTemplate=TEXT,
    samplingDefaults=some(
        temperature=decimals(0, 2),
        topP=decimals(0.01, 1),
        topK=st.integers(0, 100),
        minP=decimals(0, 1),
        repetitionPenalty=decimals(0.1, 2),
        maxTokens=st.integers(1, 10_000),
    ),
    warmPrompts=st.lists(WARM, max_size=4),
)
RUNTIMES = some(
    dtype=st.sampled_from(["auto", "bf16", "fp16", "fp32"]),
    quantization=st.sampled_from(["none", "int8", "fp8"]),
    deterministic=st.booleans(),
    maxModelLen=st.integers(0, 100_000),
    maxNumSeqs=st.integers(1, 512),
    maxNumBatchedTokens=st.integers(512, 10_000),
    blockSize=st.sampled_from([8, 16, 32, 64, 128]),
    maxOutputTokens=st.integers(0, 1000),
    tensorParallelSize=st.integers(1, 8),
    kvCache=some(
        gpuMemoryUtilization=decimals(0.1, 1),
        dtype=st.sampled_from(["auto", "fp8", "int8"]),
        bytes=st.sampled_from(["64Mi", "2Gi", "1000000"]),
        hostBytes=st.sampled_from(["32Gi", "512Mi"]),
    ),
    speculation=st.one_of(
        some(method=st.sampled_from(["none", "promptLookup"]), maxTokens=st.integers(1, 32)),
        st.fixed_dictionaries(
            {"method": st.just("draft"), "draftModel": st.fixed_dictionaries({"uri": st.just("hf://org/small@abc")})},
            optional={"maxTokens": st.integers(1, 32)},
        ),
    ),
    lora=some(
        maxAdapters=st.integers(1, 16), maxCPUAdapters=st.integers(16, 64), maxRank=st.integers(1, 512),
        experts=st.booleans(),
    ),
)  # fmt: skip


@given(MODELS, RUNTIMES)
@example({"chatTemplate": "--{{ messages }} $$ $(HOME)"}, {})
def test_flags_and_body_of_any_spec_give_the_same_settings(model: dict[str, Any], runtime: dict[str, Any]):
    service = a_service(uri="hf://org/model@abc", model=model, runtime=runtime)
    process = ["serve", "--port", "8000", "--admin-port", "8001", "--drain-timeout", "300"]

    by_flags = serve_settings(parse_arguments([one.replace("$$", "$") for one in arguments(service, REVISION)]), {})
    body = ModelSpec.model_validate_json(model_spec(service, REVISION).wire())
    by_body = serve_settings(parse_arguments(process), {}).with_model(body)

    assert by_body == by_flags


@pytest.mark.capability("API-16")
@pytest.mark.parametrize("pooling", ["auto", "lastToken", "mean"])
def test_a_service_of_embeddings_says_so_on_the_command_line_and_in_the_body(pooling: str):
    service = a_service(uri="hf://org/model@abc", runtime={"task": "embed", "pooling": pooling})

    by_flags = serve_settings(parse_arguments(arguments(service, REVISION)), {})
    by_body = RuntimeSettings(model_uri="").with_model(model_spec(service, REVISION))

    assert (by_flags.task, by_flags.pooling) == (by_body.task, by_body.pooling) == ("embed", pooling)
    assert "--task" not in arguments(a_service(uri="hf://org/model@abc"), REVISION), "an older image knows no task"


def test_every_field_that_the_engine_needs_is_in_the_body():
    """A field that is added to the settings of a model, and not to the body, would be lost on POST /model."""
    written = {argument for argument in arguments(EVERYTHING, REVISION) if argument.startswith("--")}
    fields = {"--" + name.replace("_", "-") for name in ModelSpec.model_fields} - {"--uri"}

    assert written - {"--port", "--admin-port", "--drain-timeout"} == fields


EVERYTHING = a_service(
    uri="hf://org/model@abc",
    model={
        "digest": "sha256:" + "0" * 64,
        "tokenizer": {"uri": "hf://org/tokenizer", "sha256": "0" * 64},
        "chatTemplate": "{{ messages }}",
        "warmPrompts": [{"prompt": "Once"}],
    },
    runtime={
        "maxModelLen": 4096,
        "maxOutputTokens": 100,
        "quantization": "int8",
        "deterministic": True,
        "tensorParallelSize": 2,
        "kvCache": {"bytes": "64Mi", "dtype": "fp8", "hostBytes": "1Gi"},
        "speculation": {"method": "draft", "draftModel": {"uri": "hf://org/small"}},
        "task": "embed",
        "pooling": "mean",
        "lora": {"experts": True},
    },
)
