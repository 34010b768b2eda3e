"""Names that the parts of Slipway share: labels, annotations, ports, headers, paths, environment variables."""

from typing import Final

GROUP: Final = "slipway.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"

# Labels on pods. The operator sets them; the gateway sends requests by `state`.
LABEL_SERVICE: Final = f"{GROUP}/service"
LABEL_REVISION: Final = f"{GROUP}/revision"
LABEL_SLOT: Final = f"{GROUP}/slot"
LABEL_ATTEMPT: Final = f"{GROUP}/attempt"
LABEL_STATE: Final = f"{GROUP}/state"
LABEL_ROLE: Final = f"{GROUP}/role"
LABEL_POOL: Final = f"{GROUP}/pool"  # the WarmPool that made the pod; a claimed pod keeps it
LABEL_PRE_PULL: Final = f"{GROUP}/pre-pull"  # the service for which the pod brings image and model to a node
LABEL_MANAGED_BY: Final = "app.kubernetes.io/managed-by"
LABEL_APP_NAME: Final = "app.kubernetes.io/name"
LABEL_APP_INSTANCE: Final = "app.kubernetes.io/instance"
LABEL_APP_COMPONENT: Final = "app.kubernetes.io/component"
LABEL_APP_PART_OF: Final = "app.kubernetes.io/part-of"
LABEL_ENGINE_TYPE: Final = "llm-d.ai/engine-type"  # whose metrics and KV events a picker of llm-d reads
RECOMMENDED_LABELS: Final = frozenset({LABEL_APP_INSTANCE, LABEL_APP_COMPONENT, LABEL_APP_PART_OF, LABEL_ENGINE_TYPE})
COMPONENT_REPLICA: Final = "inference-server"
PART_OF: Final = "slipway"
MANAGED_BY: Final = "slipway"
MANAGED_SELECTOR: Final = f"{LABEL_MANAGED_BY}={MANAGED_BY}"

STATE_SERVING: Final = "serving"
STATE_DRAINING: Final = "draining"
STATE_WARM: Final = "warm"

FINALIZER: Final = f"{GROUP}/drain"
FIELD_MANAGER: Final = "slipway-operator"
FIELD_MANAGER_REPLICAS: Final = "slipway-operator-replicas"
FIELD_MANAGER_META: Final = "slipway-operator-meta"
FIELD_MANAGER_ENGINES: Final = "slipway-engines"
FIELD_MANAGER_ADAPTERS: Final = "slipway-operator-adapters"  # one manager a purpose: an apply drops what it leaves out

# Annotations on pods, written by the operator.
ANNOTATION_APPLIED: Final = f"{GROUP}/applied"  # digest of the manifest that we applied last
ANNOTATION_DRAIN_REASON: Final = f"{GROUP}/drain-reason"
ANNOTATION_DRAIN_STARTED: Final = f"{GROUP}/drain-started"  # RFC 3339; the drain clock survives the operator
ANNOTATION_DRAINING: Final = f"{GROUP}/draining"  # of a disruption budget: digest of the replicas that drain
ANNOTATION_REPLICA: Final = f"{GROUP}/replica"  # revision, slot and attempt: labels are edited, and restored from it
ANNOTATION_REPLACE: Final = f"{GROUP}/replace"  # RFC 3339; written by `kubectl slipway drain` on a pod
ANNOTATION_SERVED_NAME: Final = f"{GROUP}/served-name"  # the served name of the pod's runtime
ANNOTATION_ENGINE: Final = f"{GROUP}/engine"  # the name in the dialect of a foreign engine; absent: our own runtime
ANNOTATION_ADMIN_NONCE: Final = f"{GROUP}/admin-nonce"  # random for each pod; its admin tokens are derived from it
# Comma-separated hex digests of the serving tokens that the pod accepts; absent: it accepts requests without one.
ANNOTATION_SERVING_TOKEN_SHA256: Final = f"{GROUP}/serving-token-sha256"

# Of warm pools: what a claim cannot change of the pod, as digests of its parts; when a service claimed the pod; and on
# a replica that was started cold, the pool that had no pod for it.
ANNOTATION_WARM_SHAPE: Final = f"{GROUP}/warm-shape"
ANNOTATION_CLAIMED_AT: Final = f"{GROUP}/claimed-at"
ANNOTATION_WARM_TEMPLATE: Final = f"{GROUP}/warm-template"  # digest of the pod's spec as the operator builds it
ANNOTATION_RETURNED_AT: Final = f"{GROUP}/returned-at"  # RFC 3339: when a replica became a pod of its pool again
ANNOTATION_CLAIMS: Final = f"{GROUP}/claims"  # how many services have claimed and returned the pod
ANNOTATION_POOL_MISSED: Final = f"{GROUP}/pool-missed"

