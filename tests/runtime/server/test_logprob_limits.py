"""Logprobs of a whole call are bounded, and a large body of them is written beside the event loop, piece by piece."""

import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from slipway_runtime.server import response_builder, sampling
from slipway_runtime.server.json_pieces import ITEMS_OF_PIECE, json_in_pieces
from slipway_runtime.server.logprobs import LogprobWriter
from tests.runtime.server.serving import Running, a_replica

in_the_loop = pytest.mark.asyncio(loop_scope="module")
MESSAGES = [{"role": "user", "content": "Hello!"}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replica() -> AsyncIterator[Running]:
    async with a_replica() as running:
        yield running


@pytest.fixture
def _limit_100(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "MOST_LOGPROBS", 100)


TOO_MANY: list[tuple[str, str, dict[str, Any]]] = [
    ("prompt_logprobs", "/v1/completions", {"prompt": [[5] * 20] * 3, "max_tokens": 1, "prompt_logprobs": 1}),
    ("echo", "/v1/completions", {"prompt": [[5] * 20] * 3, "max_tokens": 1, "logprobs": 1, "echo": True}),
    ("logprobs", "/v1/completions", {"prompt": [[5]] * 4, "max_tokens": 13, "logprobs": 1}),
    ("logprobs", "/v1/completions", {"prompt": [5], "n": 4, "max_tokens": 13, "logprobs": 1}),
    (
        "top_logprobs",
        "/v1/chat/completions",
        {"messages": MESSAGES, "max_tokens": 5, "logprobs": True, "top_logprobs": 20},
    ),
    (
        "top_logprobs",
        "/v1/responses",
        {"input": "Hi", "max_output_tokens": 13, "include": ["message.output_text.logprobs"], "top_logprobs": 1},
    ),
    (
        "top_logprobs",  # a stream of this API ends with the whole response
        "/v1/responses",
        {
            "input": "Hi",
            "max_output_tokens": 13,
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 1,
            "stream": True,
        },
    ),
]


@pytest.mark.capability("SE-2")
@pytest.mark.parametrize(("param", "path", "body"), TOO_MANY, ids=[f"{path} {param}" for param, path, _ in TOO_MANY])
@pytest.mark.usefixtures("_limit_100")
@in_the_loop
async def test_more_logprobs_than_a_call_may_have_are_a_400_with_both_numbers(
    replica: Running, param: str, path: str, body: dict[str, Any]
):
    before = replica.client.stats().admitted

    refused = await replica.post(path, body)

    assert refused.status_code == 400, refused.text[:300]
    error = refused.json()["error"]
    assert "at most 100" in error["message"]
    assert any(int(word) > 100 for word in error["message"].split() if word.isdigit())
    assert error["param"] == param
    assert replica.client.stats().admitted == before


@pytest.mark.usefixtures("_limit_100")
@in_the_loop
async def test_a_stream_may_have_more_because_nothing_of_it_is_kept(replica: Running):
    body = {"max_tokens": 30, "logprobs": True, "top_logprobs": 20, "stream": True, "ignore_eos": True}

    assert (await replica.chat(**body)).status_code == 200


@pytest.mark.usefixtures("_limit_100")
@in_the_loop
async def test_without_max_tokens_an_answer_ends_where_its_logprobs_do(replica: Running):
    """Given no max_tokens, a refusal would come as a surprise: the answer may have as many tokens as logprobs fit."""
    answer = await replica.chat(logprobs=True, top_logprobs=9, n=2, ignore_eos=True)

    assert answer.status_code == 200, answer.text[:300]
    assert [len(choice["logprobs"]["content"]) for choice in answer.json()["choices"]] == [5, 5]
    assert {choice["finish_reason"] for choice in answer.json()["choices"]} == {"length"}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
@in_the_loop
async def test_many_logprobs_are_written_beside_the_event_loop(
    replica: Running, monkeypatch: pytest.MonkeyPatch, path: str
):
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 9, "logprobs": True, "prompt_logprobs": 1},
        "/v1/completions": {"prompt": "Hello!", "max_tokens": 9, "logprobs": 3, "echo": True},
        "/v1/responses": {"input": "Hi", "max_output_tokens": 9, "include": ["message.output_text.logprobs"]},
    }
    body = bodies[path] | {"temperature": 0}
    few = await replica.post(path, body)
    written_in: set[int] = set()
    entry, top = LogprobWriter._entry, LogprobWriter._top
    monkeypatch.setattr(LogprobWriter, "_entry", lambda *given: written_in.add(threading.get_ident()) or entry(*given))
    monkeypatch.setattr(LogprobWriter, "_top", lambda *given: written_in.add(threading.get_ident()) or top(*given))
    monkeypatch.setattr(response_builder, "MANY_LOGPROBS", 5)

    many = await replica.post(path, body)

    assert many.status_code == 200
    assert many.headers["content-type"] == few.headers["content-type"]
    assert len(written_in) == 1
    assert threading.get_ident() not in written_in
    for name in ("choices", "usage", "prompt_logprobs"):
        assert many.json().get(name) == few.json().get(name)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    max_leaves=30,
)


@given(JSON)
def test_the_pieces_make_the_text_that_json_dumps_makes(value: Any):
    whole = json.dumps(value, ensure_ascii=False, separators=(",", ":"))

    assert b"".join(json_in_pieces(value)).decode() == whole


def test_no_piece_holds_more_than_some_items():
    entries = [{"token": str(number)} for number in range(10 * ITEMS_OF_PIECE)]
    pieces = list(json_in_pieces({"choices": [{"logprobs": {"content": entries}}]}))

    assert max(piece.count(b"token") for piece in pieces) == ITEMS_OF_PIECE
    assert len(pieces) > 10
