"""Which model a process serves: the one of its command line, or the first that POST /model brings."""

import asyncio

from slipway_api.runtime_api import ModelInfo, ModelSpec
from slipway_runtime.server.errors import ApiError
from slipway_runtime.server.loaded import Identity
from slipway_runtime.server.replica import Replica
from slipway_runtime.settings import RuntimeSettings


class ModelChoice:
    """Takes the first model that is asked for, and no other one until the process ends."""

    def __init__(self, settings: RuntimeSettings, replica: Replica) -> None:
        """Needs a running event loop."""
        self._settings = settings
        self._replica = replica
        self._chosen: asyncio.Future[RuntimeSettings] = asyncio.get_running_loop().create_future()
        if settings.model_uri:
            self._take(settings)

    async def chosen(self) -> RuntimeSettings:
        """The settings with the model, as soon as there is one."""
        return await asyncio.shield(self._chosen)

    def choose(self, spec: ModelSpec) -> None:
        """Serve this model. The one that is here is no change; what a body leaves out agrees with it.

        Raises ApiError: 400 for what no replica can serve, 409 where another model is here.
        """
        try:
            wanted = self._settings.with_model(spec)
        except ValueError as error:
            raise ApiError(400, str(error)) from None
        if not self._settings.model_uri:
            self._take(wanted)
            return
        same_as = {"uri": "model_uri", "served_name": "model_name"}  # the setting that says the same
        differing = sorted(
            name
            for name in spec.model_fields_set
            if getattr(wanted, same_as.get(name, name)) != getattr(self._settings, same_as.get(name, name))
        )
        if differing:
            raise ApiError(409, f"another model is here until the process ends: it differs in {', '.join(differing)}")

    def info(self) -> ModelInfo:
        """Which model is here, and whether it answers."""
        identity = self._replica.identity
        return ModelInfo(
            uri=identity.uri,
            served_name=identity.model,
            revision=identity.revision,
            loaded=self._replica.loaded is not None,
        )

    def _take(self, settings: RuntimeSettings) -> None:
        self._settings = settings
        self._replica.name_model(
            Identity(
                model=settings.model_name,
                revision=settings.revision,
                namespace=settings.namespace,
                uri=settings.model_uri,
            )
        )
        self._chosen.set_result(settings)
