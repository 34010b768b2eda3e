"""The service that the pods of a pool would have: from it their manifest and their shape are made.

At level Booted its model stands for none. At the levels Sleeping and Loaded it has the model and the parameters of the
pool, without adapters: those of the service that claims a pod are loaded then.
"""

from typing import Any, Final

from slipway_api.inference_service import InferenceService
from slipway_api.warm_pool import WarmLevel, WarmPool

NO_MODEL: Final = "file:///"  # no argument of a pod names it


def stand_in_service(pool: WarmPool) -> InferenceService:
    """A service of the pool's resources, template and model."""
    spec = pool.spec
    model: dict[str, Any] = {"uri": NO_MODEL}
    runtime: dict[str, Any] = {"tensorParallelSize": max(1, spec.resources.gpu.count)}
    if spec.level is not WarmLevel.BOOTED:
        model = spec.models[0].to_json()
        runtime = (spec.runtime.to_json() if spec.runtime is not None else {}) | (
            runtime if spec.resources.gpu.count else {}
        )
    return InferenceService.model_validate(
        {
            "metadata": {"name": pool.metadata.name, "namespace": pool.metadata.namespace},
            "spec": {
                "model": model,
                "runtime": runtime,
                "resources": spec.resources.to_json(),
                "template": spec.template.to_json(),
            },
        }
    )
