"""Where events end, however the network cuts the bytes."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipway_gateway.sse import EventSplitter, error_event

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
