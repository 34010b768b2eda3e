"""The cluster as the plugin uses it: reads and patches with the user's kubeconfig, so every write is the user's."""

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any, Final, cast
from urllib.parse import urlencode

from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from kubernetes.config.config_exception import ConfigException
from urllib3.exceptions import HTTPError

from slipway_api import internal_tls, names
from slipway_api.admin_token import admin_token
from slipway_api.inference_service import InferenceService
from slipway_api.service_template import ServiceTemplate, with_inherited

KINDS: Final = {"InferenceService": "inferenceservices", "LoRAAdapter": "loraadapters", "WarmPool": "warmpools"}

UNAUTHORIZED: Final = 401
ADMIN_SECONDS: Final = 10.0  # for the answer of an admin port
LOG_LINES: Final = 2_000  # the newest of each container
LOG_BYTES: Final = 2**20  # the newest of each container


class ClusterError(Exception):
    """The API server refused or did not answer; the message is for the user."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class Cluster:
    """One namespace of one cluster."""

    kubeconfig: str | None = None
    """Path of the kubeconfig; None: KUBECONFIG, or ~/.kube/config."""

    def __init__(self, namespace: str = "", context: str = "") -> None:
        """An empty namespace is that of the kubeconfig's context."""
        try:
            config.load_kube_config(config_file=self.kubeconfig, context=context or None)  # type: ignore[no-untyped-call]
            _, active = config.list_kube_config_contexts(config_file=self.kubeconfig)  # type: ignore[no-untyped-call]
        except (ConfigException, OSError) as exc:
            raise ClusterError(f"no kubeconfig: {exc}") from exc
        inherited = (active or {}).get("context", {}).get("namespace")
        self.namespace = namespace or inherited or "default"
        self._objects = client.CustomObjectsApi()
        self._core = client.CoreV1Api()
        self._apps = client.AppsV1Api()
        self._events = client.EventsV1Api()
        self._version = client.VersionApi()

    def in_namespace(self, namespace: str) -> "Cluster":
        """The same cluster, in another namespace."""
        other = copy(self)
        other.namespace = namespace
        return other

    def service(self, name: str) -> InferenceService:
        """One service, with the blocks that it inherits from templates."""
        return InferenceService.model_validate(with_inherited(self.get("InferenceService", name)))

    def templates(self) -> list[dict[str, Any]]:
        """The ServiceTemplates of the cluster."""
        with _explained(ServiceTemplate.PLURAL):
            found = self._objects.list_cluster_custom_object(names.GROUP, names.VERSION, ServiceTemplate.PLURAL)
        return list(cast(dict[str, Any], found)["items"])

    def get(self, kind: str, name: str) -> dict[str, Any]:
        """One object of our kinds as JSON."""
        with _explained(f"{kind} {self.namespace}/{name}"):
            found = self._objects.get_namespaced_custom_object(
                names.GROUP, names.VERSION, self.namespace, KINDS[kind], name
            )
        return cast(dict[str, Any], found)

    def objects(self, kind: str, *, all_namespaces: bool = False) -> list[dict[str, Any]]:
        """All objects of one of our kinds; none where its CustomResourceDefinition is not installed."""
        plural = KINDS[kind]
        try:
            with _explained(plural):
                if all_namespaces:
                    found = self._objects.list_cluster_custom_object(names.GROUP, names.VERSION, plural)
                else:
                    found = self._objects.list_namespaced_custom_object(
                        names.GROUP, names.VERSION, self.namespace, plural
                    )
        except ClusterError as exc:
            if exc.status == 404:
                return []
            raise
        return list(cast(dict[str, Any], found)["items"])

    def patch(self, kind: str, name: str, body: Mapping[str, Any]) -> None:
        """Merges into one object of our kinds, as `kubectl patch --type=merge` does."""
        with _explained(f"{kind} {self.namespace}/{name}"):
            answer = self._objects.patch_namespaced_custom_object(
                names.GROUP, names.VERSION, self.namespace, KINDS[kind], name, dict(body)
            )
        if not isinstance(answer, dict) or answer.get("kind") != kind:
            raise ClusterError(f"{kind} {self.namespace}/{name}: the answer is not of a Kubernetes API server")

    def remove_finalizer(self, kind: str, body: Mapping[str, Any]) -> None:
        """Removes our finalizer from one object, of any namespace; others stay."""
        metadata = body["metadata"]
        kept = [one for one in metadata.get("finalizers", ()) if one != names.FINALIZER]
        with _explained(f"{kind} {metadata['namespace']}/{metadata['name']}"):
            self._objects.patch_namespaced_custom_object(
                names.GROUP, names.VERSION, metadata["namespace"], KINDS[kind], metadata["name"],
                {"metadata": {"finalizers": kept, "resourceVersion": metadata["resourceVersion"]}},
            )  # fmt: skip

    def pods(self, service: str = "") -> list[dict[str, Any]]:
        """The pods of one service, or of all of them."""
        selector = names.MANAGED_SELECTOR + (f",{names.LABEL_SERVICE}={service}" if service else "")
        with _explained("pods"):
            found = self._core.list_namespaced_pod(self.namespace, label_selector=selector)
        return [self._plain(pod) for pod in found.items]

    def installation_pods(self, namespace: str) -> list[dict[str, Any]]:
        """The pods of operator and gateway in the namespace of the release."""
        selector = "app.kubernetes.io/part-of=slipway,app.kubernetes.io/component in (operator, gateway)"
        with _explained(f"pods of {namespace}"):
            found = self._core.list_namespaced_pod(namespace, label_selector=selector)
        return [self._plain(pod) for pod in found.items]

    def nodes(self) -> list[dict[str, Any]]:
        """All nodes, without the lists of their images."""
        with _explained("nodes"):
            found = [self._plain(node) for node in self._core.list_node().items]
        for node in found:
            node.get("status", {}).pop("images", None)
        return found

    def log(self, namespace: str, pod: str, container: str, *, previous: bool) -> str:
        """The newest lines of one container, or of the one before its last restart; bounded."""
        with _explained(f"log of {namespace}/{pod} {container}"):
            # As bytes: the client would decode them strictly.
            answer: Any = self._core.read_namespaced_pod_log(
                pod, namespace, container=container, previous=previous,
                tail_lines=LOG_LINES, timestamps=True, _preload_content=False,
            )  # fmt: skip
        return bytes(answer.data[-LOG_BYTES:]).decode("utf-8", "replace")

    def gateway_routes(self, pod: Mapping[str, Any]) -> Any:
        """The routing table of one gateway. Needs the rights to read the gateway's key and to use `pods/proxy`."""
        return self._read_admin_port(pod, "/debug/routes", self._gateway_tokens(pod))

    def gateway_requests(self, pod: Mapping[str, Any], request_id: str) -> list[dict[str, Any]]:
        """The accounts that one gateway has of a request. Needs the same rights as `gateway_routes`."""
        path = f"{names.PATH_REQUESTS}?{urlencode({names.PARAMETER_ID: request_id})}"
        return list(self._read_admin_port(pod, path, self._gateway_tokens(pod))["requests"])

    def replica_requests(
        self, namespace: str, name: str, request_id: str, operator: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        """The accounts that one replica has of a request. Needs the rights to read the Secret that `operator` mounts
        for the admin ports of replicas, and to use `pods/proxy` in the namespace of the replica."""
        with _explained(f"pod {namespace}/{name}"):
            pod = self._plain(self._core.read_namespaced_pod(name, namespace))
        nonce = pod["metadata"].get("annotations", {}).get(names.ANNOTATION_ADMIN_NONCE, "")
        tokens = [admin_token(key, namespace, name, nonce) for key in self._keys(operator, "admin-master")]
        path = f"{names.PATH_REQUESTS}?{urlencode({names.PARAMETER_ID: request_id})}"
        return list(self._read_admin_port(pod, path, tokens)["requests"])

    def gateway_token(self, pod: Mapping[str, Any]) -> str:
        """The token of the admin port of one gateway. Needs the right to read the gateway's key."""
        return self._gateway_tokens(pod)[0]

    def _gateway_tokens(self, pod: Mapping[str, Any]) -> list[str]:
        namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
        return [admin_token(key, namespace, name) for key in self._keys(pod, "gateway-key")]

    def _keys(self, pod: Mapping[str, Any], volume: str) -> list[bytes]:
        """The keys in the Secret of this volume: the current one, and during a rotation the previous one."""
        namespace = pod["metadata"]["namespace"]
        volumes = {one["name"]: one for one in pod["spec"].get("volumes", ())}
        if volume not in volumes:
            raise ClusterError(f"pod {namespace}/{pod['metadata']['name']} has no volume {volume}")
        secret = volumes[volume]["secret"]["secretName"]
        with _explained(f"Secret {namespace}/{secret}"):
            data = self._core.read_namespaced_secret(secret, namespace).data or {}
        keys = [base64.b64decode(data[name]).strip() for name in ("current", "previous") if data.get(name)]
        if not keys:
            raise ClusterError(f"Secret {namespace}/{secret} has no key `current`")
        return keys

    def _read_admin_port(self, pod: Mapping[str, Any], path: str, tokens: Sequence[str]) -> Any:
        """The JSON at `path` on the admin port of a pod; the tokens are tried in their order."""
        namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
        speaks_tls = any(one["name"] == internal_tls.VOLUME for one in pod["spec"].get("volumes") or ())
        target = f"{'https:' if speaks_tls else ''}{name}:{names.ADMIN_PORT}"
        proxied = f"/api/v1/namespaces/{namespace}/pods/{target}/proxy{path}"
        for number, token in enumerate(tokens, start=1):
            try:
                return json.loads(self._get(proxied, token, f"admin port of {namespace}/{name}"))
            except ClusterError as exc:
                if exc.status != UNAUTHORIZED or number == len(tokens):
                    raise
        raise ClusterError(f"there is no token for the admin port of {namespace}/{name}")

    def _get(self, path: str, token: str, what: str) -> bytes:
        """The body at `path` of the API server, with an admin token beside the user's own credentials."""
        api = self._core.api_client
        # Not Authorization, which the API server's proxy removes.
        request = api.param_serialize(
            "GET", path, header_params={names.HEADER_ADMIN_TOKEN: token}, auth_settings=["BearerToken"]
        )
        with _explained(what):
            answer = api.call_api(*request, _request_timeout=ADMIN_SECONDS)
            body = bytes(answer.read())
        if not 200 <= answer.status < 300:
            raise ClusterError(f"{what}: {_message_of(body) or f'{answer.status} {answer.reason}'}", answer.status)
        return body

    def revisions(self) -> list[dict[str, Any]]:
        """The ControllerRevisions of services."""
        with _explained("controllerrevisions"):
            found = self._apps.list_namespaced_controller_revision(
                self.namespace, label_selector=names.MANAGED_SELECTOR
            )
        return [self._plain(one) for one in found.items]

    def events(self, name: str = "") -> list[dict[str, Any]]:
        """The events about objects of our kinds and their pods, oldest first."""
        with _explained("events"):
            # As raw JSON: the client's model refuses the events of a kubelet, whose eventTime is null.
            answer: Any = self._events.list_namespaced_event(self.namespace, _preload_content=False)
        found: list[dict[str, Any]] = json.loads(answer.data)["items"]
        ours = [one for one in found if one.get("reportingController") == names.FIELD_MANAGER]
        if name:
            ours = [one for one in ours if (one.get("regarding") or {}).get("name") == name]
        return sorted(ours, key=_moment)

    def evict(self, pod: str) -> None:
        """Asks for the eviction of a pod: refused while a PodDisruptionBudget forbids it."""
        body = client.V1Eviction(metadata=client.V1ObjectMeta(name=pod, namespace=self.namespace))
        with _explained(f"pod {self.namespace}/{pod}"):
            self._core.create_namespaced_pod_eviction(pod, self.namespace, body)

    def request_replacement(self, pod: str, moment: str) -> None:
        """Annotates a pod, so that the operator replaces it within the surge: the replacement is ready first."""
        body = {"metadata": {"annotations": {names.ANNOTATION_REPLACE: moment}}}
        with _explained(f"pod {self.namespace}/{pod}"):
            self._core.patch_namespaced_pod(pod, self.namespace, body)

    def server_version(self) -> str:
        """The version of the API server."""
        with _explained("the API server's version"):
            return str(self._version.get_code().git_version)

    def _plain(self, body: Any) -> dict[str, Any]:
        plain: dict[str, Any] = self._core.api_client.sanitize_for_serialization(body)
        return plain


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Turns the client's exceptions into one sentence."""
    try:
        yield
    except ApiException as exc:
        raise ClusterError(f"{what}: {_message(exc)}", exc.status) from exc
    except (OSError, HTTPError) as exc:
        raise ClusterError(f"{what}: the API server does not answer: {exc}") from exc


def _message(error: ApiException) -> str:
    return _message_of(error.body or "") or f"{error.status} {error.reason}"


def _message_of(body: str | bytes) -> str:
    """The sentence in the body of an error; empty if it has none."""
    try:
        return str(json.loads(body)["message"])
    except (TypeError, ValueError, KeyError):
        return ""


def _moment(event: Mapping[str, Any]) -> str:
    series = event.get("series") or {}
    return str(series.get("lastObservedTime") or event.get("eventTime") or event.get("deprecatedLastTimestamp") or "")


def component_of(pod: Mapping[str, Any]) -> str:
    """The part of the installation that a pod is: operator or gateway."""
    return str(pod["metadata"].get("labels", {}).get("app.kubernetes.io/component", ""))


def with_our_finalizer(objects: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The objects that our finalizer holds."""
    return (one for one in objects if names.FINALIZER in one["metadata"].get("finalizers", ()))
