"""A model's tokenizer as its files define it: the vocabulary, the special tokens, the chat template, and their digest.

The digest is the SHA-256 of `tokenizer.json` followed by the chat template in use, so a user can make it with
`cat tokenizer.json chat_template.jinja | sha256sum`. A replica started with another digest refuses to start: a prompt
that is written otherwise than in training is answered, only worse, and nobody would notice.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

_SPECIAL: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TokenizerMismatch(Exception):  # noqa: N818  it says what it is
    """The files are not those that the service was made for."""


@dataclass(frozen=True)
class TokenizerFiles:
    """What was found beside the weights, ready to use."""

    tokenizer: Tokenizer
    chat_template: str  # empty: the model has none, and takes no chats
    special_tokens: dict[str, str]  # `bos_token` and its like, as templates see them
    sha256: str
    longest_token: int  # UTF-8 bytes that one token can stand for, at most


def load_tokenizer(directory: Path, *, chat_template: str = "", expected_sha256: str = "") -> TokenizerFiles:
    """Read the tokenizer of a model; `chat_template` replaces the model's own."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"{directory} has no tokenizer.json; only tokenizers in that format are supported")
    raw = path.read_bytes()
    template = chat_template or _template_of(directory)
    digest = hashlib.sha256(raw + template.encode()).hexdigest()
    expected = expected_sha256.removeprefix("sha256:").lower()
    if expected and expected != digest:
        raise TokenizerMismatch(
            f"tokenizer and chat template have sha256 {digest}, the service was made for {expected}: refusing to start"
        )
    tokenizer = Tokenizer.from_str(raw.decode())
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return TokenizerFiles(
        tokenizer=tokenizer,
        chat_template=template,
        special_tokens=_special_tokens(directory),
        sha256=digest,
        longest_token=max((len(piece.encode()) for piece in tokenizer.get_vocab()), default=1),
    )


def _template_of(directory: Path) -> str:
    """The chat template, from any of the places where checkpoints keep it."""
    if (file := directory / "chat_template.jinja").is_file():
        return file.read_text(encoding="utf-8")
    found = _json(directory / "chat_template.json").get("chat_template")
    found = found or _json(directory / "tokenizer_config.json").get("chat_template") or ""
    if isinstance(found, list):  # several named ones; "default" is what a plain chat uses
        found = {entry["name"]: entry["template"] for entry in found}.get("default", "")
    return str(found)


def _special_tokens(directory: Path) -> dict[str, str]:
    config = _json(directory / "special_tokens_map.json") | _json(directory / "tokenizer_config.json")
    tokens = {name: config.get(name) for name in _SPECIAL}
    return {name: t["content"] if isinstance(t, dict) else str(t) for name, t in tokens.items() if t is not None}


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
