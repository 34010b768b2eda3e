"""The command line that the operator writes means what it says."""

import json
from pathlib import Path

import pytest

from slipway_runtime.settings import RuntimeSettings, SamplingDefaults, arguments_of, serve_settings

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
    "--gpu-memory-utilization": "0.85",
    "--model-digest": "",
    "--tokenizer-uri": "",
    "--tokenizer-sha256": "",
    "--chat-template": "",
    "--sampling-defaults": '{"temperature": "0.5", "topK": 20, "maxTokens": 1024, "minP": null}',
    "--drain-timeout": "30",
}


def settings_of(*extra: str, uri: str = "file:///opt/slipway/models/tiny", **environment: str) -> RuntimeSettings:
    return serve_settings(arguments_of(["serve", uri, *extra]), environment)


def test_all_flags_of_the_operator_are_understood():
    flags = [f"{name}={value}" for name, value in OPERATORS.items()]
    settings = settings_of(*flags, OMP_NUM_THREADS="2", POD_NAME="chat-abcde-0-0", POD_NAMESPACE="team-a")

    assert settings.model_name == "chat"
    assert settings.revision == "abcde23456"
    assert settings.kv_cache_bytes == 64 * 2**20
    assert settings.max_model_len == 0
    assert settings.max_num_seqs == 64
    assert settings.gpu_memory_utilization == 0.85
    assert settings.drain_timeout == 30
    assert settings.sampling_defaults == SamplingDefaults(temperature=0.5, top_k=20, max_tokens=1024)
    assert (settings.threads, settings.pod, settings.namespace) == (2, "chat-abcde-0-0", "team-a")


def test_nothing_said_means_the_model_and_the_machine_decide():
    settings = settings_of()

    assert settings.model_name == "tiny"
    assert (settings.port, settings.admin_port) == (8000, 8001)
    assert settings.max_num_seqs == settings.max_model_len == settings.kv_cache_bytes == 0
    assert settings == settings_of(*[f"{n}=0" for n in ("--max-num-seqs", "--max-model-len", "--drain-timeout")])


def test_without_a_token_the_admin_port_is_for_this_machine_only():
    assert settings_of().admin_host == "127.0.0.1"
    with_token = settings_of(SLIPWAY_ADMIN_TOKEN_SHA256="aa, bb,")
    assert with_token.admin_token_digests == ("aa", "bb")
    assert with_token.admin_host == "0.0.0.0"


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
    ],
)
def test_a_senseless_value_is_an_error_and_not_a_guess(flags: list[str]):
    with pytest.raises((ValueError, OSError)):
        settings_of(*flags)


@pytest.mark.capability("API-6")
def test_the_services_defaults_win_over_the_models():
    model = SamplingDefaults(temperature=0.7, top_p=0.95, max_tokens=512)
    service = SamplingDefaults.of(json.loads('{"temperature": "0", "maxTokens": 100}'))

    assert service.over(model) == SamplingDefaults(temperature=0.0, top_p=0.95, max_tokens=100)
