"""Writes logprobs in the formats of chat, of completions, and of vLLM's `prompt_logprobs`. Pure.

JSON has no infinity: a token with probability 0 has the logprob -9999, as in vLLM.
"""

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

    def completion(self, sampled: Sequence[TokenLogprobs | None], ids: Sequence[int], *, offset: int) -> dict[str, Any]:
        """`choices[].logprobs` of a completion; `offset`: where in the text the first token begins.

        `ids` run parallel to `sampled`; the first token of an echoed prompt has no logprob.
        """
        names = [self.name(token_id) for token_id in ids]
        offsets = []
        for token_id in ids:
            offsets.append(offset)
            offset += self.length([token_id])
        return {
            "text_offset": offsets,
            "token_logprobs": [None if token is None else _finite(token.logprob) for token in sampled],
            "tokens": names,
            "top_logprobs": [None if token is None else self._top(token) for token in sampled],
        }

    def prompt(self, scored: Sequence[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
        """vLLM's `prompt_logprobs`: for each token but the first, text and logprob by token id."""
        return [None if token is None else self._prompt_entry(token) for token in scored]

    def length(self, ids: Sequence[int]) -> int:
        """Characters that the tokens take in the answer's text, decoded one by one, as for `text_offset`."""
        return sum(
            len(self._tokens.text_of(token_id))
            for token_id in ids
            if not (self._hides_special and self._tokens.is_special(token_id))
        )

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


def _finite(logprob: float) -> float:
    return logprob if logprob > _LEAST else _LEAST  # also for a NaN, for which every comparison is false
