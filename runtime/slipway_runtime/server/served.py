"""Resolves the model name of a request to the base model or an adapter."""

from dataclasses import dataclass

from starlette.requests import Request as HttpRequest

from slipway_runtime.messages import AdapterState
from slipway_runtime.server.errors import unavailable
from slipway_runtime.server.loaded import LoadedModel
from slipway_runtime.server.replica import Replica


@dataclass(frozen=True)
class Served:
    """The model that serves a request, alone or with an adapter."""

    model: LoadedModel
    name: str  # the `model` field of the response
    digest: str = ""  # of the adapter; empty: the base model alone

    def fingerprint(self, replica: Replica) -> str:
        """The `system_fingerprint` of its answers."""
        return (
            f"{replica.fingerprint}/{self.digest.removeprefix('sha256:')[:12]}" if self.digest else replica.fingerprint
        )


def served_by(replica: Replica, name: str, http: HttpRequest | None = None) -> Served:
    """The base model or adapter named `name`. Raises ApiError where it cannot be served."""
    registry = replica.loaded.adapters if replica.loaded is not None else None
    adapter = None if replica.identity.answers_to(name) or registry is None else registry.find(name)
    if adapter is None:
        return Served(replica.model_for(name), replica.identity.model)
    model = replica.model_for("")
    if adapter.state is AdapterState.LOADING:
        raise unavailable(f"the adapter {adapter.name} is loading")
    if adapter.state is AdapterState.FAILED:
        raise unavailable(f"the adapter {adapter.name} could not be loaded: {adapter.error}", retry_after_seconds=None)
    if http is not None:
        http.scope["state"]["adapter"] = adapter.name
    return Served(model, adapter.name, adapter.digest)
