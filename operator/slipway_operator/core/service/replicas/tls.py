"""Makes a pod serve TLS on its ports: the certificate of its namespace as a volume, the flags, and probes by HTTPS.

The volume is also the record by which gateway and operator know how to call the pod: no one can change a pod's volumes,
so none can make them speak plain text to it. A kubelet does not verify the certificates of probes.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from slipway_api import internal_tls, names
from slipway_operator.core.service.replicas.engine_pod import AGENT_CONTAINER

FLAG: Final = "--tls-directory"
READABLE: Final = 0o440  # by user and group of the pod
_PROBES: Final = ("startupProbe", "readinessProbe", "livenessProbe")
_PORTS: Final = ("admin", names.ADMIN_PORT, names.SERVING_PORT)


def secured(pod: Mapping[str, Any], *, is_ours: bool) -> dict[str, Any]:
    """The manifest of a pod that serves TLS; the pod that is given stays as it is.

    is_ours: whether it runs our runtime. The flags of another engine and of slipway-agent are there already.
    """
    spec = pod["spec"]
    containers = [
        _secured(one, with_flag=is_ours) if one["name"] in (names.SERVER_CONTAINER, AGENT_CONTAINER) else one
        for one in spec["containers"]
    ]
    return {**pod, "spec": {**spec, "containers": containers, "volumes": _with_certificate(spec["volumes"])}}


def _secured(container: Mapping[str, Any], *, with_flag: bool) -> dict[str, Any]:
    flagged = {}
    if with_flag:
        serve, *flags = container["args"]
        # Before the user's own arguments, of which the last one counts.
        flagged = {"args": [serve, FLAG, internal_tls.DIRECTORY, *flags]}
    return {
        **container,
        **flagged,
        "volumeMounts": _with_mount(container["volumeMounts"]),
        **{probe: _by_https(container[probe]) for probe in _PROBES if probe in container},
    }


def _with_certificate(volumes: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    secret = {"secretName": internal_tls.REPLICAS_SECRET, "defaultMode": READABLE}
    others = [dict(one) for one in volumes if one["name"] != internal_tls.VOLUME]
    return [*others, {"name": internal_tls.VOLUME, "secret": secret}]


def _with_mount(mounts: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    mine = {"name": internal_tls.VOLUME, "mountPath": internal_tls.DIRECTORY, "readOnly": True}
    return [*(dict(one) for one in mounts if one["mountPath"] != internal_tls.DIRECTORY), mine]


def _by_https(probe: Mapping[str, Any]) -> dict[str, Any]:
    asked = probe.get("httpGet")
    if asked is None or asked["port"] not in _PORTS:
        return dict(probe)
    return {**probe, "httpGet": {**asked, "scheme": "HTTPS"}}
