"""Writes logprobs in the formats of chat, of completions, and of vLLM's `prompt_logprobs`. Pure.

JSON has no infinity: a token with probability 0 has the logprob -9999, as in vLLM.
"""

from codecs import getincrementaldecoder
from collections.abc import Sequence
from typing import Any, Final

from slipway_runtime.messages import TokenLogprobs
from slipway_runtime.server.tokenizer import TokenText

_LEAST: Final = -9999.0


class LogprobWriter:
    """Writes logprobs for one vocabulary.

    `as_ids`: tokens are written as `token_id:5`, which is unique. `hides_special`: special tokens are not in the text
    of the answer, so they take no place in it.
    """

    def __init__(self, tokens: TokenText, *, as_ids: bool = False, hides_special: bool = True) -> None:
        self._tokens = tokens
        self._as_ids = as_ids
        self._hides_special = hides_special

    def name(self, token_id: int) -> str:
        """The token as text, or as `token_id:5`."""
        return f"token_id:{token_id}" if self._as_ids else self._tokens.text_of(token_id)

    def chat(self, sampled: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """`choices[].logprobs` of a chat."""
        return {
            "content": [
                self._entry(token.token_id, token.logprob)
                | {"top_logprobs": [self._entry(token_id, logprob) for token_id, logprob in token.top]}
                for token in sampled
            ],
            "refusal": None,
        }

    def completion(
        self, sampled: Sequence[TokenLogprobs | None], ids: Sequence[int], offsets: "TextOffsets"
    ) -> dict[str, Any]:
        """`choices[].logprobs` of a completion; `offsets` knows the tokens before.

        `ids` run parallel to `sampled`; the first token of an echoed prompt has no logprob.
        """
        names = [self.name(token_id) for token_id in ids]
        return {
            "text_offset": offsets.take(ids),
            "token_logprobs": [None if token is None else _finite(token.logprob) for token in sampled],
            "tokens": names,
            "top_logprobs": [None if token is None else self._top(token) for token in sampled],
        }

    def prompt(self, scored: Sequence[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
        """vLLM's `prompt_logprobs`: for each token but the first, text and logprob by token id."""
        return [None if token is None else self._prompt_entry(token) for token in scored]

    def offsets(self) -> "TextOffsets":
        """Offsets of the tokens of one answer, from its first one."""
        return TextOffsets(self._tokens, hides_special=self._hides_special)

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._tokens.bytes_of(token_id)
        return {"token": self.name(token_id), "logprob": _finite(logprob), "bytes": list(raw)}

    def _top(self, token: TokenLogprobs) -> dict[str, float]:
        """Logprobs of the sampled token, which comes first as in vLLM, and of the likeliest ones."""
        top = {self.name(token_id): _finite(logprob) for token_id, logprob in token.top}
        return {self.name(token.token_id): _finite(token.logprob)} | top

    def _prompt_entry(self, token: TokenLogprobs) -> dict[str, Any]:
        ranked = {token_id: (logprob, rank) for rank, (token_id, logprob) in enumerate(token.top, start=1)}
        ranked[token.token_id] = (token.logprob, token.rank)
        return {
            str(token_id): {
                "logprob": _finite(logprob),
                "rank": rank,
                "decoded_token": self._tokens.text_of(token_id),
            }
            for token_id, (logprob, rank) in ranked.items()
        }


class TextOffsets:
    """Where in the text of an answer each token begins: after the characters that the tokens before it complete.

    A character may have its bytes in several tokens; all of them begin where the character does.
    """

    def __init__(self, tokens: TokenText, *, hides_special: bool) -> None:
        self._tokens = tokens
        self._hides_special = hides_special
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._length = 0  # of the text so far

    def take(self, ids: Sequence[int]) -> list[int]:
        """The offsets of the next tokens."""
        offsets = []
        for token_id in ids:
            offsets.append(self._length)
            if not (self._hides_special and self._tokens.is_special(token_id)):
                self._length += len(self._decoder.decode(self._tokens.bytes_of(token_id)))
        return offsets


def _finite(logprob: float) -> float:
    return logprob if logprob > _LEAST else _LEAST  # also for a NaN, for which every comparison is false
