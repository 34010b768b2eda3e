"""The field `spec.template` of an InferenceService: the allow-list of changes to its pods.

Without it, the right to create an InferenceService would be the right to create any pod. What is listed is merged into
the pod, by name where it has names; every other field of a pod is declared here only to be refused with a sentence,
because the API server drops undeclared fields in silence. `core.service.pod` does the merging.
"""

from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, WithJsonSchema
from pydantic.config import JsonDict

from slipway_api.types import LocalReference, Quantity, Rule, Struct, bounded_list, cel_rules

_STRING: JsonDict = {"type": "string", "maxLength": 1024}
_FLAG: JsonDict = {"type": "boolean"}
_NUMBER: JsonDict = {"type": "integer", "format": "int64"}
_OPEN: JsonDict = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
_OPEN_LIST: JsonDict = {"type": "array", "maxItems": 64, "x-kubernetes-list-type": "atomic", "items": _OPEN}
_STRINGS: JsonDict = {"type": "array", "maxItems": 64, "x-kubernetes-list-type": "atomic", "items": _STRING}

_SELECTOR = {
    "type": "object",
    "required": ["key"],
    "properties": {"name": _STRING, "key": _STRING, "optional": _FLAG},
}
_ENV_VAR = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 256, "description": "Name of the variable."},
        "value": {"type": "string", "maxLength": 32768, "description": "Its value."},
        "valueFrom": {
            "type": "object",
            "description": "Where the value comes from, as in a pod.",
            "properties": {
                "configMapKeyRef": _SELECTOR,
                "secretKeyRef": _SELECTOR,
                "fieldRef": {
                    "type": "object",
                    "required": ["fieldPath"],
                    "properties": {"apiVersion": _STRING, "fieldPath": _STRING},
                },
                "resourceFieldRef": {
                    "type": "object",
                    "required": ["resource"],
                    "properties": {
                        "containerName": _STRING,
                        "resource": _STRING,
                        "divisor": {"x-kubernetes-int-or-string": True, "maxLength": 32},
                    },
                },
            },
        },
    },
    "x-kubernetes-validations": [
        {
            "rule": "!self.name.startsWith('SLIPWAY_') && !(self.name in ['POD_NAME', 'POD_NAMESPACE'])",
            "message": "POD_NAME, POD_NAMESPACE and SLIPWAY_* are set by Slipway",
        }
    ],
}
EnvVar = Annotated[dict[str, Any], WithJsonSchema(_ENV_VAR)]

_TOLERATION = {
    "type": "object",
    "properties": {
        "key": _STRING,
        "operator": {"type": "string", "enum": ["Exists", "Equal", "Lt", "Gt"]},
        "value": _STRING,
        "effect": {"type": "string", "enum": ["NoSchedule", "PreferNoSchedule", "NoExecute"]},
        "tolerationSeconds": _NUMBER,
    },
}
Toleration = Annotated[dict[str, Any], WithJsonSchema(_TOLERATION)]

_TOKEN_SOURCES = ("serviceAccountToken", "podCertificate")
_NO_TOKENS = "a projected volume may not hold a serviceAccountToken or a podCertificate: pods have no identity here"
_PROJECTED: JsonDict = {
    "type": "object",
    "description": "As in a pod, without the sources that give the pod an identity.",
    "properties": {
        "defaultMode": {"type": "integer", "format": "int32"},
        "sources": {
            "type": "array",
            "maxItems": 16,
            "x-kubernetes-list-type": "atomic",
            "items": {
                "type": "object",
                "properties": {
                    **dict.fromkeys(("configMap", "secret", "downwardAPI", "clusterTrustBundle"), _OPEN),
                    **{kind: _OPEN | {"description": "Refused."} for kind in _TOKEN_SOURCES},
                },
                "x-kubernetes-validations": [
                    {"rule": " && ".join(f"!has(self.{kind})" for kind in _TOKEN_SOURCES), "message": _NO_TOKENS}
                ],
            },
        },
    },
}
_VOLUME_KINDS = (
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
)
_VOLUME = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 63, "description": "Name of the volume."},
        **{kind: _OPEN | {"description": "As in a pod."} for kind in _VOLUME_KINDS},
        "projected": _PROJECTED,
    },
    "x-kubernetes-validations": [
        {
            # A forbidden kind such as hostPath is undeclared, so it arrives here as a volume of no kind.
            "rule": f"[{', '.join(f'has(self.{kind})' for kind in _VOLUME_KINDS)}].exists_one(is_set, is_set)",
            "message": f"a volume must be exactly one of {', '.join(_VOLUME_KINDS)}",
        }
    ],
}


