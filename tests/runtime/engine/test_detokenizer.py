"""What a streaming client reads is what it would have read at once."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from slipway_runtime.engine.detokenizer import MOST_UNDECIDED, Detokenizer, Released, StopStrings

TINY = Path(__file__).parents[3] / "models" / "tiny" / "tokenizer.json"
TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=40) | st.sampled_from(
    [
        "👩‍👩‍👧‍👦 family",
        "日本語のテキスト",
        "naïve Łódź",
        "e\u0301",
        "🇩🇪🇯🇵",
        "\ufeffbom",
        "a\ufffdb",
        "  two  spaces\n\n",
    ]
)


@cache
def tiny() -> Tokenizer:
    return Tokenizer.from_file(str(TINY))


@cache
def sentencepiece_like() -> Tokenizer:
    """Words with ▁ for a space, and a byte token for every byte: the shape of Llama 2's tokenizer."""
    pieces = ["<unk>", "<s>", "</s>", *[f"<0x{b:02X}>" for b in range(256)], "▁Hello", "▁world", "▁", "lo", "▁a"]
    tokenizer = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return tokenizer


def stream(tokenizer: Tokenizer, ids: Sequence[int], prompt: Sequence[int] = ()) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt)
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


@pytest.mark.capability("API-5", "PF-16")
@settings(deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=4))
def test_streamed_text_is_the_one_shot_text(texts: list[str]):
    ids = [i for text in texts for i in tiny().encode(text, add_special_tokens=False).ids]

    pieces = stream(tiny(), ids)

    assert "".join(pieces) == tiny().decode(ids) == "".join(texts)
    if "\ufffd" not in "".join(texts):
        assert not any("\ufffd" in piece for piece in pieces)


