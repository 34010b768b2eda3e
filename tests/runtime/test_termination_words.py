"""Mistakes that only the runtime can see leave a word for the operator; review/shipping.md 9, 11."""

import socket
import ssl

import pytest
from jinja2 import Environment, TemplateSyntaxError

from slipway_api import names
from slipway_runtime import main, termination
from slipway_runtime.storage.source import UnreachableError, describe_silence
from slipway_runtime.termination import termination_message


@pytest.fixture
def message(tmp_path, monkeypatch):
    file = tmp_path / "termination-log"
    file.touch()
    monkeypatch.setattr(termination, "TERMINATION_MESSAGE", file)
    return file


@pytest.mark.capability("OP-18")
@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["serve", "--no-such-flag"], "--no-such-flag"),
        (["serve", "--max-model-len=many"], "--max-model-len=many"),
        (["serve", "--chat-template-file=/nowhere"], "/nowhere"),
    ],
)
def test_arguments_that_the_runtime_refuses_name_their_fields(argv, part, message):
    try:
        code = main.run(argv)
    except SystemExit as exit:
        code = exit.code

    assert code == 2
    assert message.read_text().startswith(f"{names.WORD_INVALID_SPEC}spec.runtime.args")
    assert part in message.read_text()


@pytest.mark.capability("OP-18")
def test_a_broken_chat_template_names_its_field_and_line():
    with pytest.raises(TemplateSyntaxError) as raised:
        Environment(autoescape=True).from_string("{% for m in messages %}{{ m.content }")

    said = termination_message("hf://org/model", raised.value)

    assert said.startswith(f"{names.WORD_INVALID_SPEC}spec.model.chatTemplate")
    assert "line 1" in said


@pytest.mark.capability("OP-18")
@pytest.mark.parametrize(
    ("cause", "words"),
    [
        (socket.gaierror(-2, "Name or service not known"), "its name cannot be resolved (DNS)"),
        (ConnectionRefusedError(111, "refused"), "the connection is refused"),
        (ssl.SSLCertVerificationError("bad"), "TLS fails"),
        (TimeoutError(), "no answer in time"),
    ],
)
def test_a_source_that_does_not_answer_is_told_with_host_and_cause(cause, words):
    try:
        try:
            raise cause
        except OSError as error:
            raise RuntimeError("ConnectError") from error
    except RuntimeError as error:
        said = describe_silence("hub.example", error)

    assert said.startswith(f"hub.example: {words}")
    assert termination_message("hf://o/m", UnreachableError(said)) == f"{names.WORD_HUB_UNREACHABLE}{said}"