# On a pod that brings image and model to a node: what it brings, as a digest, and to which node.
ANNOTATION_PRE_PULL_DIGEST: Final = f"{GROUP}/pre-pull-digest"
ANNOTATION_PRE_PULL_NODE: Final = f"{GROUP}/pre-pull-node"

# Annotations on an InferenceService, written by its user; each acts only while the revision that it names is the update
# (rollback-to: while it is in status.revisions).
ANNOTATION_PROMOTE: Final = f"{GROUP}/promote"
ANNOTATION_PAUSE: Final = f"{GROUP}/pause"  # "true": as spec.rollout.paused, for a service that inherits its rollout
ANNOTATION_ABORT: Final = f"{GROUP}/abort"
ANNOTATION_ROLLBACK_TO: Final = f"{GROUP}/rollback-to"
ANNOTATION_WAKE: Final = f"{GROUP}/wake"  # RFC 3339: a service at zero starts a replica then

# On a pod: comma-separated names of the adapters that were loaded and answered a probe; the gateway routes by it.
ANNOTATION_ADAPTERS: Final = f"{GROUP}/adapters"

# On a pod whose node is to be emptied: since when, and since when evictions are no longer held up (RFC 3339).
ANNOTATION_NODE_LEAVING_SINCE: Final = f"{GROUP}/node-leaving-since"
ANNOTATION_NODE_DRAIN_FORCED: Final = f"{GROUP}/node-drain-forced"
# Read by cluster-autoscaler and Karpenter.
ANNOTATION_SAFE_TO_EVICT: Final = "cluster-autoscaler.kubernetes.io/safe-to-evict"
ANNOTATION_DO_NOT_DISRUPT: Final = "karpenter.sh/do-not-disrupt"

# Every part serves clients on one port and its operators on another.
SERVING_PORT: Final = 8000
ADMIN_PORT: Final = 8001
SERVER_CONTAINER: Final = "server"

# Headers of a response: which model, revision, adapter and tokenizer answered.
HEADER_MODEL: Final = "x-slipway-model"
HEADER_REVISION: Final = "x-slipway-revision"
HEADER_ADAPTER: Final = "x-slipway-adapter"
HEADER_TOKENIZER: Final = "x-slipway-tokenizer"
HEADER_FALLBACK_FROM: Final = "x-slipway-fallback-from"  # the model that was asked, when another service answers
HEADER_DEGRADED: Final = "x-slipway-degraded"  # what the gateway took from a request because of overload
HEADER_IGNORED: Final = "x-slipway-ignored"  # the fields of the request that had no effect
HEADER_PIN_REVISION: Final = "x-slipway-pin-revision"
# From a client, instead of the field `user`: requests with one value stay on one revision of a split.
HEADER_COHORT: Final = "x-slipway-cohort"
HEADER_REQUEST_ID: Final = "x-request-id"
# Set by clients: requests with the same value go to the same replica while its load allows it.
HEADER_SESSION_ID: Final = "x-slipway-session-id"
# On a refusal of a runtime: the engine has not taken the request, so sending it elsewhere repeats nothing.
HEADER_NOT_STARTED: Final = "x-slipway-not-started"

# Headers from gateway to runtime; the gateway removes them from what clients send.
HEADER_TENANT: Final = "x-slipway-tenant"
HEADER_PRIORITY: Final = "x-slipway-priority"
HEADER_DEADLINE: Final = "x-slipway-deadline"  # seconds from now, a decimal number
HEADER_TOKEN_IDS: Final = "x-slipway-token-ids"  # noqa: S105  the name of a header
HEADER_SERVING_TOKEN: Final = "x-slipway-serving-token"  # noqa: S105  the name of a header
HEADER_TEXT_BLOCKS: Final = "x-slipway-text-blocks"  # hashes of the prompt's beginnings (`text_blocks`)
# Of responses: the internal headers of the request that had no effect, because it showed no serving token.
HEADER_IGNORED_HEADERS: Final = "x-slipway-ignored-headers"
INTERNAL_HEADERS: Final = frozenset(
    {HEADER_TENANT, HEADER_PRIORITY, HEADER_DEADLINE, HEADER_TOKEN_IDS, HEADER_SERVING_TOKEN, HEADER_TEXT_BLOCKS}
)

# The admin token's header: `pods/proxy` strips Authorization.
HEADER_ADMIN_TOKEN: Final = "x-slipway-admin-token"  # noqa: S105  the name of a header
# Comma-separated hex digests; several during rotation.
ENV_ADMIN_TOKEN_SHA256: Final = "SLIPWAY_ADMIN_TOKEN_SHA256"  # noqa: S105  the name of a variable
# Of tokens by which an open serving port recognises its gateway.
ENV_GATEWAY_TOKEN_SHA256: Final = "SLIPWAY_GATEWAY_TOKEN_SHA256"  # noqa: S105  the name of a variable
ENV_TOKENS: Final = frozenset({ENV_ADMIN_TOKEN_SHA256, ENV_GATEWAY_TOKEN_SHA256})