def _without_tokens(volume: dict[str, Any]) -> dict[str, Any]:
    """Refuses what the API server refuses too: a service stored before that rule is still there."""
    sources = (volume.get("projected") or {}).get("sources") or ()
    if any(kind in source for source in sources for kind in _TOKEN_SOURCES):
        raise ValueError(_NO_TOKENS)
    return volume


Volume = Annotated[dict[str, Any], AfterValidator(_without_tokens), WithJsonSchema(_VOLUME)]

_VOLUME_MOUNT = {
    "type": "object",
    "required": ["name", "mountPath"],
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 63, "description": "Which volume."},
        "mountPath": {"type": "string", "minLength": 1, "maxLength": 1024, "description": "Where it appears."},
        "subPath": _STRING,
        "subPathExpr": _STRING,
        "readOnly": _FLAG,
        "recursiveReadOnly": _STRING,
        "mountPropagation": _STRING,
    },
}
VolumeMount = Annotated[dict[str, Any], WithJsonSchema(_VOLUME_MOUNT)]

_SPREAD = {
    "type": "object",
    "required": ["maxSkew", "topologyKey", "whenUnsatisfiable"],
    "properties": {
        "maxSkew": {"type": "integer", "format": "int32"},
        "topologyKey": _STRING,
        "whenUnsatisfiable": {"type": "string", "enum": ["DoNotSchedule", "ScheduleAnyway"]},
        "labelSelector": _OPEN,
        "matchLabelKeys": _STRINGS,
        "minDomains": {"type": "integer", "format": "int32"},
        "nodeAffinityPolicy": _STRING,
        "nodeTaintsPolicy": _STRING,
    },
}
TopologySpread = Annotated[dict[str, Any], WithJsonSchema(_SPREAD)]
Affinity = Annotated[dict[str, Any], WithJsonSchema(_OPEN)]

ResourceMap = Annotated[dict[str, Quantity], Field(max_length=16)]
StringMap = Annotated[dict[str, Annotated[str, Field(max_length=1024)]], Field(max_length=64)]

NO_EXTENDED_RESOURCES = "cpu, memory, ephemeral-storage and hugepages only: request GPUs in spec.resources.gpu"
_REQUESTS_WITHIN_LIMITS = (
    "!has(self.requests) || !has(self.limits) || self.requests.all(kind, !(kind in self.limits) || "
    "!isQuantity(string(self.requests[kind])) || !isQuantity(string(self.limits[kind])) || "
    "quantity(string(self.requests[kind])).compareTo(quantity(string(self.limits[kind]))) <= 0)"
)


def resource_rules() -> tuple[Rule, ...]:
    """What holds wherever requests and limits stand side by side."""
    return (
        Rule("!has(self.requests) || self.requests.all(kind, !kind.contains('/'))", NO_EXTENDED_RESOURCES, ".requests"),
        Rule("!has(self.limits) || self.limits.all(kind, !kind.contains('/'))", NO_EXTENDED_RESOURCES, ".limits"),
        Rule(_REQUESTS_WITHIN_LIMITS, "a request may not exceed its limit", ".requests"),
    )


def refuse(fields: dict[str, JsonDict], allowed: str) -> JsonDict:
    """One rule against all these fields; its message names those that are present."""
    names = " + ".join(f"(has(self.{name}) ? ' {name}' : '')" for name in fields)
    return {
        "rule": " && ".join(f"!has(self.{name})" for name in fields),
        "message": f"only {allowed} may be set here; the rest of a pod belongs to Slipway",
        "messageExpression": f"'refused:' + {names} + '; only {allowed} may be set here'",
    }


def _overlay(allowed: str, refused: dict[str, JsonDict], *rules: Rule) -> ConfigDict:
    """The `model_config` of a struct that declares further fields only to refuse them."""

    def extend(schema: dict[str, Any]) -> None:
        schema["properties"] |= {name: field | {"description": "Refused."} for name, field in refused.items()}
        schema["x-kubernetes-validations"] = [refuse(refused, allowed), *(rule.to_json() for rule in rules)]

    return ConfigDict(json_schema_extra=extend)


