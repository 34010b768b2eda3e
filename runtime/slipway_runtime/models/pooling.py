"""Pooling configuration of embedding models: the requested pooling, or that of the checkpoint.

`sentence-transformers` writes it to `1_Pooling/config.json`. A checkpoint without that file is pooled by its last
token, as decoder-based embedding models are trained. The sizes to which an embedding may be cut are in `config.json`,
under vLLM's names: `is_matryoshka`, `matryoshka_dimensions`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from slipway_runtime.models.config_values import ModelRefusedError, read_json

LAST, MEAN = "last", "mean"
SCORE = "score"  # a reranker: the pooled state becomes one number (`score_head`)
POOLING_FILE: Final = "1_Pooling/config.json"
DOWNLOADED_AS: Final = "1_Pooling.config.json"  # downloaded models are stored without folders
# The boolean keys of older files, and the values of `pooling_mode` in newer files.
_MODES: Final = {"pooling_mode_lasttoken": LAST, "pooling_mode_mean_tokens": MEAN, "lasttoken": LAST, "mean": MEAN}


@dataclass(frozen=True, kw_only=True)
class EmbeddingConfig:
    """Pooling and sizes of a model's embeddings."""

    pooling: str  # LAST or MEAN
    size: int
    is_matryoshka: bool = False  # may be cut to fewer dimensions
    dimensions: tuple[int, ...] = ()  # to these only; empty: to any


def read_embedding_config(model_path: Path, asked: str, size: int) -> EmbeddingConfig:
    """asked: last, mean, or auto (the checkpoint's pooling). Raises ModelRefusedError for another kind of pooling."""
    raw = read_json(model_path / "config.json")
    dimensions = raw.get("matryoshka_dimensions") or []
    if not (isinstance(dimensions, list) and all(isinstance(one, int) and 0 < one <= size for one in dimensions)):
        raise ModelRefusedError(f"config.json: matryoshka_dimensions is a list of sizes up to {size}")
    return EmbeddingConfig(
        pooling=_pooling_of(model_path) if asked == "auto" else asked,
        size=size,
        is_matryoshka=bool(raw.get("is_matryoshka") or dimensions),
        dimensions=tuple(sorted(dimensions)),
    )


def _pooling_of(model_path: Path) -> str:
    found = (path for path in (model_path / POOLING_FILE, model_path / DOWNLOADED_AS) if path.is_file())
    path = next(found, None)
    if path is None:
        return LAST
    said: dict[str, Any] = read_json(path)
    modes = [key for key, value in said.items() if key.startswith("pooling_mode_") and value is True]
    if isinstance(said.get("pooling_mode"), str):
        modes = [said["pooling_mode"]]
    if len(modes) != 1 or modes[0] not in _MODES:
        named = ", ".join(modes) or "no mode"
        raise ModelRefusedError(f"{POOLING_FILE} asks for {named}: this engine pools by the last token or the mean")
    return _MODES[modes[0]]
