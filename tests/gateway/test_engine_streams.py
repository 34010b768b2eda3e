"""Events of vLLM 0.32.0, as recorded: the token ids go into the journal, and a break at any byte loses nothing."""

import json
from typing import Any

import pytest

from slipway_gateway.engine_streams import EngineJournal
from slipway_gateway.journal import JournalMemory

pytestmark = pytest.mark.capability("OP-11", "RD-4")

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
DONE = b"data: [DONE]\n\n"
DEAD = (
    b'data: {"error": {"message": "EngineCore encountered an issue. See stack trace (above) for the root cause.", '
    b'"type": "InternalServerError", "param": null, "code": 500}}\n\n'
)


def event(text: str, ids: list[int] | None, finish: str | None = None, prompt: list[int] | None = None) -> bytes:
    choice = {
        "index": 0, "text": text, "logprobs": None, "finish_reason": finish, "stop_reason": None,
        "prompt_token_ids": prompt, "token_ids": ids,
    }  # fmt: skip
    body = {"id": "cmpl-be54", "object": "text_completion", "created": 7, "model": "tiny", "choices": [choice]}
    return b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"


BEGINNING = [event(" a", [264], prompt=[1, 1146]), event("", [467]), event(" né", [383, 9])]
WHOLE = b"".join([*BEGINNING, event(" end", [5], "length"), DONE])


def a_journal(path: str = COMPLETIONS, **fields: Any) -> EngineJournal:
    body = {"model": "tiny", "prompt": "Once", "max_tokens": 16, "stream": True} | fields
    memory = JournalMemory(max_bytes=1 << 20, max_stream_bytes=1 << 20)
    journal = EngineJournal(path, json.dumps(body).encode(), "ns/chat", memory, lambda _: None)
    assert journal.open()
    return journal


def read(journal: EngineJournal, raw: bytes) -> tuple[bytes, bool, str]:
    events = journal.events()
    out = events.feed(raw)
    journal.read_identity(out)
    return out + events.finish(), events.is_complete, events.failure


def text_of(raw: bytes) -> str:
    events = [json.loads(one[6:]) for one in raw.split(b"\n\n") if one and one != DONE.strip()]
    return "".join(choice["text"] for body in events for choice in body["choices"])


def test_whole_events_pass_and_their_tokens_are_kept():
    journal = a_journal()
    out, is_complete, _ = read(journal, WHOLE)

    assert is_complete
    assert text_of(out) == " a né end"
    assert b"token_ids" not in out
    assert (journal.prompt_ids, journal.answers[0].token_ids.tolist()) == ([1, 1146], [264, 467, 383, 9, 5])


def test_after_a_cut_at_any_byte_text_and_tokens_agree():
    """What the client has is exactly the text of the tokens that another replica gets."""
    texts = {0: "", 1: " a", 4: " a né", 5: " a né end"}
    for cut in range(len(WHOLE)):
        journal = a_journal()
        out, is_complete, _ = read(journal, WHOLE[:cut])
        assert text_of(out) == texts[journal.tokens], f"cut after {cut} bytes"
        assert is_complete == (journal.tokens == 5), "an answer that has ended is complete without [DONE]"


def test_a_second_replica_gets_the_tokens_and_the_rest_of_the_limit():
    journal = a_journal(temperature=0, top_p=0.9, seed=4)
    read(journal, b"".join(BEGINNING))
    body = json.loads(journal.body())

    assert journal.path("/v1/completions?x=1") == COMPLETIONS
    assert body["prompt"] == [1, 1146, 264, 467, 383, 9]
    assert (body["max_tokens"], body["temperature"], body["top_p"]) == (12, 0, 0.9)
    assert "seed" not in body
    assert body["return_token_ids"] is True


def test_a_continued_chat_has_the_form_and_the_usage_of_its_beginning():
    journal = a_journal(CHAT, messages=[], max_tokens=None, stream_options={"include_usage": True})
    first = b"".join(BEGINNING).replace(b"text_completion", b"chat.completion.chunk")
    read(journal, first.replace(b'"text": " a"', b'"delta": {"content": " a"}'))
    assert json.loads(journal.body())["max_tokens"] is None
    usage = {"prompt_tokens": 6, "total_tokens": 7, "completion_tokens": 1}
    last = {
        "id": "cmpl-other",
        "object": "text_completion",
        "created": 9,
        "model": "tiny",
        "choices": [],
        "usage": usage,
    }
    raw = event(" end", [5], "length", prompt=[1, 1146, 264, 467, 383, 9]) + b"data: " + json.dumps(last).encode()
    out, is_complete, _ = read(journal, raw + b"\n\n" + DONE)

    chunk, ending = (json.loads(one[6:]) for one in out.split(b"\n\n")[:2])
    assert is_complete
    assert (chunk["id"], chunk["created"], chunk["object"]) == ("cmpl-be54", 7, "chat.completion.chunk")
    assert chunk["choices"][0]["delta"] == {"content": " end"}
    assert (ending["usage"]["prompt_tokens"], ending["usage"]["completion_tokens"]) == (2, 5)


def test_an_error_of_the_engine_breaks_the_stream_off_and_is_not_forwarded():
    journal = a_journal()
    out, is_complete, failure = read(journal, BEGINNING[0] + DEAD + DONE)

    assert (text_of(out), is_complete, failure) == (" a", False, "the engine of the replica failed")
    assert journal.can_resume


def test_an_error_of_the_request_ends_the_stream():
    refusal = DEAD.replace(b"500", b"400")
    out, is_complete, failure = read(a_journal(), BEGINNING[0] + refusal)

    assert out.endswith(refusal)
    assert (is_complete, failure) == (True, "")


@pytest.mark.parametrize(
    "raw",
    [
        event(" a", None),
        event(" a", [264]),
        BEGINNING[0].replace(b'"text": " a"', b'"delta": {"reasoning": "Hm"}'),
        b'data: {"id": "x", "choices": 5}\n\n',
        b"data: not JSON\n\n",
    ],
)
def test_a_stream_in_another_form_passes_and_is_not_continued(raw: bytes):
    """Continued without its tokens, its beginning would be sent twice."""
    journal = a_journal()
    out, *_ = read(journal, raw)

    assert out
    assert not journal.can_resume
