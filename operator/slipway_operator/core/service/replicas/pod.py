"""Builds the Pod of a replica, exactly as it is sent to the API server.

The user's overlay is merged here, by name where it has names. It was checked against its allow-list by the API server
(CEL), so it is taken as it is; what Slipway itself needs still wins: its labels, its environment, its mounts.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from slipway_api import names
from slipway_api.inference_service import InferenceService
from slipway_api.model_flags import model_flags
from slipway_api.model_spec import SamplingDefaults, WarmPrompt
from slipway_api.overlay import ContainerOverlay, PodOverlay
from slipway_api.pod_labels import ReplicaIdentity
from slipway_api.runtime_api import ModelSpec
from slipway_api.runtime_spec import SpeculationMethod
from slipway_operator.core.installation import NodeCache, PlacementDefaults, PodUser, TraceDefaults
from slipway_operator.core.service import adapters
from slipway_operator.core.service.model import model_access
from slipway_operator.core.service.replicas import engine_pod, tls
from slipway_operator.core.service.replicas.access import PortAccess
from slipway_operator.core.service.replicas.disruption import startup_annotations
from slipway_operator.core.service.replicas.drain import GRACE_AFTER_DRAIN_SECONDS
from slipway_operator.core.service.replicas.placement import fill_placement
from slipway_operator.core.service.rollout.revision import Revision, owner_reference

PREFERRED: Final = "preferredDuringSchedulingIgnoredDuringExecution"
REQUIRED: Final = "requiredDuringSchedulingIgnoredDuringExecution"
# If NVIDIA's runtime is the node's default, a container without this variable sees all GPUs of the node.
NO_GPU: Final = {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}
OWN_MOUNTS: Final = {"tmp": "/tmp", "run": names.RUN_DIRECTORY, "cache": names.CACHE_DIRECTORY}  # noqa: S108  a mount
STARTUP_WAIT_SECONDS: Final = 0.9  # within the period of 1 s, so that as many probes fail as seconds pass
VLLM_FORMAT: Final = "vllm"  # the format of our runtime's metrics and KV events
_LABEL_VALUE: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
SHARED_MEMORY: Final = {"shm": "/dev/shm"}  # noqa: S108  GPUs that share a model meet there; a container has 64 MB of it


def pod_name(service: str, revision: Revision, slot: int, attempt: int) -> str:
    """`<service>-<revision5>-<slot>-<attempt>`."""
    return f"{service}-{revision.short}-{slot}-{attempt}"


def build_pod(
    service: InferenceService,
    revision: Revision,
    *,
    slot: int,
    attempt: int,
    access: PortAccess,
    user: PodUser | None,
    placement: PlacementDefaults,
    avoid_node: str = "",
    closed_nodes: Sequence[str] = (),
    node_cache: NodeCache | None = None,
    kernels_key: str = "",
    tracing: TraceDefaults | None = None,
) -> dict[str, Any]:
    """The Pod that serves as this slot's replica; it prefers any other node to `avoid_node`, and is never placed on
    `closed_nodes`, even if it tolerates that they are cordoned.

    user: that of the installation's pods; None: the platform assigns it.
    placement: the installation's pull secrets, nodeSelector and tolerations; those of the template replace them.
    kernels_key: by which replicas with a cache of models seal the compiled kernels in it; empty: they share none.
    tracing: where our runtime exports spans to; a variable of the same name in the template replaces it.
    """
    spec, overlay = service.spec, service.spec.template
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": pod_name(service.metadata.name, revision, slot, attempt),
            "namespace": service.metadata.namespace,
            "labels": _recommended_labels(service, revision)
            | overlay.metadata.labels
            | _labels(service, revision, slot, attempt),
            "annotations": startup_annotations(service)
            | overlay.metadata.annotations
            | {names.ANNOTATION_REPLICA: str(ReplicaIdentity(revision.hash, slot, attempt))}
            | {names.ANNOTATION_SERVED_NAME: service.served_name}
            | _engine_annotation(revision)
            | access.annotations(),
            "ownerReferences": [owner_reference(service)],
        },
        "spec": {
            "containers": [
                _server(service, revision, access, node_cache, kernels_key, tracing),
                *_agents(service, revision, access),
            ],
            "volumes": _volumes(service, node_cache),
            "restartPolicy": "Always",
            "terminationGracePeriodSeconds": spec.drain.timeout_seconds + GRACE_AFTER_DRAIN_SECONDS,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": _pod_security(overlay.spec, user),
            "topologySpreadConstraints": [_spread_over_nodes(service), *overlay.spec.topology_spread_constraints],
        }
        | _placement(service, placement, avoid_node, closed_nodes),
    }
    return tls.secured(pod, is_ours=revision.engine is None) if access.tls else pod


def _recommended_labels(service: InferenceService, revision: Revision) -> dict[str, str]:
    """Labels for dashboards and pickers, which the template may replace. Nothing of ours reads them."""
    engine = engine_pod.dialect_of(revision.engine).engine if revision.engine is not None else VLLM_FORMAT
    return {
        names.LABEL_APP_INSTANCE: service.metadata.name,
        names.LABEL_APP_COMPONENT: names.COMPONENT_REPLICA,
        names.LABEL_APP_PART_OF: names.PART_OF,
    } | ({names.LABEL_ENGINE_TYPE: engine} if _LABEL_VALUE.fullmatch(engine) else {})


def _engine_annotation(revision: Revision) -> dict[str, str]:
    """The engine whose streams the gateway reads; absent for our own runtime."""
    return {names.ANNOTATION_ENGINE: engine_pod.dialect_of(revision.engine).engine} if revision.engine else {}


def _labels(service: InferenceService, revision: Revision, slot: int, attempt: int) -> dict[str, str]:
    return {
        names.LABEL_MANAGED_BY: names.MANAGED_BY,
        names.LABEL_APP_NAME: service.metadata.name,
        names.LABEL_SERVICE: service.metadata.name,
        names.LABEL_REVISION: revision.hash,
        names.LABEL_SLOT: str(slot),
        names.LABEL_ATTEMPT: str(attempt),
        names.LABEL_STATE: names.STATE_SERVING,
    }


def _server(
    service: InferenceService,
    revision: Revision,
    access: PortAccess,
    node_cache: NodeCache | None,
    kernels_key: str,
    tracing: TraceDefaults | None,
) -> dict[str, Any]:
    overlay = _server_overlay(service.spec.template.spec)
    paths = OWN_MOUNTS | (SHARED_MEMORY if _shares_gpus(service) else {})
    own_mounts = [{"name": name, "mountPath": path} for name, path in paths.items()]
    process = _process(service, revision, access)
    return {
        "name": names.SERVER_CONTAINER,
        "image": revision.image,
        "imagePullPolicy": "IfNotPresent",
        **_if_any(command=process["command"], args=process["args"]),
        "env": _environment(service, revision, overlay, access, node_cache, kernels_key, tracing),
        "ports": process["ports"],
        "volumeMounts": _merged(
            "mountPath",
            overlay.volume_mounts,
            own_mounts,
            model_access.mounts(service.spec.model, node_cache, namespace=service.metadata.namespace),
            adapters.mounts(service),
        ),
        **_if_any(lifecycle=process["lifecycle"]),
        "securityContext": _container_security(),
    } | _if_any(resources=_resources(service, overlay), **process["probes"])


def _process(service: InferenceService, revision: Revision, access: PortAccess) -> dict[str, Any]:
    """What depends on the program in the container: command line, ports, hook and probes."""
    startup_timeout = service.spec.runtime.startup_timeout_seconds
    if (engine := revision.engine) is not None:
        return {
            "command": engine_pod.command(service, engine, revision.hash, tls=access.tls),
            "args": engine_pod.arguments(service, engine, revision.hash, tls=access.tls),
            "ports": engine_pod.ports(engine),
            "lifecycle": engine_pod.lifecycle(service, engine, revision.hash),
            "probes": engine_pod.probes(engine, startup_timeout),
        }
    return {
        "command": [],
        "args": [*arguments(service, revision), *access.arguments()],
        "ports": [
            {"name": "http", "containerPort": names.SERVING_PORT, "protocol": "TCP"},
            {"name": "admin", "containerPort": names.ADMIN_PORT, "protocol": "TCP"},
        ],
        "lifecycle": {"preStop": {"exec": {"command": ["slipway-runtime", "drain"]}}},
        "probes": _probes(startup_timeout),
    }


def _agents(service: InferenceService, revision: Revision, access: PortAccess) -> list[dict[str, Any]]:
    """slipway-agent, beside an engine that does not answer the admin protocol itself."""
    if revision.engine is None:
        return []
    mounts = [{"name": name, "mountPath": OWN_MOUNTS[name]} for name in ("tmp", "run")]
    return [
        engine_pod.agent_container(
            service,
            revision.engine,
            revision.hash,
            access=access,
            mounts=mounts + adapters.mounts(service),
            security=_container_security(),
        )
    ]


def _container_security() -> dict[str, Any]:
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
    }


def arguments(service: InferenceService, revision: Revision) -> list[str]:
    """The command line of `slipway-runtime`: flags of the fields that the spec sets, then the user's own arguments."""
    process = {
        "--port": names.SERVING_PORT,
        "--admin-port": names.ADMIN_PORT,
        "--drain-timeout": service.spec.drain.timeout_seconds,
    }
    spec = model_spec(service, revision)
    written = [part for flag, value in process.items() for part in (flag, str(value))]
    flags = [_literal(part) for part in (spec.uri, *written, *model_flags(spec))]
    return ["serve", *flags, *service.spec.runtime.args]


