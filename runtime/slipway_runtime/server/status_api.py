"""GET /load, /version, /health, /ready and, on the admin port, /metrics.

Services of vLLM that are not here are a 404 with a sentence.
"""

from fastapi import APIRouter, Request
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.responses import Response

import slipway_api
from slipway_runtime.server.errors import ApiError
from slipway_runtime.server.replica import Replica

router = APIRouter()
probes = APIRouter()  # on both ports
exposition = APIRouter()  # on the admin port: metrics name tenants, models and their volumes
no_exposition = APIRouter()  # on the serving port


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


@router.head("/ready", include_in_schema=False)
@router.get("/ready")
async def ready(http: Request) -> Response:
    """200 if the replica takes new requests, else 503 with the reason. The admin port has the one that can wait."""
    replica: Replica = http.app.state.replica
    body = replica.ready()
    return Response(body.wire(), status_code=200 if body.ready else 503, media_type="application/json")


@probes.head("/health", include_in_schema=False)
@probes.get("/health")
async def health(http: Request) -> Response:
    """200, or 503 where only a restart can help."""
    replica: Replica = http.app.state.replica
    body = replica.health()
    return Response(body.wire(), status_code=200 if body.healthy else 503, media_type="application/json")


@exposition.head("/metrics", include_in_schema=False)
@exposition.get("/metrics")
async def metrics(http: Request) -> Response:
    """All metrics in the text format 0.0.4, whatever the scraper prefers.

    In OpenMetrics, which every Prometheus asks for first, `prometheus_client` writes the colon of vLLM's names as `_`.
    """
    replica: Replica = http.app.state.replica
    page = b"" if replica.loaded is None else generate_latest(replica.loaded.metrics.registry)
    return Response(page, headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})


@no_exposition.get("/metrics", include_in_schema=False)
async def metrics_elsewhere() -> Response:
    """404 with the way to the metrics, for scrapers that expect them where vLLM has them."""
    raise ApiError(404, "/metrics is on the admin port; --metrics-on-serving-port serves it here too")


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
