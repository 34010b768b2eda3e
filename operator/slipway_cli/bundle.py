"""Writes a support bundle: objects, pods, events, logs, nodes and the gateways' routes, without secrets and prompts.

Removed before anything is written: values of environment variables, arguments of containers, chat templates, warm
prompts and prompts of gates, and in logs whatever looks like a token. Secrets and ConfigMaps are not written at all.
A part that cannot be read is named in `not-collected.json`; the others are written.
"""

import json
import re
import tarfile
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any, Final

from slipway_api import __version__
from slipway_api.words import count
from slipway_cli.cluster import KINDS, Cluster, ClusterError

REMOVED: Final = "<removed>"
# Fields whose text may be a prompt or a secret, wherever they stand in an object.
PRIVATE_FIELDS: Final = frozenset({"chatTemplate", "content", "prompt", "mustMatch", "args", "command", "value"})
PRIVATE_ANNOTATIONS: Final = frozenset({"kubectl.kubernetes.io/last-applied-configuration"})
LOGGED_PODS: Final = 30  # pods whose logs are collected: those of operator and gateway first
# The value behind a name that promises a secret, and tokens by their well-known beginnings.
_SECRETS_IN_TEXT: Final = (
    re.compile(r"(?i)((?:authorization|api[-_]?key|[-_]token|password|secret[-_]?(?:access[-_]?)?key|signature)"
               r"[\"']?\s*[:=]\s*[\"']?(?:bearer\s+)?)[^\s\"',&]+"),
    re.compile(r"(?i)(bearer\s+)[^\s\"',]+"),
    re.compile(r"()\b(?:sk-|hf_|AKIA|ASIA|ghp_|eyJ)[A-Za-z0-9_.\-]{8,}"),
    re.compile(r"(://)[^/\s@]+@"),
)  # fmt: skip


def collect_bundle(cluster: Cluster, release_namespace: str) -> dict[str, Any]:
    """`name -> content` of all files: objects for JSON files, texts for logs. One unreadable part stops no other."""
    missing: dict[str, str] = {}

    def read(part: str, get: Callable[[], Any], default: Any = None) -> Any:
        try:
            return get()
        except ClusterError as exc:
            missing[part] = " ".join(str(exc).split())
        except Exception as exc:  # noqa: BLE001  an answer that cannot be read costs this part alone
            missing[part] = f"{type(exc).__name__}: {' '.join(str(exc).split())[:500]}"
        return default

    pods = read("pods", cluster.pods, [])
    system = read("installation", lambda: cluster.installation_pods(release_namespace), [])
    files: dict[str, Any] = {
        "versions": {"kubectl-slipway": __version__, "kubernetes": read("versions", cluster.server_version, "")},
        "pods": pods,
        "installation": system,
        "events": read("events", cluster.events, []),
        "revisions": read("revisions", cluster.revisions, []),
        "nodes": read("nodes", cluster.nodes, []),
    }
    for kind, plural in KINDS.items():
        files[plural] = read(plural, partial(cluster.objects, kind), [])
    with_logs = [*system, *pods]
    for pod in with_logs[:LOGGED_PODS]:
        files |= read("logs", partial(_logs, cluster, pod, read), {})
    if len(with_logs) > LOGGED_PODS:
        missing["logs"] = f"the bundle has the logs of {LOGGED_PODS} of {count(len(with_logs), 'pod')}"
    for pod in system:
        metadata = pod["metadata"]
        if metadata.get("labels", {}).get("app.kubernetes.io/component") == "gateway":
            part = f"routes/{metadata['name']}"
            files[part] = read(part, partial(cluster.gateway_routes, pod))
    files["not-collected"] = missing
    return {name: content for name, content in files.items() if content is not None}


def _logs(cluster: Cluster, pod: Mapping[str, Any], read: Callable[[str, Callable[[], Any]], Any]) -> dict[str, str]:
    """The newest lines of each container that has started, and those from before its last restart."""
    namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
    found = {}
    status_of_pod = pod.get("status", {})
    lists = (status_of_pod.get("initContainerStatuses") or (), status_of_pod.get("containerStatuses") or ())
    for status in chain.from_iterable(lists):
        container, state = status["name"], status.get("state") or {}
        runs = [("", False)] if "running" in state or "terminated" in state else []
        runs += [("-previous", True)] if status.get("restartCount") else []
        for suffix, previous in runs:
            part = f"logs/{name}-{container}{suffix}.log"
            text = read(part, partial(cluster.log, namespace, name, container, previous=previous))
            if text is not None:
                found[part] = text
    return found


def redact(value: Any) -> Any:
    """The same object without texts that may be secret or private; its structure stays."""
    if isinstance(value, Mapping):
        return {
            key: REMOVED if key in PRIVATE_FIELDS | PRIVATE_ANNOTATIONS and one is not None else redact(one)
            for key, one in value.items()
            if key != "managedFields"
        }
    if isinstance(value, list):
        return [redact(one) for one in value]
    return value


def redact_text(text: str) -> str:
    """The same text without tokens, keys and passwords."""
    for pattern in _SECRETS_IN_TEXT:
        text = pattern.sub(rf"\g<1>{REMOVED}", text)
    return text


def write_bundle(path: Path, files: Mapping[str, Any]) -> list[str]:
    """Writes `name -> object` as JSON files, and texts as they are, to a tar.gz; returns their names."""
    made = datetime.now(UTC)
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            if isinstance(content, str):
                data, file = redact_text(content).encode(), name
            else:
                data, file = json.dumps(redact(content), indent=1, sort_keys=True, default=str).encode(), f"{name}.json"
            entry = tarfile.TarInfo(f"slipway-bundle/{file}")
            entry.size, entry.mtime, entry.mode = len(data), int(made.timestamp()), 0o600
            archive.addfile(entry, BytesIO(data))
    return list(files)