def model_spec(service: InferenceService, revision: Revision) -> ModelSpec:
    """The model and how to run it: the content of the pod's command line, and the body of POST /model."""
    model, runtime, lora = service.spec.model, service.spec.runtime, service.spec.runtime.lora
    drafts = runtime.speculation.method is not SpeculationMethod.NONE
    return ModelSpec(
        uri=model_access.address(model),
        served_name=service.served_name,
        revision=revision.hash,
        dtype=runtime.dtype,
        max_model_len=runtime.max_model_len,
        max_num_seqs=runtime.max_num_seqs,
        max_num_batched_tokens=runtime.max_num_batched_tokens,
        block_size=runtime.block_size,
        max_output_tokens=runtime.max_output_tokens,
        kv_cache_bytes=runtime.kv_cache.bytes,
        gpu_memory_utilization=str(runtime.kv_cache.gpu_memory_utilization),
        model_digest=model.digest,
        tokenizer_uri=model.tokenizer.uri,
        tokenizer_sha256=model.tokenizer.sha256,
        chat_template=model.chat_template,
        sampling_defaults=_sampling_defaults(model.sampling_defaults),
        quantization=runtime.quantization,
        kv_cache_dtype=runtime.kv_cache.dtype,
        kv_cache_host_bytes=runtime.kv_cache.host_bytes,
        task=runtime.task,
        pooling=runtime.pooling,
        deterministic=runtime.deterministic,
        tensor_parallel_size=runtime.tensor_parallel_size,
        speculation=runtime.speculation.method,
        speculation_max_tokens=runtime.speculation.max_tokens if drafts else 0,
        draft_model_uri=model_access.draft_model_uri(runtime),
        max_adapters=lora.max_adapters if lora is not None else 0,
        max_cpu_adapters=lora.max_cpu_adapters if lora is not None else 0,
        max_rank=lora.max_rank if lora is not None else 0,
        lora_experts=lora.experts if lora is not None else False,
        warm_prompts=tuple(_warm_prompt(one) for one in model.warm_prompts),
    )


