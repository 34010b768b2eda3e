"""Finds the API server's address and the credentials for it: in-cluster credentials first, else a kubeconfig.

The official client's loaders read both; we keep only what an HTTP connection needs.
"""

import asyncio
import ipaddress
import ssl
import time
import urllib.request
from collections.abc import Callable, Mapping
from typing import Final, Protocol
from urllib.parse import urlsplit

from kubernetes import config
from kubernetes.client import Configuration

from slipway_kube.errors import NoCredentials

REFRESH_SECONDS: Final = 60.0  # a projected ServiceAccount token is replaced long before it expires


class Credentials(Protocol):
    """Credentials of this process; `headers` is called before every request."""

    async def headers(self) -> Mapping[str, str]:
        """Headers that authenticate a request."""
        ...

    def forget(self) -> None:
        """Discard the cached headers, because the server answered 401; the next request reads their source again."""
        ...


class Connection:
    """Everything needed to connect to one API server."""

    def __init__(
        self,
        server: str,
        credentials: Credentials,
        *,
        tls: ssl.SSLContext | None = None,
        tls_server_name: str | None = None,
        proxy: str | None = None,
    ) -> None:
        self.server = server.rstrip("/")
        self.credentials = credentials
        self.tls = tls
        self.tls_server_name = tls_server_name
        self.proxy = proxy


class StaticCredentials:
    """A bearer token that never changes, or none (client certificates, tests)."""

    def __init__(self, token: str = "") -> None:
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    async def headers(self) -> Mapping[str, str]:
        """The same headers, always."""
        return self._headers

    def forget(self) -> None:
        """Nothing to discard: these headers never change."""


class RefreshingCredentials:
    """Headers returned by a loader that is called again every minute, and at once after a 401.

    The loader may read files or run an `exec` plugin, so it runs in a thread.
    """

    def __init__(self, load: Callable[[], Mapping[str, str]], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._load = load
        self._clock = clock
        self._headers: Mapping[str, str] = {}
        self._fresh_until = float("-inf")
        self._lock = asyncio.Lock()

    async def headers(self) -> Mapping[str, str]:
        """Current headers, at most a minute old. When the loader fails, the previous ones stay in use."""
        if self._clock() < self._fresh_until:
            return self._headers
        async with self._lock:
            if self._clock() >= self._fresh_until:
                try:
                    self._headers = await asyncio.to_thread(self._load)
                except (config.ConfigException, OSError) as exc:
                    if not self._headers:
                        raise NoCredentials(str(exc)) from exc
                self._fresh_until = self._clock() + REFRESH_SECONDS
        return self._headers

    def forget(self) -> None:
        """Call the loader again before the next request."""
        self._fresh_until = float("-inf")


def load(kubeconfig: str | None = None, context: str | None = None) -> Connection:
    """The connection of this process: the named kubeconfig, else in-cluster, else the default kubeconfig."""
    if kubeconfig is None:
        try:
            return _connection(_from_cluster)
        except config.ConfigException:
            pass  # not in a pod
    try:
        return _connection(lambda: _from_kubeconfig(kubeconfig, context))
    except (config.ConfigException, OSError) as exc:
        raise NoCredentials(f"no in-cluster credentials and no usable kubeconfig: {exc}") from exc


def _from_cluster() -> Configuration:
    configuration = Configuration()
    config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    return configuration


def _from_kubeconfig(path: str | None, context: str | None) -> Configuration:
    configuration = Configuration()
    config.load_kube_config(  # type: ignore[no-untyped-call]
        config_file=path, context=context, client_configuration=configuration
    )
    return configuration


def _connection(load_configuration: Callable[[], Configuration]) -> Connection:
    configuration = load_configuration()
    return Connection(
        configuration.host,
        RefreshingCredentials(lambda: _headers(load_configuration())),
        tls=_tls(configuration) if configuration.host.startswith("https") else None,
        tls_server_name=configuration.tls_server_name,
        proxy=_proxy(configuration),
    )


def _headers(configuration: Configuration) -> Mapping[str, str]:
    bearer = configuration.get_api_key_with_prefix("BearerToken") or configuration.api_key.get("authorization")
    if bearer:
        # In-cluster the loader returns "bearer <token>", with the file's trailing newline where it has one.
        return {"Authorization": bearer.strip()}
    basic = configuration.get_basic_auth_token() if configuration.username else None
    return {"Authorization": basic} if basic else {}


def _tls(configuration: Configuration) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
    if configuration.cert_file:
        context.load_cert_chain(configuration.cert_file, configuration.key_file)
    if not configuration.verify_ssl:  # the user's kubeconfig sets insecure-skip-tls-verify
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _proxy(configuration: Configuration) -> str | None:
    """The HTTP proxy of the kubeconfig or the environment; None for an address of this machine (as in Go's client)."""
    host = urlsplit(configuration.host).hostname or ""
    try:
        is_local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_local = host == "localhost"
    if is_local or urllib.request.proxy_bypass(host):
        return None
    proxy: str | None = configuration.proxy
    return proxy
