"""vLLM's endpoints to load and unload LoRA adapters on the serving port, for use without an operator; off by default.

Messages and status codes are vLLM's: a name that is taken is a 400 of type InvalidUserInput, unless `load_inplace`
replaces the adapter of that name; the base model's name is always refused. Beyond vLLM: names and paths are checked,
and running requests finish on the old content after a `load_inplace`.
"""

from typing import Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import PlainTextResponse, Response

from slipway_runtime.messages import AdapterState
from slipway_runtime.server.adapter_registry import AdapterRegistry
from slipway_runtime.server.bodies import RequestBody, read_body
from slipway_runtime.server.errors import ApiError, unknown_adapter
from slipway_runtime.server.replica import Replica

router = APIRouter()


class LoadLora(RequestBody):
    """POST /v1/load_lora_adapter."""

    lora_name: str = Field(min_length=1)
    lora_path: str = Field(min_length=1, max_length=4096)
    load_inplace: bool = False
    is_3d_lora_weight: bool = False
    base_model_name: str | None = None  # not used: the adapted modules are read from its tensors


class UnloadLora(RequestBody):
    """POST /v1/unload_lora_adapter."""

    lora_name: str = Field(min_length=1)
    lora_int_id: Any = None  # vLLM's internal number; not used


@router.post("/v1/load_lora_adapter")
async def load_lora_adapter(http: Request) -> Response:
    """Load an adapter under a name."""
    body = await read_body(http, LoadLora)
    if body.is_3d_lora_weight:
        raise ApiError(400, "is_3d_lora_weight is not supported by this server", param="is_3d_lora_weight")
    registry = registry_of(http)
    replica: Replica = http.app.state.replica
    if replica.identity.answers_to(body.lora_name):
        raise _taken(f"The name '{body.lora_name}' is the base model's; an adapter needs another.")
    known = registry.find(body.lora_name)
    if known is not None and known.state is not AdapterState.FAILED and not body.load_inplace:
        raise _taken(
            f"The lora adapter '{body.lora_name}' has already been loaded. If you want to load the adapter in place,"
            " set 'load_inplace' to True."
        )
    await registry.load(body.lora_name, body.lora_path, from_client=True)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter")
async def unload_lora_adapter(http: Request) -> Response:
    """Unload the adapter of a name; its running requests finish first."""
    body = await read_body(http, UnloadLora)
    registry = registry_of(http)
    if registry.find(body.lora_name) is None:
        raise unknown_adapter(body.lora_name)
    await registry.unload(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _taken(sentence: str) -> ApiError:
    return ApiError(400, sentence, param="lora_name", kind="InvalidUserInput")


def registry_of(http: Request) -> AdapterRegistry:
    """The adapter registry of the loaded model; raises ApiError 503 while no model is loaded."""
    replica: Replica = http.app.state.replica
    return replica.model_for("").adapters
