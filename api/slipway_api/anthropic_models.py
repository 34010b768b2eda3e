"""The list of models in the format of Anthropic's API, for clients that ask as Anthropic's do."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from slipway_api.anthropic_errors import is_anthropic

MODELS_PATH: Final = "/v1/models"
VERSION_HEADER: Final = "anthropic-version"  # Anthropic's clients send it with every request; OpenAI's never


def asks_as_anthropic(headers: Mapping[str, str]) -> bool:
    """Whether a request to a path that both APIs have comes from a client of Anthropic's."""
    return VERSION_HEADER in headers


def speaks_anthropic(path: str, headers: Mapping[str, str]) -> bool:
    """Whether an answer has the format of Anthropic's API: by its path, or by the headers if both have the path."""
    return is_anthropic(path) or (f"{path}/".startswith(f"{MODELS_PATH}/") and asks_as_anthropic(headers))


def anthropic_model(model: Mapping[str, Any]) -> dict[str, Any]:
    """The model of OpenAI's list with the fields that Anthropic's clients read beside its own."""
    created = datetime.fromtimestamp(model["created"], UTC).isoformat().replace("+00:00", "Z")
    return {**model, "type": "model", "display_name": model["id"], "created_at": created}


def anthropic_model_list(models: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All models as one page."""
    ids = [model["id"] for model in models] or [None]
    data = [anthropic_model(model) for model in models]
    return {"data": data, "has_more": False, "first_id": ids[0], "last_id": ids[-1]}