_OWN_LABELS = (
    "!{key}.startsWith('slipway.dev/') && !({key} in ['app.kubernetes.io/name', 'app.kubernetes.io/managed-by'])"
)


class TemplateMetadata(Struct):
    """Labels and annotations added to the pods."""

    model_config = cel_rules(
        Rule(
            f"!has(self.labels) || self.labels.all(key, {_OWN_LABELS.format(key='key')})",
            "slipway.dev/*, app.kubernetes.io/name and app.kubernetes.io/managed-by are set by Slipway",
            ".labels",
        ),
        Rule(
            "!has(self.annotations) || self.annotations.all(key, !key.startsWith('slipway.dev/'))",
            "slipway.dev/* is set by Slipway",
            ".annotations",
        ),
    )

    labels: StringMap = Field(default_factory=dict)
    """Labels added to every pod, outside slipway.dev/*."""
    annotations: StringMap = Field(default_factory=dict)
    """Annotations added to every pod, outside slipway.dev/*."""


class ContainerResources(Struct):
    """CPU, memory and other non-GPU resources; they win over spec.resources."""

    model_config = cel_rules(*resource_rules())

    requests: ResourceMap = Field(default_factory=dict)
    """CPU and memory that the scheduler reserves, such as cpu: 500m."""
    limits: ResourceMap = Field(default_factory=dict)
    """CPU and memory that the container may use at most."""


_CONTAINER_REFUSED: dict[str, JsonDict] = {
    "args": _STRINGS,
    "command": _STRINGS,
    "envFrom": _OPEN_LIST,
    "image": _STRING,
    "imagePullPolicy": _STRING,
    "lifecycle": _OPEN,
    "livenessProbe": _OPEN,
    "ports": _OPEN_LIST,
    "readinessProbe": _OPEN,
    "resizePolicy": _OPEN_LIST,
    "restartPolicy": _STRING,
    "securityContext": _OPEN,
    "startupProbe": _OPEN,
    "stdin": _FLAG,
    "stdinOnce": _FLAG,
    "terminationMessagePath": _STRING,
    "terminationMessagePolicy": _STRING,
    "tty": _FLAG,
    "volumeDevices": _OPEN_LIST,
    "workingDir": _STRING,
}


class ContainerOverlay(Struct):
    """Changes to the container `server`, the only one."""

    model_config = _overlay(
        "name, resources, env and volumeMounts",
        _CONTAINER_REFUSED,
        Rule("self.name == 'server'", "the only container is named server", ".name"),
    )

    name: str = Field(min_length=1, max_length=63)
    """Must be server."""
    resources: ContainerResources = ContainerResources()
    """CPU, memory and other non-GPU resources; they win over spec.resources."""
    env: Annotated[tuple[EnvVar, ...], bounded_list(at_most=64, key="name")] = ()
    """Environment variables, merged by name; they win over spec.runtime.env."""
    volume_mounts: Annotated[tuple[VolumeMount, ...], bounded_list(at_most=32, key="mountPath")] = ()
    """Mounts, merged by mountPath."""


_SECCOMP = {
    "type": "object",
    "required": ["type"],
    "properties": {"type": {"type": "string", "enum": ["RuntimeDefault", "Localhost"]}, "localhostProfile": _STRING},
}


class PodSecurityOverlay(Struct):
    """The pod's security context, at least as strict as PodSecurity `restricted`."""

    model_config = _overlay(
        "runAsUser, runAsGroup, runAsNonRoot, fsGroup, fsGroupChangePolicy, supplementalGroups and seccompProfile",
        {
            "appArmorProfile": _OPEN,
            "seLinuxOptions": _OPEN,
            "seLinuxChangePolicy": _STRING,
            "supplementalGroupsPolicy": _STRING,
            "sysctls": _OPEN_LIST,
            "windowsOptions": _OPEN,
        },
        Rule("!has(self.runAsNonRoot) || self.runAsNonRoot", "runAsNonRoot may only be true", ".runAsNonRoot"),
    )

    run_as_user: int | None = Field(default=None, ge=1)
    """User id of the process, never 0."""
    run_as_group: int | None = Field(default=None, ge=1)
    """Group id of the process, never 0."""
    run_as_non_root: bool | None = None
    """May only be true."""
    fs_group: int | None = Field(default=None, ge=1)
    """Group that owns the volumes."""
    fs_group_change_policy: str | None = Field(default=None, max_length=64)
    """OnRootMismatch or Always."""
    supplemental_groups: Annotated[tuple[Annotated[int, Field(ge=1)], ...], bounded_list(at_most=32)] = ()
    """Further groups of the process."""
    seccomp_profile: Annotated[dict[str, Any], WithJsonSchema(_SECCOMP)] | None = None
    """RuntimeDefault or a Localhost profile."""


