"""vLLM's two endpoints on the serving port, for those who load adapters without an operator; off unless asked for.

They answer in vLLM's words and with its status codes. Stronger here: names and paths are checked, the same content
under the same name is a success, and `load_inplace` never mixes: running requests finish on the old content.
"""

from typing import Any

from fastapi import APIRouter, Request
from pydantic import ConfigDict, Field
from starlette.responses import PlainTextResponse, Response

from slipway_runtime.server.adapters import AdapterRegistry
from slipway_runtime.server.bodies import read_body
from slipway_runtime.server.errors import ApiError
from slipway_runtime.server.replica import Replica
from slipway_runtime.server.wire import Wire

router = APIRouter()


class LoadLora(Wire):
    """POST /v1/load_lora_adapter."""

    lora_name: str = Field(min_length=1)
    lora_path: str = Field(min_length=1, max_length=4096)
    load_inplace: bool = False
    is_3d_lora_weight: bool = False
    base_model_name: str | None = None  # what the adapter is for is read from its tensors


class UnloadLora(Wire):
    """POST /v1/unload_lora_adapter."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    lora_name: str = Field(min_length=1)
    lora_int_id: Any = None  # vLLM's own number, which nothing here has


@router.post("/v1/load_lora_adapter")
async def load_lora_adapter(http: Request) -> Response:
    """Make a name mean an adapter."""
    body = await read_body(http, LoadLora)
    if body.is_3d_lora_weight:
        raise ApiError(400, "is_3d_lora_weight is not supported by this server", param="is_3d_lora_weight")
    registry = registry_of(http)
    try:
        await registry.load(body.lora_name, body.lora_path, replaces=body.load_inplace, from_client=True)
    except ApiError as error:
        if error.status == 409:
            raise ApiError(400, error.message, param="lora_name") from None
        raise
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter")
async def unload_lora_adapter(http: Request) -> Response:
    """Forget a name; requests that run finish first."""
    body = await read_body(http, UnloadLora)
    await registry_of(http).unload(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def registry_of(http: Request) -> AdapterRegistry:
    """The names of the model that is loaded; raises ApiError 503 while none is."""
    replica: Replica = http.app.state.replica
    return replica.model_for("").adapters
