"""The head of a reranker: how relevant a document is to a query, from the hidden state of the last token.

| checkpoint                                              | score                                                     |
|---------------------------------------------------------|-----------------------------------------------------------|
| `…ForSequenceClassification` with one label             | sigmoid(score.weight · h)                                 |
| a generator that answers yes or no, as Qwen3-Reranker   | softmax over the logits of its two tokens, of the second  |

The two tokens are an option of the engine, or `classifier_from_token` of config.json, which is vLLM's key.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer
from torch import Tensor

from slipway_runtime.models.checkpoint import Checkpoint
from slipway_runtime.models.config import ModelConfig
from slipway_runtime.models.config_values import ModelRefusedError, read_json

SCORE_TENSOR: Final = "score.weight"
_CLASSIFIER: Final = "ForSequenceClassification"


@dataclass(frozen=True, kw_only=True)
class ScoreHead:
    """A reranker's head."""

    weight: Tensor  # (1, H), float32
    tokens: tuple[str, str] | tuple[()]  # of no and yes; empty: the head is a matrix of the checkpoint

    def __call__(self, hidden: Tensor) -> Tensor:
        """Scores between 0 and 1. hidden: (R, H), normed, float32 -> (R, 1)."""
        # Not a matrix product: with that, a row's last bits would depend on the other rows of the step.
        return torch.sigmoid((hidden * self.weight).sum(-1, keepdim=True))


def read_score_head(
    model_path: Path, config: ModelConfig, tokens: str, *, dtype: torch.dtype, device: torch.device
) -> ScoreHead | None:
    """The head of a reranker; None: the model embeds. tokens: "no,yes", or "" for those of config.json, if any.

    Raises ModelRefusedError.
    """
    raw = read_json(model_path / "config.json")
    pair = _tokens(tokens, raw)
    if not pair and not any(_CLASSIFIER in str(name) for name in raw.get("architectures") or ()):
        return None
    with Checkpoint(model_path, dtype, device) as checkpoint:
        weight = _of_tokens(model_path, config, checkpoint, pair) if pair else _of_matrix(raw, config, checkpoint)
        checkpoint.ignore_if(lambda _: True)
    return ScoreHead(weight=weight, tokens=pair)


def _tokens(asked: str, raw: dict[str, Any]) -> tuple[str, str] | tuple[()]:
    found = asked.split(",") if asked else raw.get("classifier_from_token") or []
    if not found:
        return ()
    if not isinstance(found, list) or len(found) != 2 or not all(isinstance(one, str) and one for one in found):
        raise ModelRefusedError("a reranker scores with two tokens, such as no,yes: set score_tokens to them")
    return found[0], found[1]


def _of_tokens(model_path: Path, config: ModelConfig, checkpoint: Checkpoint, pair: tuple[str, str]) -> Tensor:
    """The logit of yes minus that of no, as one row: the softmax of two numbers is the sigmoid of their difference."""
    if config.logit_softcap is not None:
        raise ModelRefusedError(f"{config.model_type} models cap their logits: two tokens cannot give a score")
    tokenizer = Tokenizer.from_file(str(model_path / "tokenizer.json"))
    ids: list[int] = []
    for token in pair:
        if (index := tokenizer.token_to_id(token)) is None:
            raise ModelRefusedError(f"the vocabulary has no token {token!r}, which score_tokens names")
        ids.append(index)
    name = "model.embed_tokens.weight" if config.tied_embeddings else "lm_head.weight"
    rows = [
        checkpoint.take(name, config.vocab_size, config.hidden_size, rows=slice(index, index + 1), dtype=torch.float32)
        for index in ids
    ]
    return (rows[1] - rows[0]) * config.logit_scale


def _of_matrix(raw: dict[str, Any], config: ModelConfig, checkpoint: Checkpoint) -> Tensor:
    labels = len(raw.get("id2label") or ()) or raw.get("num_labels", 2)  # transformers' default
    if labels != 1:
        raise ModelRefusedError(
            f"config.json: the model classifies into {labels} labels; this engine scores with one (id2label)"
        )
    if "score.bias" in checkpoint:
        raise ModelRefusedError("the checkpoint has a tensor score.bias: heads without a bias are supported")
    return checkpoint.take(SCORE_TENSOR, 1, config.hidden_size, dtype=torch.float32)
