"""A token's bytes are exact, even where it is half a character; logprobs say them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.normalizers import Prepend, Replace
from tokenizers.normalizers import Sequence as Normalizers

from slipway_runtime.messages import TokenLogprobs
from slipway_runtime.server.logprobs import LogprobWriter
from slipway_runtime.server.tokenizer import TokenText
from tests.runtime.server.serving import tiny_tokenizer

TOKENS = TokenText(tiny_tokenizer().tokenizer)


@settings(deadline=None, max_examples=50)
@given(st.text(st.characters(exclude_categories=("Cs",)), max_size=30))
def test_the_bytes_of_tokens_are_the_bytes_of_their_text(text: str):
    ids = tiny_tokenizer().tokenizer.encode(text, add_special_tokens=False).ids

    assert b"".join(TOKENS.bytes_of(i) for i in ids) == text.encode()


@pytest.mark.capability("API-11")
@settings(deadline=None, max_examples=100)
@given(st.text(st.characters(exclude_categories=("Cs",)), max_size=30), st.integers(0, 3), st.integers(0, 30))
def test_offsets_point_into_the_text_of_the_answer(text: str, specials: int, cut: int):
    """review/api-users.md 16, over random texts and deltas, with special tokens between their tokens."""
    ids = tiny_tokenizer().tokenizer.encode(text, add_special_tokens=False).ids
    for place in range(specials):
        ids.insert(place * 3 % (len(ids) + 1), 1)
    writer = LogprobWriter(TOKENS)
    offsets = writer.offsets()
    pieces = [writer.completion([None] * len(some), some, offsets)["text_offset"] for some in (ids[:cut], ids[cut:])]

    before = b""
    for token_id, offset in zip(ids, pieces[0] + pieces[1], strict=True):
        assert offset == len(before.decode(errors="ignore")), "after the characters that are complete"
        before += b"" if token_id == 1 else TOKENS.bytes_of(token_id)
    assert before.decode() == text


def test_a_special_token_is_its_own_name_and_an_unknown_id_is_nothing():
    assert TOKENS.text_of(1) == "<|bos|>"
    assert TOKENS.bytes_of(10**6) == b""


def test_what_json_cannot_say_is_minus_9999():
    token = TokenLogprobs(5, float("-inf"), 3072, ((7, -0.5),))
    writer = LogprobWriter(TOKENS)
    chat = writer.chat([token])["content"][0]
    completion = writer.completion([None, token], [1, 5], writer.offsets())

    assert chat["logprob"] == -9999.0
    assert [top["logprob"] for top in chat["top_logprobs"]] == [-0.5]
    assert completion["token_logprobs"] == [None, -9999.0]
    assert completion["text_offset"] == [0, 0], "the text of an answer leaves special tokens out"
    shown = LogprobWriter(TOKENS, hides_special=False)
    assert shown.completion([None, token], [1, 5], shown.offsets())["text_offset"] == [0, len("<|bos|>")]
    assert len(completion["top_logprobs"][1]) == 2, "the likeliest, and the sampled one"
    assert LogprobWriter(TOKENS, as_ids=True).name(5) == "token_id:5"
    assert writer.prompt([None, token])[1]["5"]["rank"] == 3072


# --- each family of tokenizers, built as its tokenizer.json configures it (review/api-users.md 4)

# Words of a vocabulary, among them Maltese ones: `Ġ` is also how a byte-level vocabulary writes a space.
WORDS = ["\u2581cat", "cat", "\u2581", "\u2014", "\u2581Ġ", "Ġ", "Ġan", "é", "t"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def sentence_piece(decoder: decoders.Decoder, **parts: object) -> Tokenizer:
    vocabulary = {piece: number for number, piece in enumerate(["<unk>", "<bos>", *BYTES, *WORDS])}
    model = models.BPE(vocabulary, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True, ignore_merges=True)
    tokenizer = Tokenizer(model)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken("<bos>", special=True)])
    return tokenizer


def gemma() -> Tokenizer:
    """As Gemma 2 and 3: spaces are replaced, none is added, and bytes are a fallback."""
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    return sentence_piece(decoders.Sequence(steps), normalizer=Replace(" ", "\u2581"))


def llama2() -> Tokenizer:
    """As Llama 2 and Mistral 7B: a space is added in front of the text."""
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return sentence_piece(decoders.Sequence(steps), normalizer=Normalizers([Prepend("\u2581"), Replace(" ", "\u2581")]))


def metaspace() -> Tokenizer:
    """As T5 and the newer conversions of Llama 2."""
    steps = [decoders.ByteFallback(), decoders.Metaspace("\u2581", "never", False), decoders.Fuse()]
    return sentence_piece(decoders.Sequence(steps), pre_tokenizer=pre_tokenizers.Metaspace("\u2581", "never", False))


FAMILIES = {"gemma": gemma(), "llama2": llama2(), "metaspace": metaspace()}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_vocabulary_with_the_letter_of_byte_level_spaces_is_still_sentence_piece(family: str):
    tokenizer = FAMILIES[family]
    tokens = TokenText(tokenizer)

    def bytes_of(piece: str) -> bytes:
        token_id = tokenizer.token_to_id(piece)
        assert token_id is not None
        return tokens.bytes_of(token_id)

    assert bytes_of("\u2581cat") == b" cat"
    assert bytes_of("cat") == b"cat"
    assert bytes_of("\u2014") == "\u2014".encode()
    assert bytes_of("\u2581Ġ") == " Ġ".encode()
    assert bytes_of("<0x0D>") == b"\r"
    assert bytes_of("<bos>") == b"<bos>"


@settings(deadline=None, max_examples=50)
@given(st.sampled_from(sorted(FAMILIES)), st.text(st.sampled_from(" \r\ncatĠané\u2014日🙂"), max_size=12))
def test_the_bytes_of_tokens_of_every_family_are_the_bytes_of_their_text(family: str, text: str):
    tokenizer = FAMILIES[family]
    ids = tokenizer.encode(text, add_special_tokens=False).ids

    joined = b"".join(TokenText(tokenizer).bytes_of(token_id) for token_id in ids)
    assert joined.removeprefix(b" " if family == "llama2" and text else b"") == text.encode()


def test_a_vocabulary_without_byte_fallback_has_the_text_of_a_byte_token():
    tokenizer = Tokenizer(models.WordLevel({"<0x41>": 0, "Ġ": 1}, "Ġ"))

    assert TokenText(tokenizer).bytes_of(0) == b"<0x41>"
    assert TokenText(tokenizer).bytes_of(1) == "Ġ".encode()
