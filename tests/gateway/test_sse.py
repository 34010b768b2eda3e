"""Where events end, however the network cuts the bytes."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipway_api.stream_marks import TOKENS_MARK, handover_mark, tokens_mark
from slipway_gateway import sse
from slipway_gateway.sse import MAX_PENDING, EventSplitter, MarkedEvents, error_event

EVENTS = [b'data: {"n": 1}', b": comment", b'data: {"text": "a\\n\\nb"}', b"data: [DONE]"]


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
@given(cuts=st.lists(st.integers(0, 80), max_size=10), kept=st.integers(0, 80))
def test_only_whole_events_pass_however_the_bytes_are_cut(end, cuts, kept):
    stream = b"".join(event + end for event in EVENTS)[: kept or None]
    marks = sorted({min(cut, len(stream)) for cut in cuts} | {0, len(stream)})
    splitter = EventSplitter()
    passed = b"".join(splitter.feed(stream[a:b]) for a, b in pairwise(marks))

    whole = stream.split(end)[:-1]
    assert passed == b"".join(event + end for event in whole)
    assert splitter.events == len(whole)
    assert splitter.is_complete == (len(whole) == len(EVENTS) and passed == stream)


def test_whole_events_pass_untouched_and_uncopied():
    piece = b"data: 1\n\ndata: 2\n\n"

    assert EventSplitter().feed(piece) is piece


def test_an_endless_event_is_let_through_in_pieces():
    splitter = EventSplitter()
    passed = sum(len(splitter.feed(b"x" * 100_000)) for _ in range(50))

    assert passed > 3_000_000


def test_the_error_event_is_one_event_whatever_the_message():
    body = error_event('broke\n\noff: "why"', "BadGatewayError", 502)

    assert body.count(b"\n\n") == 1
    assert json.loads(body.removeprefix(b"data: "))["error"]["message"] == 'broke\n\noff: "why"'


texts = st.text(st.sampled_from('a\n: tokens 0 é😀"\\'), max_size=12)
steps = st.lists(st.tuples(st.lists(texts, max_size=3), st.lists(st.integers(0, 10**6), max_size=3)), max_size=6)


def as_event(text: str) -> bytes:
    return b"data: " + json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n\n"


@pytest.mark.capability("RD-4")
@given(steps=steps, cuts=st.lists(st.integers(0, 400), max_size=12), kept=st.integers(0, 400))
def test_a_client_has_exactly_the_events_whose_tokens_are_kept(steps, cuts, kept):
    """Wherever the stream is torn: events without their mark go out from another replica, never twice."""
    stream, after = b"", []  # what a client has, and the tokens, once so many bytes have come
    client, tokens = b"", []
    for events, token_ids in steps:
        said = b"".join(map(as_event, events))
        stream += said + tokens_mark(0, token_ids, ended=False)
        client, tokens = client + said, tokens + token_ids
        after.append((len(stream), client, tokens))
    torn = stream[:kept]
    seen: list[int] = []
    marked = MarkedEvents(1, lambda index, ids, ended: seen.extend(map(int, filter(None, ids.split(b",")))))
    marks = sorted({min(cut, len(torn)) for cut in cuts} | {0, len(torn)})
    out = b"".join(marked.feed(torn[a:b]) for a, b in pairwise(marks)) + marked.finish()

    expected = [state for state in after if state[0] <= len(torn)]
    assert (out, seen) == (expected[-1][1:] if expected else (b"", []))
    assert not marked.is_complete
    assert not marked.handover


@given(cuts=st.lists(st.integers(0, 200), max_size=12))
def test_behind_the_last_answer_the_end_of_the_stream_passes(cuts):
    end = as_event("usage") + b"data: [DONE]\n\n"
    stream = as_event("x") + tokens_mark(1, [4], ended=True) + as_event("y") + tokens_mark(0, [], ended=True) + end
    marked = MarkedEvents(2, lambda *_: None)
    marks = sorted({min(cut, len(stream)) for cut in cuts} | {0, len(stream)})
    out = b"".join(marked.feed(stream[a:b]) for a, b in pairwise(marks)) + marked.finish()

    assert out == as_event("x") + as_event("y") + end
    assert marked.is_complete


@given(cuts=st.lists(st.integers(0, 120), max_size=8), last=st.booleans())
def test_an_error_event_passes_and_a_handover_does_not(cuts, last):
    end = handover_mark("the drain\ndeadline") if last else error_event("out of luck", "InternalServerError", 500)
    stream = as_event("x") + tokens_mark(0, [4], ended=False) + end
    marked = MarkedEvents(1, lambda *_: None)
    marks = sorted({min(cut, len(stream)) for cut in cuts} | {0, len(stream)})
    out = b"".join(marked.feed(stream[a:b]) for a, b in pairwise(marks)) + marked.finish()

    assert out == as_event("x") + (b"" if last else end)
    assert marked.is_complete != last
    assert marked.handover == ("the drain deadline" if last else "")


@pytest.mark.capability("SE-9")
@pytest.mark.parametrize("piece", [b"x", b"x" * 65_536, b"data: 1\n\n", b"data: [DONE]\n\n", b": tokens 0 "], ids=len)
@pytest.mark.parametrize("answers", [0, 1])
def test_a_replica_that_never_marks_its_events_fills_a_bounded_buffer_and_its_bytes_pass(piece, answers):
    """review/control-plane.md 8"""
    held, passed = [], 0
    events = MarkedEvents(answers, lambda *_: None, lambda size: held.append(size) is None)
    pieces = min(MAX_PENDING // len(piece) * 3, 30_000 if len(piece) < 100 else 10**9)
    if len(piece) < 100:
        passed += len(events.feed(b"y" * (MAX_PENDING - 1_000)))
    for _ in range(pieces):
        passed += len(events.feed(piece))

    assert max(held) <= MAX_PENDING + len(piece)
    assert passed > 0


@pytest.mark.capability("SE-9")
def test_each_byte_of_a_stream_is_searched_once_however_small_its_pieces_are(monkeypatch):
    """review/control-plane.md 8: the buffer was scanned again at each chunk."""
    searched = 0

    class Counting:
        def finditer(self, text, start=0):
            nonlocal searched
            searched += len(text) - start
            return TOKENS_MARK.finditer(text, start)

        def search(self, text):
            nonlocal searched
            searched += len(text)
            return TOKENS_MARK.search(text)

    monkeypatch.setattr(sse, "TOKENS_MARK", Counting())
    events = MarkedEvents(1, lambda *_: None)
    stream = b"data: 1\n\n" * 20_000
    for start in range(0, len(stream), 5):
        events.feed(stream[start : start + 5])

    assert searched <= 3 * len(stream)


def test_a_stream_without_room_passes_event_by_event_and_without_marks():
    events = MarkedEvents(1, lambda *_: None, lambda _: False)
    stream = b"data: 1\n\n" + tokens_mark(0, [5], ended=False) + b"data: 2\n\n" + b"data: [DONE]\n\n"
    passed = b"".join(events.feed(stream[at : at + 4]) for at in range(0, len(stream), 4))

    assert passed == b"data: 1\n\ndata: 2\n\ndata: [DONE]\n\n"
    assert events.is_complete