class CountingTokenizer:
    """Counts the tokens that are decoded."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.decoded = 0

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        self.decoded += len(ids)
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("undecided", ["<0xFF>", "</s>", "<0xE2>"], ids=["invalid byte", "special token", "lead byte"])
def test_a_token_costs_the_same_however_many_before_it_are_no_text(undecided: str):
    """Finding 7: it was decoded with all before it that had not become text; 16,000 of them took 18 s."""
    tokenizer = sentencepiece_like()
    ids = [tokenizer.token_to_id(undecided)] * 4000 + [tokenizer.token_to_id("▁world")]
    counting = CountingTokenizer(tokenizer)

    pieces = stream(counting, ids, prompt=[tokenizer.token_to_id("▁Hello")])

    assert counting.decoded < 4000 * 6 * MOST_UNDECIDED
    whole = tokenizer.decode([tokenizer.token_to_id("▁Hello"), *ids])
    assert "Hello" + "".join(pieces) == whole
    assert sum(map(bool, pieces)) > 50 or undecided == "</s>", "it is sent as it comes, not at the end"


@pytest.mark.capability("API-5")
@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 3071), max_size=60))
def test_any_token_ids_at_all_stream_to_their_one_shot_text(ids: list[int]):
    assert "".join(stream(tiny(), ids)) == tiny().decode(ids)


@pytest.mark.capability("API-5")
@settings(deadline=None)
@given(st.lists(st.integers(7, 3071), min_size=200, max_size=300))
def test_long_answers_stream_to_their_one_shot_text(ids: list[int]):
    assert "".join(stream(tiny(), ids)) == tiny().decode(ids)


@pytest.mark.capability("API-5")
@settings(deadline=None)
@given(TEXTS, TEXTS)
def test_an_answer_goes_on_where_the_prompt_ended(prompt: str, answer: str):
    before = tiny().encode(prompt).ids
    ids = tiny().encode(answer, add_special_tokens=False).ids

    assert "".join(stream(tiny(), ids, before)) == answer


@pytest.mark.capability("PF-16")
def test_a_character_of_several_tokens_comes_whole():
    ids = tiny().encode("🙂", add_special_tokens=False).ids
    assert len(ids) > 1, "the test wants a character that is cut"

    pieces = stream(tiny(), ids)

    assert pieces == [""] * (len(ids) - 1) + ["🙂", ""]


@pytest.mark.capability("PF-16")
def test_half_a_character_at_the_end_is_said_and_not_dropped():
    ids = tiny().encode("a🙂", add_special_tokens=False).ids[:-1]

    pieces = stream(tiny(), ids)

    assert pieces[0] == "a"
    assert pieces[-1] == "\ufffd"


def test_special_tokens_are_not_text():
    ids = tiny().encode("one<|end|>two", add_special_tokens=False).ids

    assert "".join(stream(tiny(), ids)) == "onetwo"


@pytest.mark.capability("API-5", "PF-16")
@settings(deadline=None)
@given(st.lists(st.sampled_from([259, 260, 261, 262, 263, *[3 + b for b in "é🙂日".encode()]]), max_size=30))
def test_byte_fallback_tokenizers_keep_their_spaces_and_characters(ids: list[int]):
    whole = sentencepiece_like().decode(ids)

    streamed = "".join(stream(sentencepiece_like(), ids))

    # Bytes that never become a character are written once each or once together, depending on where they are cut.
    assert streamed.replace("\ufffd", "") == whole.replace("\ufffd", "") or "\ufffd" in whole


def test_the_first_word_of_an_answer_keeps_its_space():
    hello, world = 259, 260

    assert stream(sentencepiece_like(), [world], [hello]) == [" world", ""]
    assert stream(sentencepiece_like(), [hello, world]) == ["Hello", " world", ""]


# --- stop strings


def feed(stops: Sequence[str], pieces: Sequence[str]) -> Released:
    matcher, text = StopStrings(stops), ""
    for piece in pieces:
        released = matcher.push(piece)
        text += released.text
        if released.stop is not None:
            return Released(text, released.stop)
    return Released(text + matcher.flush())


def by_definition(stops: Sequence[str], text: str) -> Released:
    """The earliest end of any stop string; of several there, the longest."""
    for end in range(1, len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            stop = max(found, key=len)
            return Released(text[: end - len(stop)], stop)
    return Released(text)


@pytest.mark.capability("API-4")
@settings(max_examples=500, deadline=None)
@given(st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4), st.lists(st.text("abc", max_size=4)))
def test_stop_strings_are_found_however_the_text_is_cut(stops: list[str], pieces: list[str]):
    assert feed(stops, pieces) == by_definition(stops, "".join(pieces))


@pytest.mark.capability("API-4")
def test_nothing_of_a_stop_string_is_ever_sent():
    matcher = StopStrings(["\nUser:"])

    assert matcher.push("Hi.") == Released("Hi.")
    assert matcher.push("\nUs") == Released("")
    assert matcher.push("er") == Released("")
    assert matcher.push(": more") == Released("", "\nUser:")


@pytest.mark.capability("API-4")
def test_text_that_only_looked_like_a_stop_string_is_sent_as_soon_as_it_differs():
    matcher = StopStrings(["END"])

    assert matcher.push("x EN") == Released("x ")
    assert matcher.push("TER") == Released("ENTER")
    assert matcher.push(" E") == Released(" ")
    assert matcher.flush() == "E"


def test_text_without_stop_strings_passes_at_once():
    assert StopStrings([]).push("abc") == Released("abc")


class Counted(str):
    """A stop string that counts how many of its characters are looked at."""

    looked_at = 0

    def __getitem__(self, index: Any) -> str:
        Counted.looked_at += len(found := super().__getitem__(index))
        return found

    def startswith(self, prefix: Any, *bounds: Any) -> bool:
        Counted.looked_at += len(prefix)
        return super().startswith(prefix, *bounds)


@pytest.mark.capability("SE-2")
@pytest.mark.parametrize("stop", ["a" * 4000 + "b", "ab" * 2000 + "c", "a" * 2000 + "b" + "a" * 2000 + "c"])
@pytest.mark.parametrize("piece", [1, 7, 4000])
def test_a_mismatch_at_the_end_of_a_long_stop_string_costs_no_search_of_it(stop: str, piece: int):
    text = (stop[:-1] + "x") * 3
    Counted.looked_at = 0
    matcher = StopStrings([Counted(stop)])
    for start in range(0, len(text), piece):
        matcher.push(text[start : start + piece])

    assert Counted.looked_at <= 4 * (len(text) + len(stop))


@given(st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3), st.text("abc", max_size=20))
def test_what_is_held_back_is_the_longest_end_that_could_become_a_stop_string(stops: list[str], text: str):
    matcher = StopStrings(stops)
    released = matcher.push(text)
    if released.stop is not None:
        return
    ends = [text[start:] for start in range(len(text) + 1)]
    longest = next(end for end in ends if any(stop.startswith(end) for stop in stops))

    assert released.text == text.removesuffix(longest)
    assert matcher.flush() == longest
