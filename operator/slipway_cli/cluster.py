"""The cluster as the plugin uses it: reads and patches with the user's kubeconfig, so every write is the user's."""

import base64
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, cast

from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from kubernetes.config.config_exception import ConfigException
from urllib3.exceptions import HTTPError

from slipway_api import names
from slipway_api.admin_token import admin_token
from slipway_api.inference_service import InferenceService

KINDS: Final = {"InferenceService": "inferenceservices", "LoRAAdapter": "loraadapters", "WarmPool": "warmpools"}

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

    def service(self, name: str) -> InferenceService:
        """One service, as the API server has it."""
        return InferenceService.model_validate(self.get("InferenceService", name))

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
        namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
        volumes = {one["name"]: one for one in pod["spec"]["volumes"]}
        secret = volumes["gateway-key"]["secret"]["secretName"]
        with _explained(f"Secret {namespace}/{secret}"):
            key = (self._core.read_namespaced_secret(secret, namespace).data or {})["current"]
        token = admin_token(base64.b64decode(key).strip(), namespace, name)
        path = f"/api/v1/namespaces/{namespace}/pods/{name}:{names.ADMIN_PORT}/proxy/debug/routes"
        with _explained(f"routes of {namespace}/{name}"):
            # Not Authorization, which the API server's proxy removes.
            answer: Any = self._core.api_client.call_api(
                path, "GET", header_params={names.HEADER_ADMIN_TOKEN: token},
                auth_settings=["BearerToken"], _preload_content=False, _return_http_data_only=True,
            )  # fmt: skip
        return json.loads(answer.data)

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
    try:
        return str(json.loads(error.body or "")["message"])
    except (TypeError, ValueError, KeyError):
        return f"{error.status} {error.reason}"


def _moment(event: Mapping[str, Any]) -> str:
    series = event.get("series") or {}
    return str(series.get("lastObservedTime") or event.get("eventTime") or event.get("deprecatedLastTimestamp") or "")


def with_our_finalizer(objects: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The objects that our finalizer holds."""
    return (one for one in objects if names.FINALIZER in one["metadata"].get("finalizers", ()))
