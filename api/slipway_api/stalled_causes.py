"""Why an InferenceService is Stalled: each reason with its meaning, who can help, and the remedy.

The gateway quotes them to clients of a service that cannot start.
"""

from typing import Final

from slipway_api.causes import Cause, Helper
from slipway_api.conditions import Reason

INTERNAL_ERROR: Final = Cause(
    "The operator cannot plan the object, by a fault of its own; its pods are left as they are.",
    Helper.MAINTAINERS,
    "Report the error of the message, with the operator's log.",
)

# Stalled=True with one of these makes Ready=False with the same reason and message while no replica serves.
STALLED_CAUSES: Final = {
    Reason.INVALID_SPEC: Cause(
        "The spec breaks a rule, or the API server or the runtime refuses a value of it.",
        Helper.AUTHOR,
        "Correct the field that the message names.",
    ),
    Reason.DOES_NOT_FIT: Cause(
        "Weights, reserve and one request exceed the memory; the message has the arithmetic.",
        Helper.AUTHOR,
        "Use more or larger GPUs, a quantized model, or a lower spec.runtime.maxModelLen.",
    ),
    Reason.CACHE_NOT_PERMITTED: Cause(
        "model.cache.policy Node, but the chart names no folder, or PodSecurity forbids it.",
        Helper.INSTALLATION,
        "Set modelCache.nodePath of the chart and allow hostPath in the namespace, or set another cache policy.",
    ),
    Reason.CERTIFICATE_UNAVAILABLE: Cause(
        "The operator cannot make or renew the TLS certificate of the namespace. Replicas serve until theirs ends.",
        Helper.INSTALLATION,
        "Grant or restore what the message names; the operator tries again every 15 seconds.",
    ),
    Reason.ENGINE_WITHOUT_TLS: Cause(
        "internalTLS.enabled of the chart is true, and the Engine of the service has no flags for a certificate.",
        Helper.INSTALLATION,
        "Add spec.tls to the Engine, use the engine slipway, or serve it by a release without internalTLS.",
    ),
    Reason.IMAGE_PULL_FAILED: Cause(
        "The kubelet cannot pull the runtime image.",
        Helper.AUTHOR,
        "Check spec.runtime.image and imagePullSecrets.",
    ),
    Reason.MODEL_NOT_FOUND: Cause(
        "There is nothing at spec.model.uri, or its claim does not exist.",
        Helper.AUTHOR,
        "Correct spec.model.uri, or create the claim that it names.",
    ),
    Reason.CREDENTIALS_INVALID: Cause(
        "The credentials' Secret or its key is missing, or the source refuses them.",
        Helper.AUTHOR,
        "Create the Secret of spec.model.credentialsSecretRef with a key that the source accepts.",
    ),
    Reason.POOL_NOT_FOUND: Cause(
        "spec.warmPool.policy is Require, and no WarmPool of that name is in the namespace.",
        Helper.AUTHOR,
        "Create the WarmPool, correct spec.warmPool.name, or set spec.warmPool.policy to Prefer.",
    ),
    Reason.PROGRESS_DEADLINE_EXCEEDED: Cause(
        "A rollout or first start made no progress for progressDeadlineSeconds.",
        Helper.AUTHOR,
        "Remove the cause in the message, or set the spec back to the previous revision.",
    ),
    Reason.QUOTA_EXCEEDED: Cause(
        "A ResourceQuota forbids the pods.",
        Helper.QUOTA_OWNER,
        "Raise the quota, or lower spec.resources or the number of replicas.",
    ),
    Reason.REFUSED: Cause(
        "RBAC, an admission policy or a webhook forbids a write; an administrator of the cluster can help.",
        Helper.CLUSTER,
        "Grant the right, or change the policy or webhook that the message names.",
    ),
    Reason.HUB_UNREACHABLE: Cause(
        "The source of the model does not answer; the message has the host and the cause.",
        Helper.CLUSTER,
        "Check the network of the nodes, spec.model.network and spec.model.uri.",
    ),
    Reason.NO_SUITABLE_NODE: Cause(
        "No node has that number of GPUs, or this product, used or free; the message names both.",
        Helper.AUTHOR,
        "Request fewer GPUs or another product, or add such a node.",
    ),
    Reason.MOUNT_FAILED: Cause(
        "A Secret, ConfigMap or key that a volume names does not exist; the message has the kubelet's sentence.",
        Helper.AUTHOR,
        "Create the object or key that the message names, or correct the volume in the spec.",
    ),
    Reason.NAME_CONFLICT: Cause(
        "Another object has the served name, or another owner has the name of a child.",
        Helper.OTHER_OWNER,
        "Rename one of the two objects.",
    ),
    Reason.CRASH_LOOPING: Cause(
        "Replicas end again and again; it holds until one is ready or the spec changes.",
        Helper.AUTHOR,
        "Read the end of the logs of the replica with kubectl logs --previous.",
    ),
    Reason.ENGINE_NOT_FOUND: Cause(
        "The Engine that spec.runtime.engine names does not exist, or cannot be read; replicas stay.",
        Helper.AUTHOR,
        "Correct spec.runtime.engine, or create or correct the Engine; the message names the existing ones.",
    ),
    Reason.TEMPLATE_NOT_FOUND: Cause(
        "A ServiceTemplate of spec.baseRefs does not exist, or cannot be read; what was inherited stays in force.",
        Helper.AUTHOR,
        "Correct spec.baseRefs, or create or correct the ServiceTemplate; the message names the existing ones.",
    ),
    Reason.REVISION_MISSING: Cause(
        "The ControllerRevision of a revision is missing or unreadable: the rollout is held.",
        Helper.AUTHOR,
        "Restore the record, set the spec back, or accept the new revision with slipway.dev/promote.",
    ),
}
