"""GET /v1/models and /v1/models/{name}: the base model and its adapters, in the format of OpenAI or of Anthropic."""

from os.path import normpath
from typing import Any

from fastapi import APIRouter, Request

from slipway_api.anthropic_models import anthropic_model, anthropic_model_list, asks_as_anthropic
from slipway_runtime.messages import AdapterState
from slipway_runtime.server.adapter_registry import NamedAdapter
from slipway_runtime.server.replica import LoadedModel, Replica
from slipway_runtime.server.request_context import served_by
from slipway_runtime.storage.address import shown

router = APIRouter()


@router.head("/v1/models", include_in_schema=False)
@router.get("/v1/models")
async def list_models(http: Request) -> dict[str, Any]:
    """List the base model and the loaded adapters, as the API does whose client asks."""
    replica: Replica = http.app.state.replica
    model = replica.model_for("")
    cards = [_card(replica, model)]
    cards += [_adapter_card(replica, model, a) for a in model.adapters.all() if a.state is AdapterState.HOST]
    return anthropic_model_list(cards) if asks_as_anthropic(http.headers) else {"object": "list", "data": cards}


@router.head("/v1/models/{name:path}", include_in_schema=False)
@router.get("/v1/models/{name:path}")
async def get_model(name: str, http: Request) -> dict[str, Any]:
    """One model by its id."""
    replica: Replica = http.app.state.replica
    if not name:
        return await list_models(http)  # a slash after /v1/models
    served = served_by(replica, name)
    adapter = served.model.adapters.find(served.name) if served.digest else None
    card = _card(replica, served.model) if adapter is None else _adapter_card(replica, served.model, adapter)
    return anthropic_model(card) if asks_as_anthropic(http.headers) else card


def _card(replica: Replica, model: LoadedModel) -> dict[str, Any]:
    """OpenAI's model object, extended by revision, tokenizer and sampling defaults."""
    defaults = model.defaults
    return {
        "id": replica.identity.model,
        "object": "model",
        "created": model.created,
        "owned_by": "slipway",
        "root": replica.identity.uri,
        "parent": None,
        "max_model_len": model.engine.facts.max_model_len,
        "revision": replica.identity.revision or None,
        "tokenizer_sha256": model.tokenizer_sha256,
        "sampling_defaults": {
            "temperature": _or(defaults.temperature, 1.0),
            "top_p": _or(defaults.top_p, 1.0),
            "top_k": _or(defaults.top_k, 0),
            "min_p": _or(defaults.min_p, 0.0),
            "repetition_penalty": _or(defaults.repetition_penalty, 1.0),
            "max_tokens": defaults.max_tokens,
        },
        "permission": [],
    }


def _adapter_card(replica: Replica, model: LoadedModel, adapter: NamedAdapter) -> dict[str, Any]:
    """OpenAI's model object of an adapter, with its address and its base model."""
    root = shown(adapter.uri).removeprefix("file://")
    root = normpath(root) if root.startswith("/") else root
    own = {"id": adapter.name, "root": root, "parent": replica.identity.model, "digest": adapter.digest}
    return _card(replica, model) | own


def _or(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value
