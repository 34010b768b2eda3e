"""The small endpoints of the serving port: which model is here, how text and tokens relate, and is anybody alive."""

from typing import Any

from fastapi import APIRouter, Request
from prometheus_client.exposition import choose_encoder
from starlette.responses import JSONResponse, Response

import slipway_api
from slipway_runtime.server.errors import ApiError, unknown_model
from slipway_runtime.server.loaded import LoadedModel
from slipway_runtime.server.openai_types import DetokenizeRequest, TokenizeRequest
from slipway_runtime.server.replica import Replica

router = APIRouter()
probes = APIRouter()  # on both ports


@router.get("/v1/models")
async def list_models(http: Request) -> dict[str, Any]:
    """The one model that is served."""
    replica: Replica = http.app.state.replica
    return {"object": "list", "data": [_card(replica, replica.model_for(""))]}


@router.get("/v1/models/{name:path}")
async def get_model(name: str, http: Request) -> dict[str, Any]:
    """One model by its id."""
    replica: Replica = http.app.state.replica
    if not name:
        raise unknown_model(name)
    return _card(replica, replica.model_for(name))


def _card(replica: Replica, model: LoadedModel) -> dict[str, Any]:
    """A model as OpenAI describes one, with what decides its answers: revision, tokenizer, sampling defaults."""
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
    }


def _or(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, http: Request) -> dict[str, Any]:
    """The ids that a completion of this text, or a chat of these messages, would begin with."""
    replica: Replica = http.app.state.replica
    model = replica.model_for(body.model)
    if body.messages:
        ids = await model.prompts.chat(
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            template_arguments=body.chat_template_kwargs,
            add_special_tokens=bool(body.add_special_tokens),
        )
    else:
        ids = await model.prompts.text(body.prompt or "", add_special_tokens=body.add_special_tokens is not False)
    tokenizer = model.prompts.files.tokenizer
    return {
        "count": len(ids),
        "max_model_len": model.engine.facts.max_model_len,
        "tokens": ids,
        "token_strs": [tokenizer.id_to_token(i) for i in ids] if body.return_token_strs else None,
    }


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, http: Request) -> dict[str, Any]:
    """The text of ids."""
    replica: Replica = http.app.state.replica
    model = replica.model_for(body.model)
    if body.tokens and max(body.tokens) >= model.engine.facts.vocab_size:
        raise ApiError(400, f"tokens holds {max(body.tokens)}, beyond the vocabulary", param="tokens")
    return {"prompt": await model.prompts.decode(body.tokens)}


@router.get("/version")
async def version() -> dict[str, str]:
    """The version of Slipway."""
    return {"version": slipway_api.__version__}


@probes.get("/health")
async def health(http: Request) -> Response:
    """200 unless only a restart can help."""
    replica: Replica = http.app.state.replica
    body = replica.health()
    return Response(body.wire(), status_code=200 if body.healthy else 503, media_type="application/json")


@probes.get("/metrics")
async def metrics(http: Request) -> Response:
    """All metrics, in the format that the scraper prefers."""
    replica: Replica = http.app.state.replica
    if replica.loaded is None:
        return Response(b"", media_type="text/plain; version=0.0.4; charset=utf-8")
    encode, content_type = choose_encoder(http.headers.get("accept", ""))
    return Response(encode(replica.loaded.metrics.registry), headers={"content-type": content_type})


@router.get("/v1/embeddings", include_in_schema=False)
@router.post("/v1/embeddings", include_in_schema=False)
async def embeddings() -> JSONResponse:
    """Refused clearly: embedding inside the decode engine would stall its streams."""
    raise ApiError(400, "this server generates text; embeddings are served by another kind of service")
