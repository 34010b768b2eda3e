"""Builds the pod of a WarmPool: the pod that a service of the same shape would get, but it waits for a claim.

At level Booted it has no model; at the others it loads one, and answers no request before the claim. It is made by the
same function as the pods of services. Different is what a claim sets later: at level Booted the model and its
parameters, at any level the name and the serving tokens; they come with POST /model. And what no claim can set: the
grace period is the longest that a service may ask for, and the startup probe waits for a claim without end, so the
operator replaces a claimed pod that does not become ready in time.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from slipway_api import names
from slipway_api.warm_pool import WarmLevel, WarmPool
from slipway_operator.core.installation import NodeCache, PlacementDefaults, PodUser, TraceDefaults
from slipway_operator.core.service.replicas.access import PortAccess
from slipway_operator.core.service.replicas.pod import arguments, build_pod
from slipway_operator.core.service.replicas.tls import secured
from slipway_operator.core.service.rollout.revision import Revision
from slipway_operator.core.warm_pool.shape import Shape, write_shape
from slipway_operator.core.warm_pool.stand_in import stand_in_service

_DIGITS: Final = 8
LONGEST_GRACE_SECONDS: Final = 3630  # the longest spec.drain.timeoutSeconds, and 30
NEVER: Final = 2**31 - 1  # failures of the startup probe until the kubelet restarts the container: 68 years


def pool_pod_name(pool: str, number: int) -> str:
    """`<pool>-warm-<number>`."""
    return f"{pool}-warm-{number}"


def build_pool_pod(
    pool: WarmPool,
    number: int,
    shape: Shape,
    *,
    image: str,
    access: PortAccess,
    node_cache: NodeCache | None = None,
    user: PodUser | None,
    placement: PlacementDefaults,
    tracing: TraceDefaults | None = None,
) -> dict[str, Any]:
    """The pod as it is sent to the API server."""
    spec, name = pool.spec, pool.metadata.name
    stand_in, revision = stand_in_service(pool), Revision("", image)
    # Without the boot list of adapters: a service of the pool's name would have one of the same name.
    bare = stand_in.model_copy(
        update={
            "spec": stand_in.spec.model_copy(
                update={"runtime": stand_in.spec.runtime.model_copy(update={"lora": None})}
            )
        }
    )
    plain = replace(access, tls=False)  # TLS comes last: the command line is replaced below
    pod = build_pod(
        bare,
        revision,
        slot=0,
        attempt=0,
        access=plain,
        node_cache=node_cache,
        user=user,
        placement=placement,
        tracing=tracing,
    )
    (server,) = pod["spec"]["containers"]
    if spec.level is WarmLevel.BOOTED:
        server["args"] = ["serve", "--port", str(names.SERVING_PORT), "--admin-port", str(names.ADMIN_PORT)]
    else:
        server["args"] = [*arguments(stand_in, revision), "--standby", spec.level.value.lower()]
    server["startupProbe"] = server["startupProbe"] | {"failureThreshold": NEVER}
    pod["spec"]["terminationGracePeriodSeconds"] = LONGEST_GRACE_SECONDS
    spread = pod["spec"]["topologySpreadConstraints"][0]
    spread["labelSelector"] = {"matchLabels": {names.LABEL_POOL: name}}
    if access.tls:
        pod = secured(pod, is_ours=True)
    metadata = waiting_metadata(pool)
    pod["metadata"] = {
        "name": pool_pod_name(name, number),
        "namespace": pool.metadata.namespace,
        "labels": metadata["labels"],
        "annotations": {
            **metadata["annotations"],
            names.ANNOTATION_WARM_SHAPE: write_shape(shape),
            names.ANNOTATION_WARM_TEMPLATE: digest_template(pod, access),
            **access.annotations(),
        },
        "ownerReferences": [pool_owner(pool)],
    }
    return pod


def digest_template(pod: Mapping[str, Any], access: PortAccess) -> str:
    """A digest of the pod's spec without what differs from pod to pod: the digests of its admin tokens."""
    tokens = ",".join(access.admin_digests)
    text = json.dumps(pod["spec"], sort_keys=True)
    return hashlib.sha256((text.replace(tokens, "") if tokens else text).encode()).hexdigest()[:_DIGITS]


def waiting_metadata(pool: WarmPool) -> dict[str, dict[str, str]]:
    """Labels and annotations of every pod that waits, also of one that has returned from a service."""
    template, name = pool.spec.template.metadata, pool.metadata.name
    return {
        "labels": {
            **template.labels,
            names.LABEL_MANAGED_BY: names.MANAGED_BY,
            "app.kubernetes.io/name": name,
            names.LABEL_POOL: name,
            names.LABEL_STATE: names.STATE_WARM,
        },
        "annotations": dict(template.annotations),
    }


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