def _warm_prompt(warm: WarmPrompt) -> str | tuple[dict[str, str], ...]:
    return warm.prompt or tuple({"role": message.role.value, "content": message.content} for message in warm.messages)


def _literal(text: str) -> str:
    """Escape `$(NAME)`, which the kubelet would replace: a chat template with dollars must arrive unchanged."""
    return text.replace("$", "$$")


def _sampling_defaults(defaults: SamplingDefaults) -> dict[str, float | int]:
    """The sampling defaults under the names of the OpenAI API, which the runtime uses too."""
    values = {
        "temperature": defaults.temperature,
        "top_p": defaults.top_p,
        "top_k": defaults.top_k,
        "min_p": defaults.min_p,
        "repetition_penalty": defaults.repetition_penalty,
        "max_tokens": defaults.max_tokens,
    }
    return {
        name: value if isinstance(value, int) else float(value) for name, value in values.items() if value is not None
    }


def _environment(
    service: InferenceService,
    revision: Revision,
    overlay: ContainerOverlay,
    access: PortAccess,
    node_cache: NodeCache | None,
    kernels_key: str,
    tracing: TraceDefaults | None,
) -> list[dict[str, Any]]:
    # On shared cores OpenMP's spinning threads cost more than they bring: as many threads as the CPU limit, no more.
    threads = {"resourceFieldRef": {"containerName": names.SERVER_CONTAINER, "resource": "limits.cpu", "divisor": "1"}}
    # The root file system is read-only: Triton's compiled kernels and HOME are in a writable volume.
    defaults: list[dict[str, Any]] = [
        {"name": "OMP_NUM_THREADS", "valueFrom": threads},
        {"name": "HOME", "value": names.CACHE_DIRECTORY},
        {"name": "TRITON_CACHE_DIR", "value": f"{names.CACHE_DIRECTORY}/triton"},
    ]
    own: list[dict[str, Any]] = [
        {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "POD_NAMESPACE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}},
    ]
    sources = model_access.environment(service.spec.model, node_cache)
    if revision.engine is None:
        own += access.environment()
        defaults += tracing.environment() if tracing is not None else []
    else:
        defaults += engine_pod.environment(service, revision.engine, revision.hash, tls=access.tls)
        sources = engine_pod.without_own_variables(sources)
    if not _has_gpu(service, overlay):
        own.append(NO_GPU)
    elif kernels_key and revision.engine is None and model_access.has_cache(service.spec.model, node_cache):
        own.append({"name": names.ENV_KERNELS_KEY, "value": kernels_key})
    keys = model_access.credentials(service.spec.model, service.spec.runtime)
    return _merged("name", defaults, sources, keys, service.spec.runtime.env, overlay.env, own)


def _volumes(service: InferenceService, node_cache: NodeCache | None) -> list[dict[str, Any]]:
    """The pod's volumes. The user's overlay may replace the cache volume, but not those of the model."""
    own: list[dict[str, Any]] = [{"name": name, "emptyDir": {}} for name in OWN_MOUNTS]
    if _shares_gpus(service):
        own += [{"name": name, "emptyDir": {"medium": "Memory"}} for name in SHARED_MEMORY]
    mine = model_access.volumes(service.spec.model, node_cache) + adapters.volumes(service)
    return _merged("name", own, service.spec.template.spec.volumes, mine)


def _has_gpu(service: InferenceService, overlay: ContainerOverlay) -> bool:
    """Whether the container has a GPU resource, of the spec's own field or of its template."""
    limits = _resources(service, overlay).get("limits", {})
    return any(name == service.spec.resources.gpu.resource_name or name.startswith("nvidia.com/") for name in limits)


def _shares_gpus(service: InferenceService) -> bool:
    return service.spec.resources.gpu.count > 1


def _resources(service: InferenceService, overlay: ContainerOverlay) -> dict[str, dict[str, str | int]]:
    gpu = service.spec.resources.gpu
    # An extended resource needs no request beside its limit; both are written to be explicit.
    gpus: dict[str, str | int] = {gpu.resource_name: str(gpu.count)} if gpu.count else {}
    requests = service.spec.resources.requests | overlay.resources.requests | gpus
    limits = service.spec.resources.limits | overlay.resources.limits | gpus
    return _if_any(requests=requests, limits=limits)


def _probes(startup_timeout_seconds: int) -> dict[str, Any]:
    """The probes: startup (loading takes minutes), readiness and liveness.

    A container that fails startup or liveness has nothing to finish: it does not get the grace of a whole drain. The
    answer to a startup probe waits: a replica that becomes ready does not wait for the next one.
    """
    failed = {"terminationGracePeriodSeconds": GRACE_AFTER_DRAIN_SECONDS}
    started = {"path": f"{names.PATH_READY}?{names.PARAMETER_WAIT}={STARTUP_WAIT_SECONDS}", "port": "admin"}
    startup = {"httpGet": started, "periodSeconds": 1, "timeoutSeconds": 2}
    ready = {"httpGet": {"path": names.PATH_READY, "port": "admin"}}
    health = {"httpGet": {"path": names.PATH_HEALTH, "port": "admin"}}
    return {
        "startupProbe": startup | {"failureThreshold": startup_timeout_seconds} | failed,
        "readinessProbe": ready | {"periodSeconds": 1, "timeoutSeconds": 2, "failureThreshold": 3},
        "livenessProbe": health | {"periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 3} | failed,
    }


def _pod_security(overlay: PodOverlay, user: PodUser | None) -> dict[str, Any]:
    context: dict[str, Any] = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    if user is not None:
        # Without the fsGroup the server's user could not write to the emptyDirs.
        context |= {"runAsUser": user.user, "runAsGroup": user.group, "fsGroup": user.group}
    stricter = overlay.security_context.to_json() if overlay.security_context else {}
    return context | {field: value for field, value in stricter.items() if value not in ([], {})}


def _spread_over_nodes(service: InferenceService) -> dict[str, Any]:
    """Replicas are independent fault domains, so they prefer different nodes; a full cluster may still stack them."""
    return {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": {names.LABEL_SERVICE: service.metadata.name}},
    }


def _placement(
    service: InferenceService, defaults: PlacementDefaults, avoid_node: str, closed_nodes: Sequence[str]
) -> dict[str, Any]:
    overlay, gpu = fill_placement(service.spec.template.spec, defaults), service.spec.resources.gpu
    product = {names.GPU_PRODUCT_LABEL: gpu.product} if gpu.count and gpu.product else {}
    return _if_any(
        nodeSelector=overlay.node_selector | product,
        affinity=_away_from(_affinity(overlay.affinity, avoid_node), closed_nodes),
        tolerations=list(overlay.tolerations),
        priorityClassName=overlay.priority_class_name or service.spec.availability.priority_class_name,
        runtimeClassName=overlay.runtime_class_name,
        schedulerName=overlay.scheduler_name,
        imagePullSecrets=[{"name": secret.name} for secret in overlay.image_pull_secrets],
        serviceAccountName=overlay.service_account_name,
    )


def _affinity(affinity: Mapping[str, Any] | None, avoid_node: str) -> dict[str, Any]:
    """The user's affinity, and a preference for other nodes than that one; it may still be the only one with a GPU."""
    affinity = affinity or {}
    if not avoid_node:
        return dict(affinity)
    match = {"key": "metadata.name", "operator": "NotIn", "values": [avoid_node]}
    term = {"weight": 100, "preference": {"matchFields": [match]}}
    of_nodes = affinity.get("nodeAffinity") or {}
    preferred = [*(of_nodes.get(PREFERRED) or ()), term]
    return {**affinity, "nodeAffinity": {**of_nodes, PREFERRED: preferred}}


def _away_from(affinity: dict[str, Any], nodes: Sequence[str]) -> dict[str, Any]:
    """The affinity, with the requirement to be on none of these nodes. Terms are alternatives, so each one gets it."""
    if not nodes:
        return affinity
    away = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in nodes]
    of_nodes = affinity.get("nodeAffinity") or {}
    terms = (of_nodes.get(REQUIRED) or {}).get("nodeSelectorTerms")
    # An empty term matches no node, and stays so.
    closed = [{**term, "matchFields": [*(term.get("matchFields") or ()), *away]} for term in terms or () if term]
    closed = closed or ([{}] if terms else [{"matchFields": away}])
    return {**affinity, "nodeAffinity": {**of_nodes, REQUIRED: {"nodeSelectorTerms": closed}}}


def _server_overlay(overlay: PodOverlay) -> ContainerOverlay:
    empty = ContainerOverlay(name=names.SERVER_CONTAINER)
    return next((one for one in overlay.containers if one.name == names.SERVER_CONTAINER), empty)


def _merged(key: str, *layers: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One list of entries by `key`; a later layer replaces an entry of an earlier one, in its place."""
    entries: dict[str, dict[str, Any]] = {}
    for layer in layers:
        for entry in layer:
            entries[entry[key]] = dict(entry)
    return list(entries.values())


def _if_any(**fields: Any) -> dict[str, Any]:
    """The fields that are not empty: an empty one would be a needless difference to what the API server stores."""
    return {name: value for name, value in fields.items() if value}
