"""HTTP connections to machines of the public Internet only, for addresses that a client names.

The client must not reach through this server a host that it cannot reach itself (server-side request forgery). So the
name of each request and each redirect is resolved here, all of its addresses must be public, and the connection is made
to one of these addresses: a DNS server that answers otherwise a moment later (DNS rebinding) is not asked again.

Where the environment names a proxy for the host, the proxy makes the connection and resolves the name once more; it has
to have rules of its own.
"""

import ipaddress
import socket
from collections.abc import Sequence
from typing import Final
from urllib.request import getproxies, proxy_bypass

import httpx

from slipway_runtime.storage.source import AccessDeniedError, FetchError

MOST_ADDRESSES: Final = 4  # of one name that are tried
_NAT64: Final = ipaddress.ip_network("64:ff9b::/96")  # an IPv4 address in the last 32 bits
_GLOBAL_UNICAST: Final = ipaddress.ip_network("2000::/3")  # every other IPv6 address has a special purpose
# Services of a cloud for its virtual machines at an address that looks public: Azure's wire server.
_OF_CLOUDS: Final = frozenset({ipaddress.ip_address("168.63.129.16")})


class PublicTransport(httpx.BaseTransport):
    """Sends requests to the addresses that it has checked."""

    def __init__(self) -> None:
        self._direct = httpx.HTTPTransport()
        self._proxied: dict[str, httpx.HTTPTransport] = {}

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request; raises AccessDeniedError where the host is, or may be, no public one."""
        host = request.url.raw_host.decode("ascii")
        addresses = public_addresses(host, request.url.port or (443 if request.url.scheme == "https" else 80))
        if proxy := _proxy_for(request.url):
            transport = self._proxied.setdefault(proxy, httpx.HTTPTransport(proxy=proxy))
            return transport.handle_request(request)
        for address in addresses[:-1]:
            try:
                return self._direct.handle_request(_pinned(request, address))
            except (httpx.ConnectError, httpx.ConnectTimeout):
                continue  # such as an IPv6 address on a machine without IPv6
        return self._direct.handle_request(_pinned(request, addresses[-1]))

    def close(self) -> None:
        """Close all connections."""
        for transport in (self._direct, *self._proxied.values()):
            transport.close()


def _pinned(request: httpx.Request, address: str) -> httpx.Request:
    """The same request to this address; `Host`, and the name in the certificate, stay those of the URL."""
    return httpx.Request(
        request.method,
        request.url.copy_with(host=address),
        headers=request.headers,
        stream=request.stream,
        extensions={**request.extensions, "sni_hostname": request.url.raw_host.decode("ascii")},
    )


def _proxy_for(url: httpx.URL) -> str:
    proxies = getproxies()
    proxy = proxies.get(url.scheme) or proxies.get("all") or ""
    return "" if not proxy or proxy_bypass(url.host) else proxy


def public_addresses(host: str, port: int) -> Sequence[str]:
    """The addresses of a host, at most `MOST_ADDRESSES`; raises AccessDeniedError unless all of them are public."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise FetchError(f"{host} has no address") from error
    addresses = list(dict.fromkeys(str(address[0]) for *_, address in found))
    if not addresses or not all(is_public(address) for address in addresses):
        raise AccessDeniedError(f"{host} is an address of a private network, from which clients may load nothing")
    return addresses[:MOST_ADDRESSES]


def is_public(address: str) -> bool:
    """Whether an address belongs to a machine on the public Internet; one that embeds an IPv4 address, if both do."""
    known = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(known, ipaddress.IPv6Address):
        if known.ipv4_mapped is not None:
            return is_public(str(known.ipv4_mapped))
        if known in _NAT64:
            return is_public(str(ipaddress.IPv4Address(int(known) & 0xFFFF_FFFF)))
        if known not in _GLOBAL_UNICAST:
            return False
        if known.sixtofour is not None and not is_public(str(known.sixtofour)):
            return False
    return known.is_global and not known.is_multicast and known not in _OF_CLOUDS
