"""The command line that the operator writes means what it says."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from slipway_runtime.command_line import parse_arguments, serve_settings
from slipway_runtime.loading import Fetched, engine_options
from slipway_runtime.serve import queue_limits
from slipway_runtime.server.tokenizer import TokenizerFiles
from slipway_runtime.settings import BootAdapter, RuntimeSettings, SamplingDefaults

OPERATORS = {
    "--served-name": "chat",
    "--revision": "abcde23456",
    "--port": "8000",
    "--admin-port": "8001",
    "--dtype": "auto",
    "--max-model-len": "0",
    "--max-num-seqs": "64",
    "--max-num-batched-tokens": "2048",
    "--block-size": "16",
    "--max-output-tokens": "0",
    "--kv-cache-bytes": "64Mi",
    "--kv-cache-host-bytes": "2Gi",
    "--gpu-memory-utilization": "0.85",
    "--model-digest": "",
    "--tokenizer-uri": "",
    "--tokenizer-sha256": "",
    "--chat-template": "",
    "--sampling-defaults": '{"temperature": "0.5", "topK": 20, "maxTokens": 1024, "minP": null}',
    "--drain-timeout": "30",
    "--quantization": "int8",
    "--kv-cache-dtype": "fp8",
    "--speculation": "promptLookup",
    "--speculation-max-tokens": "6",
    "--max-adapters": "8",
    "--max-cpu-adapters": "32",
    "--max-rank": "64",
    "--warm-prompts": '["Once upon a time", [{"role": "system", "content": "Be brief."}]]',
}


def settings_of(*extra: str, uri: str = "file:///opt/slipway/models/tiny", **environment: str) -> RuntimeSettings:
    return serve_settings(parse_arguments(["serve", uri, *extra]), environment)


def test_all_flags_of_the_operator_are_understood():
    flags = [f"{name}={value}" for name, value in OPERATORS.items()]
    settings = settings_of(*flags, OMP_NUM_THREADS="2", POD_NAME="chat-abcde-0-0", POD_NAMESPACE="team-a")

    assert settings.model_name == "chat"
    assert settings.revision == "abcde23456"
    assert (settings.kv_cache_bytes, settings.kv_cache_host_bytes) == (64 * 2**20, 2 * 2**30)
    assert settings.max_model_len == 0
    assert settings.max_num_seqs == 64
    assert settings.gpu_memory_utilization == 0.85
    assert settings.drain_timeout == 30
    assert settings.sampling_defaults == SamplingDefaults(temperature=0.5, top_k=20, max_tokens=1024)
    assert (settings.quantization, settings.kv_cache_dtype, settings.deterministic) == ("int8", "fp8", False)
    assert (settings.speculation, settings.speculation_max_tokens) == ("promptLookup", 6)
    assert (settings.max_adapters, settings.max_cpu_adapters, settings.max_rank) == (8, 32, 64)
    assert settings.warm_prompts == ("Once upon a time", ({"role": "system", "content": "Be brief."},))
    assert (settings.threads, settings.pod, settings.namespace) == (2, "chat-abcde-0-0", "team-a")


def test_nothing_said_means_the_model_and_the_machine_decide():
    settings = settings_of()

    assert settings.model_name == "tiny"
    assert (settings.port, settings.admin_port) == (8000, 8001)
    assert settings.max_num_seqs == settings.max_model_len == 0
    assert settings.kv_cache_bytes == settings.kv_cache_host_bytes == 0
    assert (settings.quantization, settings.kv_cache_dtype, settings.speculation) == ("none", "auto", "none")
    assert settings.tensor_parallel_size == 1
    assert 0 < settings.max_queued_tokens < 10**7, "finding 9: what waits is bounded in tokens, not only in requests"
    switches = (settings.deterministic, settings.adapter_endpoints, settings.no_overlap, settings.in_process)
    switches += (settings.lora_experts,)
    assert not any(switches)
    assert (settings.max_adapters, settings.adapters, settings.warm_prompts, settings.tenant_weights) == (0, (), (), {})


def test_zero_and_the_empty_text_are_as_good_as_nothing():
    numbers = ("max-num-seqs", "max-model-len", "drain-timeout", "max-adapters", "max-cpu-adapters", "max-rank")
    numbers += ("speculation-max-tokens", "max-queued-tokens", "max-num-queued-reqs")
    texts = ("quantization", "kv-cache-dtype", "speculation", "warm-prompts", "tenant-weights", "kv-events-endpoint")
    texts += ("kv-cache-bytes", "kv-cache-host-bytes")

    assert settings_of(*[f"--{n}=0" for n in numbers], *[f"--{t}=" for t in texts]) == settings_of()


@pytest.mark.capability("SE-2")
def test_the_queue_has_the_limits_of_the_settings_and_a_zero_is_the_default():
    named = queue_limits(settings_of("--max-num-queued-reqs=7", "--max-queued-tokens=99"))
    unset, zero = queue_limits(settings_of()), queue_limits(replace(settings_of(), max_queued_tokens=0))

    assert (named.max_requests, named.max_tokens) == (7, 99)
    assert (unset.max_requests, unset.max_tokens) == (1024, 2**21)
    assert zero == unset


@pytest.mark.parametrize("flag", ["--max-num-queued-reqs", "--max-queued-tokens"])
def test_a_queue_of_a_negative_length_is_refused(flag: str):
    with pytest.raises(ValueError, match=flag):
        settings_of(f"{flag}=-1")


def test_switches_are_off_until_they_are_named():
    settings = settings_of("--deterministic", "--no-overlap", "--in-process", "--max-adapters=1", "--adapter-endpoints")

    assert settings.deterministic
    assert settings.no_overlap
    assert settings.in_process
    assert settings.adapter_endpoints


def test_adapters_of_the_start_are_named_once_each():
    settings = settings_of("--max-adapters=2", "--adapter=sql=file:///models/sql", "--adapter", "s3=s3://b/p?a=b")

    assert settings.adapters == (BootAdapter("sql", "file:///models/sql"), BootAdapter("s3", "s3://b/p?a=b"))
    assert settings.max_cpu_adapters == 2  # what computes is kept in host memory too


def test_several_lists_of_warm_prompts_are_one():
    """Linux limits the length of one argument, so the operator writes a list for each."""
    assert settings_of('--warm-prompts=["a", "b"]', "--warm-prompts", '["c"]').warm_prompts == ("a", "b", "c")


def test_tenants_have_weights():
    assert settings_of('--tenant-weights={"team-a": 2, "b": 0.5}').tenant_weights == {"team-a": 2.0, "b": 0.5}


def test_the_serving_port_takes_the_digests_of_several_tokens():
    assert settings_of().serving_token_digests == ()
    flags = [part for digest in ("a" * 64, "0" * 64) for part in ("--serving-token-sha256", digest)]
    assert settings_of(*flags).serving_token_digests == ("a" * 64, "0" * 64)
    for wrong in ("a" * 63, "A" * 64, "the token itself"):
        with pytest.raises(ValueError, match="64 lower-case hex digits"):
            settings_of("--serving-token-sha256", wrong)


def test_without_a_token_the_admin_port_is_for_this_machine_only():
    assert settings_of().admin_host == "127.0.0.1"
    with_token = settings_of(SLIPWAY_ADMIN_TOKEN_SHA256="aa, bb,")
    assert with_token.admin_token_digests == ("aa", "bb")
    assert with_token.admin_host == "::"


@pytest.mark.capability("ST-10")
def test_compiled_kernels_are_shared_in_the_cache_if_the_pod_has_a_key():
    """The key is in no log: neither of the settings nor of a failed assertion about them."""
    settings = settings_of(SLIPWAY_KERNELS_KEY="0a1b", SLIPWAY_CACHE_DIR="/mnt/slipway/models")
    tokenizer = SimpleNamespace(special_tokens={}, tokenizer=None)
    options = engine_options(settings, Fetched(Path("m"), Path("m"), cast(TokenizerFiles, tokenizer), 0.0))

    assert (options.kernels_key, options.kernels_directory) == ("0a1b", "/mnt/slipway/models/kernels")
    assert "0a1b" not in repr(settings)
    assert settings_of().kernels_key == ""


def test_the_name_of_a_hub_model_is_that_of_its_repository():
    assert settings_of(uri="hf://org/llama-3@main").model_name == "llama-3"


def test_a_chat_template_comes_inline_or_from_a_file(tmp_path: Path):
    (tmp_path / "t.jinja").write_text("{{ messages }}")

    assert settings_of("--chat-template", "{{ x }}").chat_template == "{{ x }}"
    assert settings_of("--chat-template-file", str(tmp_path / "t.jinja")).chat_template == "{{ messages }}"
    with pytest.raises(SystemExit):
        settings_of("--chat-template", "a", "--chat-template-file", "b")


@pytest.mark.parametrize(
    "flags",
    [
        ["--kv-cache-bytes", "lots"],
        ["--sampling-defaults", "{"],
        ["--sampling-defaults", '{"mood": 1}'],
        ["--max-num-seqs", "8", "--max-num-batched-tokens", "4"],
        ["--chat-template-file", "/does/not/exist"],
        ["--max-rank=-1"],
    ],
)
def test_a_senseless_value_is_an_error_and_not_a_guess(flags: list[str]):
    with pytest.raises((ValueError, OSError)):
        settings_of(*flags)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--max-rank=-1"], "--max-rank -1 is negative"),
        (["--kv-events-endpoint=tcp://host:*"], "must name an address and a port"),
        (["--kv-cache-host-bytes=1Gi", "--no-prefix-caching"], "leaves none to keep"),
        (["--warm-prompts", "secret ["], "--warm-prompts is not JSON: Expecting value at character 0"),
        (["--warm-prompts", '{"a": 1}'], "must be a JSON list"),
        (["--warm-prompts", '["a", ""]'], "entry 1 must be a text"),
        (["--warm-prompts", '[[{"role": "user"}]]'], "entry 0 must be a text, or a list of messages"),
        (["--tenant-weights", "[]"], "must be a JSON object"),
        (["--tenant-weights", '{"a": 0}'], "the weight of 'a' must be a number above 0"),
        (["--tenant-weights", '{"a": true}'], "the weight of 'a' must be a number above 0"),
        (["--tenant-weights", '{"a": Infinity}'], "the weight of 'a' must be a number above 0"),
        (["--max-adapters=1", "--adapter=sql"], "must be NAME=URI"),
        (["--max-adapters=2", "--adapter=a=file:///1", "--adapter=a=file:///2"], "--adapter a is given twice"),
        (["--adapter=a=file:///1"], "--adapter needs --max-adapters above 0"),
        (["--adapter-endpoints"], "--adapter-endpoints needs --max-adapters above 0"),
        (["--lora-experts"], "--lora-experts needs --max-adapters above 0"),
        (["--max-adapters=4", "--max-cpu-adapters=2"], "--max-cpu-adapters 2 is below --max-adapters 4"),
        (["--max-adapters=1", "--adapter=a=file:///1", "--adapter=b=file:///2"], "2 adapters are to be loaded"),
    ],
)
def test_the_error_is_a_sentence_that_names_the_flag(flags: list[str], sentence: str):
    with pytest.raises(ValueError, match=re.escape(sentence)) as refused:
        settings_of(*flags)

    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("flag", ["--quantization=int4", "--kv-cache-dtype=fp16", "--speculation=eagle"])
def test_what_is_not_built_is_not_accepted(flag: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        settings_of(flag)

    assert "invalid choice" in capsys.readouterr().err


@pytest.mark.capability("API-6")
def test_the_services_defaults_win_over_the_models():
    model = SamplingDefaults(temperature=0.7, top_p=0.95, max_tokens=512)
    service = SamplingDefaults.of(json.loads('{"temperature": "0", "maxTokens": 100}'))

    assert service.over(model) == SamplingDefaults(temperature=0.0, top_p=0.95, max_tokens=100)


@pytest.mark.capability("SE-11")
def test_metrics_on_the_serving_port_are_for_a_runtime_without_a_gateway():
    """review/shipping.md 24"""
    assert settings_of("--metrics-on-serving-port").metrics_on_serving_port
    assert not settings_of().metrics_on_serving_port
    for closed in ({"SLIPWAY_GATEWAY_TOKEN_SHA256": "a" * 64}, {}):
        flags = () if closed else ("--serving-token-sha256", "a" * 64)
        with pytest.raises(ValueError, match="scrape the admin port"):
            settings_of("--metrics-on-serving-port", *flags, **closed)
