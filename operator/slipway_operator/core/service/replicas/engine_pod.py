"""The containers of a replica of a foreign engine: the engine, rendered from its templates, and slipway-agent.

| container | listens on          | what it is                                                            |
|-----------|---------------------|-----------------------------------------------------------------------|
| server    | the serving port    | the engine: clients and gateway call it directly                      |
| agent     | the admin port      | answers operator and gateway as our own runtime does                  |

The probes of the engine's container ask the agent, which knows a drain from a fault; only liveness asks the engine
itself, so that a failing agent ends no stream. When the pod is deleted the kubelet runs both hooks together: the agent
waits until no request runs and writes a file, for which the hook of the engine waits.
"""

from typing import Any, Final

from slipway_api import internal_tls, names
from slipway_api.dialect import ENV_DIALECT, Dialect
from slipway_api.engine import VALUE, Condition, render
from slipway_api.engine_fields import field_texts, is_set
from slipway_api.inference_service import InferenceService
from slipway_operator.core.engines import PinnedEngine
from slipway_operator.core.service.model import model_access
from slipway_operator.core.service.replicas.access import PortAccess
from slipway_operator.core.service.replicas.drain import GRACE_AFTER_DRAIN_SECONDS

AGENT_CONTAINER: Final = "slipway-agent"
AGENT_COMMAND: Final = "slipway-agent"
AGENT_MEMORY: Final = "64Mi"
AGENT_TLS_MEMORY: Final = "128Mi"  # asyncio holds 256 KiB for each connection that speaks TLS
AGENT_CPU: Final = "50m"
DRAINED_FILE: Final = f"{names.RUN_DIRECTORY}/drained"
STARTUP_PERIOD_SECONDS: Final = 2
LIVENESS_PERIOD_SECONDS: Final = 10
_OF_OUR_RUNTIME: Final = ("SLIPWAY_CACHE_DIR", "SLIPWAY_CACHE_LIMIT")


def command(service: InferenceService, engine: PinnedEngine, revision: str, *, tls: bool) -> list[str]:
    """The program; empty: the entry point of the image."""
    return _rendered(engine.spec.command, _variables(service, revision, tls=tls))


def arguments(service: InferenceService, engine: PinnedEngine, revision: str, *, tls: bool) -> list[str]:
    """The command line after the program: the templates of what the spec sets, then the user's own arguments."""
    variables = _variables(service, revision, tls=tls)
    found: list[str] = []
    for entry in engine.spec.args:
        texts = _entry(entry, entry.text, service, variables)
        if texts is not None:
            found += texts
    if tls:
        assert engine.spec.tls is not None, "it would answer in plain text (find_plain_engine)"
        found += _rendered(engine.spec.tls.args, variables)
    return [*found, *service.spec.runtime.args]


def environment(service: InferenceService, engine: PinnedEngine, revision: str, *, tls: bool) -> list[dict[str, Any]]:
    """The environment variables of the engine's templates."""
    variables = _variables(service, revision, tls=tls)
    found = []
    for entry in engine.spec.env:
        texts = _entry(entry, (entry.text,), service, variables)
        if texts is not None:
            found.append({"name": entry.name, "value": texts[0]})
    return found


