"""Loads a model's tokenizer files: vocabulary, special tokens and chat template, and computes their digest.

The digest is the SHA-256 of `tokenizer.json` followed by the chat template in use, so a user can compute it with
`cat tokenizer.json chat_template.jinja | sha256sum`. A replica refuses to start where its digest is not the configured
one: a prompt in another format than in training lowers the quality of answers without any error.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

_SPECIAL: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TokenizerMismatch(Exception):  # noqa: N818  it says what it is
    """The tokenizer's digest is not the one that the service expects."""


@dataclass(frozen=True)
class TokenizerFiles:
    """A loaded tokenizer, with its chat template, special tokens and digest."""

    tokenizer: Tokenizer
    chat_template: str  # empty: the model has none, and chats are refused
    special_tokens: dict[str, str]  # `bos_token` etc., as variables of templates
    sha256: str
    longest_token: int  # upper bound on the UTF-8 bytes of one token


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
    """The chat template, from any of the files where checkpoints store it; empty where none has one."""
    if (file := directory / "chat_template.jinja").is_file():
        return file.read_text(encoding="utf-8")
    found = _json(directory / "chat_template.json").get("chat_template")
    found = found or _json(directory / "tokenizer_config.json").get("chat_template") or ""
    if isinstance(found, list):  # several named templates; a plain chat uses "default"
        found = {entry["name"]: entry["template"] for entry in found}.get("default", "")
    return str(found)


def _special_tokens(directory: Path) -> dict[str, str]:
    config = _json(directory / "special_tokens_map.json") | _json(directory / "tokenizer_config.json")
    tokens = {name: config.get(name) for name in _SPECIAL}
    return {name: t["content"] if isinstance(t, dict) else str(t) for name, t in tokens.items() if t is not None}


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
