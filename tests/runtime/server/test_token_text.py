"""A token's bytes are exact, even where it is half a character; logprobs say them."""

from hypothesis import given, settings
from hypothesis import strategies as st

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


def test_a_special_token_is_its_own_name_and_an_unknown_id_is_nothing():
    assert TOKENS.text_of(1) == "<|bos|>"
    assert TOKENS.bytes_of(10**6) == b""


def test_what_json_cannot_say_is_minus_9999():
    token = TokenLogprobs(5, float("-inf"), 3072, ((7, -0.5),))
    writer = LogprobWriter(TOKENS)
    chat = writer.chat([token])["content"][0]
    completion = writer.completion([None, token], [1, 5], offset=0)

    assert chat["logprob"] == -9999.0
    assert [top["logprob"] for top in chat["top_logprobs"]] == [-0.5]
    assert completion["token_logprobs"] == [None, -9999.0]
    assert completion["text_offset"] == [0, len("<|bos|>")]
    assert len(completion["top_logprobs"][1]) == 2, "the likeliest, and the sampled one"
    assert LogprobWriter(TOKENS, as_ids=True).name(5) == "token_id:5"
    assert writer.prompt([None, token])[1]["5"]["rank"] == 3072