def without_own_variables(sources: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The variables of cache and network without those that only our runtime reads."""
    return [one for one in sources if one["name"] not in _OF_OUR_RUNTIME]


def ports(engine: PinnedEngine) -> list[dict[str, Any]]:
    """The ports of the engine's container; the admin port is the agent's."""
    own = [{"name": "http", "containerPort": names.SERVING_PORT, "protocol": "TCP"}]
    return own + [
        {"name": one.name, "containerPort": one.container_port, "protocol": "TCP"} for one in engine.spec.ports
    ]


def lifecycle(service: InferenceService, engine: PinnedEngine, revision: str) -> dict[str, Any]:
    """The hook that lets running requests finish before the engine gets SIGTERM."""
    hook = _rendered(engine.spec.stop_command, _variables(service, revision, tls=False))
    return {"preStop": {"exec": {"command": hook}}} if hook else {}


def probes(engine: PinnedEngine, startup_timeout_seconds: int) -> dict[str, Any]:
    """The probes of the engine's container. Compilation is part of the start, and an engine may be silent a while."""
    failed = {"terminationGracePeriodSeconds": GRACE_AFTER_DRAIN_SECONDS}
    probe = dialect_of(engine).probe
    ready = {"httpGet": {"path": names.PATH_READY, "port": names.ADMIN_PORT}}
    alive = {"httpGet": {"path": probe.path, "port": names.SERVING_PORT}}
    timeout = {"timeoutSeconds": probe.timeout_seconds}
    attempts = -(-startup_timeout_seconds // STARTUP_PERIOD_SECONDS)
    silent = max(1, -(-probe.restart_after_seconds // LIVENESS_PERIOD_SECONDS))
    return {
        "startupProbe": ready
        | {"periodSeconds": STARTUP_PERIOD_SECONDS, **timeout, "failureThreshold": attempts}
        | failed,
        "readinessProbe": ready | {"periodSeconds": 1, **timeout, "failureThreshold": 3},
        "livenessProbe": alive
        | {"periodSeconds": LIVENESS_PERIOD_SECONDS, **timeout, "failureThreshold": silent}
        | failed,
    }


def agent_container(
    service: InferenceService,
    engine: PinnedEngine,
    revision: str,
    *,
    access: PortAccess,
    mounts: list[dict[str, Any]],
    security: dict[str, Any],
) -> dict[str, Any]:
    """slipway-agent: no torch, little memory, and the only container that knows the digests of the pod."""
    lora, memory = service.spec.runtime.lora, AGENT_TLS_MEMORY if access.tls else AGENT_MEMORY
    variables = {
        ENV_DIALECT: dialect_of(engine).model_dump_json(by_alias=True, exclude_defaults=True),
        "SLIPWAY_ENGINE_URL": f"{'https' if access.tls else 'http'}://127.0.0.1:{names.SERVING_PORT}",
        "SLIPWAY_SERVED_NAME": service.served_name,
        "SLIPWAY_REVISION": revision,
        "SLIPWAY_MAX_NUM_SEQS": str(service.spec.runtime.max_num_seqs),
        "SLIPWAY_MAX_ADAPTERS": str(lora.max_adapters if lora is not None else 0),
        "SLIPWAY_DRAIN_TIMEOUT": str(service.spec.drain.timeout_seconds),
        "SLIPWAY_DRAINED_FILE": DRAINED_FILE,
    }
    if access.tls:
        variables |= {
            internal_tls.ENV_DIRECTORY: internal_tls.DIRECTORY,
            internal_tls.ENV_NAME: internal_tls.replicas_name(service.metadata.namespace),
        }
    own: list[dict[str, Any]] = [
        {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "POD_NAMESPACE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}},
    ]
    return {
        "name": AGENT_CONTAINER,
        "image": engine.agent_image,
        "imagePullPolicy": "IfNotPresent",
        "command": [AGENT_COMMAND],
        "env": [
            *({"name": name, "value": value.replace("$", "$$")} for name, value in variables.items()),
            *own,
            *access.environment(),
        ],
        "ports": [{"name": "admin", "containerPort": names.ADMIN_PORT, "protocol": "TCP"}],
        "volumeMounts": mounts,
        "lifecycle": {"preStop": {"exec": {"command": [AGENT_COMMAND, "drain"]}}},
        "securityContext": security,
        "resources": {
            "requests": {"cpu": AGENT_CPU, "memory": memory},
            "limits": {"memory": memory},
        },
    }


def dialect_of(engine: PinnedEngine) -> Dialect:
    """The dialect, which every Engine but slipway has by the rules of the API server."""
    assert engine.spec.dialect is not None
    return engine.spec.dialect


def _rendered(texts: tuple[str, ...], variables: dict[str, str]) -> list[str]:
    """The texts; one that names a field without a value is left out."""
    return [text for one in texts if (text := render(one, variables)) is not None]


def _entry(
    entry: Condition, texts: tuple[str, ...], service: InferenceService, variables: dict[str, str]
) -> list[str] | None:
    """The texts of one entry; None: its condition does not hold, or a field in it has no value."""
    if entry.field is not None:
        if not is_set(service.spec, entry.field):
            return None
        value = variables[entry.field]
        variables = {**variables, VALUE: entry.values.get(value, value)}
    rendered = [render(one, variables) for one in texts]
    complete = [one for one in rendered if one is not None]
    return complete if len(complete) == len(rendered) else None


def _variables(service: InferenceService, revision: str, *, tls: bool) -> dict[str, str]:
    spec = service.spec
    files = {
        "tls.certificate": internal_tls.CERTIFICATE_FILE,
        "tls.key": internal_tls.KEY_FILE,
        "tls.authorities": internal_tls.CA_FILE,
    }
    return field_texts(spec) | {
        **{name: f"{internal_tls.DIRECTORY}/{file}" for name, file in files.items() if tls},
        "name": service.metadata.name,
        "namespace": service.metadata.namespace,
        "servedName": service.served_name,
        "revision": revision,
        "model.source": _source(service),
        "ports.serving": str(names.SERVING_PORT),
        "ports.admin": str(names.ADMIN_PORT),
        "directories.cache": names.CACHE_DIRECTORY,
        "drainedFile": DRAINED_FILE,
        "drain.timeoutSeconds": str(spec.drain.timeout_seconds),
        "gpus": str(spec.resources.gpu.count),
    }


def _source(service: InferenceService) -> str:
    """`organisation/name` of a hub, an absolute path, or the address as it is."""
    address = model_access.address(service.spec.model)
    if address.startswith("hf://"):
        return address.removeprefix("hf://").partition("@")[0]
    return address.removeprefix("file://")
