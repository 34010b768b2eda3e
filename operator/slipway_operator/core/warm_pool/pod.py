"""Builds the pod of a WarmPool: the pod that a service of the same shape would get, but without a model.

It is made by the same function as the pods of services. Different is what a claim sets later: the model, its parameters
and the serving tokens are no arguments, they come with POST /model. And what no claim can set: the grace period is the
longest that a service may ask for, and the startup probe waits for a model without end, so the operator replaces a
claimed pod that does not become ready in time.
"""

from typing import Any, Final

from slipway_api import names
from slipway_api.inference_service import InferenceService
from slipway_api.warm_pool import WarmPool
from slipway_operator.core.observed import NONROOT, PodUser
from slipway_operator.core.service.access import PortAccess
from slipway_operator.core.service.pod import build_pod
from slipway_operator.core.service.revision import Revision
from slipway_operator.core.warm_pool.shape import Shape, write_shape

LONGEST_GRACE_SECONDS: Final = 3630  # the longest spec.drain.timeoutSeconds, and 30
NEVER: Final = 2**31 - 1  # failures of the startup probe until the kubelet restarts the container: 68 years
NO_MODEL: Final = "file:///"  # stands in for the model of a service; no argument of the pod names it


def pool_pod_name(pool: str, number: int) -> str:
    """`<pool>-warm-<number>`."""
    return f"{pool}-warm-{number}"


def build_pool_pod(
    pool: WarmPool, number: int, shape: Shape, *, image: str, access: PortAccess, user: PodUser | None = NONROOT
) -> dict[str, Any]:
    """The pod as it is sent to the API server."""
    spec, name = pool.spec, pool.metadata.name
    stand_in = InferenceService.model_validate(
        {
            "metadata": {"name": name, "namespace": pool.metadata.namespace},
            "spec": {
                "model": {"uri": NO_MODEL},
                "runtime": {"tensorParallelSize": max(1, spec.resources.gpu.count)},
                "resources": spec.resources.to_json(),
                "template": spec.template.to_json(),
            },
        }
    )
    pod = build_pod(stand_in, Revision("", image), slot=0, attempt=0, access=access, user=user)
    pod["metadata"] = {
        "name": pool_pod_name(name, number),
        "namespace": pool.metadata.namespace,
        "labels": {
            **spec.template.metadata.labels,
            names.LABEL_MANAGED_BY: names.MANAGED_BY,
            "app.kubernetes.io/name": name,
            names.LABEL_POOL: name,
            names.LABEL_STATE: names.STATE_WARM,
        },
        "annotations": {
            **spec.template.metadata.annotations,
            names.ANNOTATION_WARM_SHAPE: write_shape(shape),
            **access.annotations(),
        },
        "ownerReferences": [pool_owner(pool)],
    }
    (server,) = pod["spec"]["containers"]
    server["args"] = ["serve", "--port", str(names.SERVING_PORT), "--admin-port", str(names.ADMIN_PORT)]
    server["startupProbe"] = server["startupProbe"] | {"failureThreshold": NEVER}
    pod["spec"]["terminationGracePeriodSeconds"] = LONGEST_GRACE_SECONDS
    spread = pod["spec"]["topologySpreadConstraints"][0]
    spread["labelSelector"] = {"matchLabels": {names.LABEL_POOL: name}}
    return pod


def pool_owner(pool: WarmPool) -> dict[str, Any]:
    """The owner reference of a pod that waits; a claim replaces it by the service's."""
    return {
        "apiVersion": pool.api_version,
        "kind": pool.kind,
        "name": pool.metadata.name,
        "uid": pool.metadata.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