_POD_REFUSED: dict[str, JsonDict] = {
    "activeDeadlineSeconds": _NUMBER,
    "automountServiceAccountToken": _FLAG,
    "dnsConfig": _OPEN,
    "dnsPolicy": _STRING,
    "enableServiceLinks": _FLAG,
    "ephemeralContainers": _OPEN_LIST,
    "hostAliases": _OPEN_LIST,
    "hostIPC": _FLAG,
    "hostNetwork": _FLAG,
    "hostPID": _FLAG,
    "hostUsers": _FLAG,
    "hostname": _STRING,
    "initContainers": _OPEN_LIST,
    "nodeName": _STRING,
    "os": _OPEN,
    "overhead": _OPEN,
    "preemptionPolicy": _STRING,
    "priority": _NUMBER,
    "readinessGates": _OPEN_LIST,
    "resourceClaims": _OPEN_LIST,
    "resources": _OPEN,
    "restartPolicy": _STRING,
    "schedulingGates": _OPEN_LIST,
    "serviceAccount": _STRING,
    "setHostnameAsFQDN": _FLAG,
    "shareProcessNamespace": _FLAG,
    "subdomain": _STRING,
    "terminationGracePeriodSeconds": _NUMBER,
}
_POD_ALLOWED = (
    "nodeSelector, affinity, tolerations, topologySpreadConstraints, priorityClassName, runtimeClassName, "
    "schedulerName, imagePullSecrets, serviceAccountName, securityContext, containers and volumes"
)


class PodOverlay(Struct):
    """Fields that are merged into the pods; all other fields of a pod are set by Slipway and refused here."""

    model_config = _overlay(_POD_ALLOWED, _POD_REFUSED)

    node_selector: StringMap = Field(default_factory=dict)
    """Labels that a node must have."""
    affinity: Affinity | None = None
    """As in a pod: kubectl explain pod.spec.affinity."""
    tolerations: Annotated[tuple[Toleration, ...], bounded_list(at_most=32)] = ()
    """Appended to the list of the pod."""
    topology_spread_constraints: Annotated[tuple[TopologySpread, ...], bounded_list(at_most=16)] = ()
    """Appended to the list of the pod."""
    priority_class_name: str | None = Field(default=None, max_length=253)
    """Priority class of the pods."""
    runtime_class_name: str | None = Field(default=None, max_length=253)
    """Container runtime class of the pods."""
    scheduler_name: str | None = Field(default=None, max_length=253)
    """Scheduler that places the pods."""
    image_pull_secrets: Annotated[tuple[LocalReference, ...], bounded_list(at_most=16, key="name")] = ()
    """Secrets to pull the image with."""
    service_account_name: str | None = Field(default=None, max_length=253)
    """A ServiceAccount on the chart's list allowedServiceAccountNames; with another one, no pod is created."""
    security_context: PodSecurityOverlay | None = None
    """At least as strict as PodSecurity restricted."""
    containers: Annotated[tuple[ContainerOverlay, ...], bounded_list(at_most=4, key="name")] = ()
    """Only the container server."""
    volumes: Annotated[tuple[Volume, ...], bounded_list(at_most=32, key="name")] = ()
    """Volumes of the kinds that PodSecurity restricted admits, merged by name."""


class Template(Struct):
    """An overlay for the pods, within an allow-list."""

    metadata: TemplateMetadata = TemplateMetadata()
    """Labels and annotations added to the pods."""
    spec: PodOverlay = PodOverlay()
    """Fields that are merged into the pods; all other fields of a pod are set by Slipway and refused here."""