# Of the serving port: scores of texts and reranking, under vLLM's, Jina's and Cohere's paths.
SCORE_PATHS: Final = ("/v1/score", "/score")
RERANK_PATHS: Final = ("/v1/rerank", "/rerank", "/v2/rerank")

# Paths of the admin port.
PATH_READY: Final = "/ready"
# Of PATH_READY: how long the answer of a process that starts may wait for it to be ready.
PARAMETER_WAIT: Final = "waitSeconds"
PATH_HEALTH: Final = "/health"
PATH_METRICS: Final = "/metrics"
PATH_SIGNALS: Final = "/signals"
PATH_DRAIN: Final = "/drain"
PATH_UNDRAIN: Final = "/undrain"
PATH_STATE: Final = "/state"
PATH_REQUESTS: Final = "/debug/requests"  # ?id=…: the accounts of one request
PARAMETER_ID: Final = "id"
PATH_ADAPTERS: Final = "/adapters"
PATH_MODEL: Final = "/model"
PATH_SLEEP: Final = "/sleep"
PATH_WAKE_UP: Final = "/wake_up"
# A path of a runtime's serving port, for gateways.
PATH_TEXT_BLOCKS: Final = "/internal/text-blocks"
# Paths of a gateway's admin port.
PATH_DEMAND: Final = "/internal/demand"
PATH_OUTCOMES: Final = "/internal/outcomes"

# Inside a runtime pod.
RUN_DIRECTORY: Final = "/run/slipway"
DRAIN_SOCKET: Final = f"{RUN_DIRECTORY}/drain.sock"
CACHE_DIRECTORY: Final = "/var/cache/slipway"
PVC_DIRECTORY: Final = "/mnt/slipway/pvc"  # where the claim of a pvc:// model is mounted, read-only
IMAGE_DIRECTORY: Final = "/mnt/slipway/image"  # where the image of an oci:// model is mounted, read-only
MODEL_CACHE_DIRECTORY: Final = "/mnt/slipway/models"  # where the cache that pods share is mounted
CA_DIRECTORY: Final = "/etc/slipway/ca"  # where the ConfigMap of spec.model.network.caBundleRef is mounted
# Set in pods with GPUs that mount it: the key by which compiled kernels in it are sealed, one for each service.
ENV_KERNELS_KEY: Final = "SLIPWAY_KERNELS_KEY"
# Set in pods that bring a model to a node: the address of its tokenizer, or empty.
ENV_PRE_PULL_TOKENIZER: Final = "SLIPWAY_PRE_PULL_TOKENIZER"
ENV_PRE_PULL_DRAFT_MODEL: Final = "SLIPWAY_PRE_PULL_DRAFT_MODEL"
ADAPTERS_DIRECTORY: Final = "/etc/slipway/adapters"  # where the ConfigMap <service>-adapters is mounted, read-only
ADAPTERS_FILE: Final = "adapters.json"  # its key: a BootList, which the runtime loads at every start
EMBEDDED_MODEL: Final = "file:///opt/slipway/models/tiny"
# Prefixes of the termination message of a runtime that cannot serve its model until a person acts.
WORD_MODEL_NOT_FOUND: Final = "ModelNotFound: "
WORD_CREDENTIALS_INVALID: Final = "CredentialsInvalid: "
WORD_HUB_UNREACHABLE: Final = "HubUnreachable: "
WORD_INVALID_SPEC: Final = "InvalidSpec: "  # followed by the field of the spec
DRAFT_MODEL_FIELD: Final = "spec.runtime.speculation.draftModel.uri"
WORD_DOES_NOT_FIT: Final = "DoesNotFit: "
# Prefix of the termination message of a runtime whose GPU failed: another node may do better.
WORD_GPU_FAULT: Final = "GPUFault: "

# Keys of the Secret of spec.model.credentialsSecretRef, and the variables of the same names that the runtime reads.
CREDENTIALS_OF_SCHEME: Final = {
    "hf": ("HF_TOKEN",),
    "s3": ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
    "http": ("HTTP_BEARER_TOKEN",),
    "https": ("HTTP_BEARER_TOKEN",),
}
CREDENTIALS: Final = (
    "HF_TOKEN",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_REGION",
    "AWS_ENDPOINT_URL",
    "HTTP_BEARER_TOKEN",
)

GPU_PRODUCT_LABEL: Final = "nvidia.com/gpu.product"  # of nodes, by NVIDIA's GPU feature discovery
