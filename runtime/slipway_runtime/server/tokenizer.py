"""Loads a model's tokenizer files: vocabulary, special tokens and chat template, and computes their digest.

The digest is the SHA-256 of `tokenizer.json` followed by the chat template in use, so a user can compute it with
`cat tokenizer.json chat_template.jinja | sha256sum`; a template named `tool_use` follows after that. A replica refuses
to start if its digest is not the configured
one: a prompt in another format than in training lowers the quality of answers without any error.

`TokenText` gives the exact bytes of a single token. A token may be part of a character, which decoders replace by
U+FFFD, so the bytes are read from the vocabulary. How the vocabulary writes bytes is read from the tokenizer's decoder.
"""

import hashlib
import json
import re
from dataclasses import dataclass
from functools import cached_property
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
    tool_template: str = ""  # the template for requests with tools, if the model has one of that name


def load_tokenizer(directory: Path, *, chat_template: str = "", expected_sha256: str = "") -> TokenizerFiles:
    """Read the tokenizer of a model; `chat_template` replaces the model's own."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"{directory} has no tokenizer.json; only tokenizers in that format are supported")
    raw = path.read_bytes()
    named = {} if chat_template else _named_templates(directory)
    template = chat_template or named.get("default", "")
    tool_template = named.get("tool_use", "")
    digest = hashlib.sha256(raw + template.encode() + tool_template.encode()).hexdigest()
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
        tool_template=tool_template,
        longest_token=max((len(piece.encode()) for piece in tokenizer.get_vocab()), default=1),
    )


def _named_templates(directory: Path) -> dict[str, str]:
    """The chat templates by name, from all files where checkpoints store them; most have only `default`.

    As in transformers: `tool_use` is for requests with tools, `default` for the others.
    """
    folder = "additional_chat_templates"
    files = {file.stem: file for file in sorted((directory / folder).glob("*.jinja"))}
    # Models from the hub are stored without folders (`storage/hub.py`).
    files |= {file.stem.removeprefix(f"{folder}."): file for file in sorted(directory.glob(f"{folder}.*.jinja"))}
    more = {name: file.read_text(encoding="utf-8") for name, file in files.items()}
    if (file := directory / "chat_template.jinja").is_file():
        return more | {"default": file.read_text(encoding="utf-8")}
    found = _json(directory / "chat_template.json").get("chat_template")
    found = found or _json(directory / "tokenizer_config.json").get("chat_template") or ""
    if isinstance(found, list):
        return {str(entry["name"]): str(entry["template"]) for entry in found} | more
    return more | ({"default": str(found)} if found else {})


def _special_tokens(directory: Path) -> dict[str, str]:
    config = _json(directory / "special_tokens_map.json") | _json(directory / "tokenizer_config.json")
    tokens = {name: config.get(name) for name in _SPECIAL}
    if isinstance(more := config.get("extra_special_tokens"), dict):  # named tokens of the model, also variables
        tokens |= more
    return {name: t["content"] if isinstance(t, dict) else str(t) for name, t in tokens.items() if t is not None}


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _byte_alphabet() -> dict[str, int]:
    """The inverse of GPT-2's mapping from bytes to printable characters."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES: Final = _byte_alphabet()
_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _flat(part: dict[str, Any]) -> list[dict[str, Any]]:
    """The steps of a part of a tokenizer, which may be a sequence."""
    if part.get("type") != "Sequence":
        return [part]
    return [step for inner in part.get("decoders") or part.get("pretokenizers") or [] for step in _flat(inner)]


class TokenText:
    """Bytes and text of the tokens of one vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def _added(self) -> dict[int, str]:
        return {token_id: added.content for token_id, added in self._tokenizer.get_added_tokens_decoder().items()}

    @cached_property
    def _special(self) -> frozenset[int]:
        added = self._tokenizer.get_added_tokens_decoder().items()
        return frozenset(token_id for token_id, token in added if token.special)

    def is_special(self, token_id: int) -> bool:
        """Whether decoding leaves the token out, if it skips special tokens."""
        return token_id in self._special

    @cached_property
    def _steps(self) -> list[dict[str, Any]]:
        """The steps of the decoder, or of the pre-tokenizer if the tokenizer has no decoder."""
        part = self._tokenizer.decoder or self._tokenizer.pre_tokenizer
        return _flat(json.loads(part.__getstate__())) if part is not None else []

    @cached_property
    def _is_byte_level(self) -> bool:
        return any(step["type"] == "ByteLevel" for step in self._steps)

    @cached_property
    def _has_byte_tokens(self) -> bool:
        """Whether tokens such as `<0x0D>` stand for one byte."""
        of_model = bool(getattr(self._tokenizer.model, "byte_fallback", False))
        return of_model or any(step["type"] == "ByteFallback" for step in self._steps)

    @cached_property
    def _spaces(self) -> list[str]:
        """How the vocabulary writes a space: the `▁` of SentencePiece, in most."""
        metaspaces = [step["replacement"] for step in self._steps if step["type"] == "Metaspace"]
        replaced = [
            step["pattern"]["String"]
            for step in self._steps
            if step["type"] == "Replace" and step["content"] == " " and "String" in step["pattern"]
        ]
        return metaspaces + replaced

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of the token; empty for an id that is not in the vocabulary."""
        if (added := self._added.get(token_id)) is not None:
            return added.encode()
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return b""
        if self._is_byte_level:
            return bytes(_BYTES[char] for char in piece if char in _BYTES)
        if self._has_byte_tokens and (byte := _BYTE_TOKEN.fullmatch(piece)):
            return bytes([int(byte[1], 16)])
        for space in self._spaces:
            piece = piece.replace(space, " ")
        return piece.encode()

    def text_of(self, token_id: int) -> str:
        """The text of the token; incomplete characters become U+FFFD."""
        return self.bytes_of(token_id).decode("utf-8", "replace")
