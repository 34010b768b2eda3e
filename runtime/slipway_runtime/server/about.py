"""The endpoints /v1/models, /tokenize, /detokenize, /load, /version, /health and /metrics of the serving port."""

from os.path import normpath
from typing import Any

from fastapi import APIRouter, Request
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.responses import Response

import slipway_api
from slipway_api.anthropic_models import anthropic_model, anthropic_model_list, asks_as_anthropic
from slipway_runtime.messages import AdapterState
from slipway_runtime.server.adapter_registry import NamedAdapter
from slipway_runtime.server.bodies import read_body
from slipway_runtime.server.errors import ApiError, unknown_model
from slipway_runtime.server.openai_types import DetokenizeRequest, TokenizeRequest
from slipway_runtime.server.replica import LoadedModel, Replica
from slipway_runtime.server.request_context import served_by
from slipway_runtime.storage.address import shown

router = APIRouter()
probes = APIRouter()  # on both ports


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
        raise unknown_model(name)
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


@router.post("/tokenize")
async def tokenize(http: Request) -> dict[str, Any]:
    """The prompt's token ids for a completion of this text, or a chat of these messages."""
    replica: Replica = http.app.state.replica
    body = await read_body(http, TokenizeRequest)
    model = served_by(replica, body.model).model
    if body.messages:
        prompt = await model.prompts.chat(
            body.messages,
            tools=body.tools or (),
            add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
            continue_final_message=body.continue_final_message,
            template_arguments=body.chat_template_kwargs,
            add_special_tokens=bool(body.add_special_tokens),
        )
    else:
        prompt = await model.prompts.text(body.prompt or "", add_special_tokens=body.add_special_tokens is not False)
    tokenizer, ids = model.prompts.files.tokenizer, prompt.token_ids
    return {
        "count": len(ids),
        "max_model_len": model.engine.facts.max_model_len,
        "tokens": ids,
        "token_strs": [tokenizer.id_to_token(i) for i in ids] if body.return_token_strs else None,
    }


@router.post("/detokenize")
async def detokenize(http: Request) -> dict[str, Any]:
    """The text of token ids."""
    replica: Replica = http.app.state.replica
    body = await read_body(http, DetokenizeRequest)
    model = served_by(replica, body.model).model
    vocabulary = model.engine.facts.vocab_size
    if body.tokens and max(body.tokens) >= vocabulary:
        raise ApiError(400, f"tokens holds an id outside the vocabulary of {vocabulary}", param="tokens")
    return {"prompt": await model.prompts.decode(body.tokens)}


@router.head("/load", include_in_schema=False)
@router.get("/load")
async def load(http: Request) -> dict[str, int]:
    """The number of running and waiting requests, under vLLM's name `server_load`."""
    replica: Replica = http.app.state.replica
    stats = replica.signals()
    return {"server_load": stats.running + stats.waiting}


@router.head("/version", include_in_schema=False)
@router.get("/version")
async def version() -> dict[str, str]:
    """The version of Slipway."""
    return {"version": slipway_api.__version__}


@probes.head("/health", include_in_schema=False)
@probes.get("/health")
async def health(http: Request) -> Response:
    """200, or 503 where only a restart can help."""
    replica: Replica = http.app.state.replica
    body = replica.health()
    return Response(body.wire(), status_code=200 if body.healthy else 503, media_type="application/json")


@probes.head("/metrics", include_in_schema=False)
@probes.get("/metrics")
async def metrics(http: Request) -> Response:
    """All metrics in the text format 0.0.4, whatever the scraper prefers.

    In OpenMetrics, which every Prometheus asks for first, `prometheus_client` writes the colon of vLLM's names as `_`.
    """
    replica: Replica = http.app.state.replica
    page = b"" if replica.loaded is None else generate_latest(replica.loaded.metrics.registry)
    return Response(page, headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})


# Endpoints of vLLM for other kinds of models, or for debugging.
_OTHER_SERVICES = {
    "/v1/rerank": "reranking is",
    "/v2/rerank": "reranking is",
    "/rerank": "reranking is",
    "/v1/score": "scoring pairs is",
    "/score": "scoring pairs is",
    "/classify": "classification is",
    "/pooling": "raw pooling is",
    "/v1/audio/transcriptions": "transcription is",
    "/v1/audio/translations": "translation of speech is",
    "/v1/audio/speech": "speech is",
    "/v1/images/generations": "image generation is",
    "/v1/moderations": "moderation is",
    "/invocations": "SageMaker's interface is",
    "/ping": "SageMaker's interface is",
}


async def _another_service(http: Request) -> Response:
    """Answer 404 with a sentence that names the missing service."""
    raise ApiError(404, f"{_OTHER_SERVICES[http.url.path]} not served here")


for _path in _OTHER_SERVICES:
    router.add_api_route(_path, _another_service, methods=["GET", "POST"], include_in_schema=False)
