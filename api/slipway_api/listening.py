"""Binds the sockets of a server port: `::` means all addresses of the machine, IPv4 and IPv6."""

import errno
import socket
from typing import Final

ALL_ADDRESSES: Final = "::"
_NO_SUCH_FAMILY: Final = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.EPROTONOSUPPORT)
_TRIES: Final = 20  # for port 0: the port that IPv4 got may be taken on IPv6


def bound_sockets(host: str, port: int) -> list[socket.socket]:
    """Bound TCP sockets of one port number; raises OSError.

    `::` gives one socket for each family that the machine has, so that peers keep their own form of address. Any other
    host gives one socket.
    """
    if host != ALL_ADDRESSES:
        return [_bound(socket.AF_INET6 if ":" in host else socket.AF_INET, host, port)]
    for attempt in range(_TRIES):
        found: list[socket.socket] = []
        try:
            for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, ALL_ADDRESSES)):
                number = found[0].getsockname()[1] if found else port
                try:
                    found.append(_bound(family, address, number))
                except OSError as error:
                    if error.errno not in _NO_SUCH_FAMILY:
                        raise
        except OSError as error:
            for one in found:
                one.close()
            if port or error.errno != errno.EADDRINUSE or attempt == _TRIES - 1:
                raise
            continue
        if found:
            return found
        break
    raise OSError(errno.EADDRNOTAVAIL, f"this machine has neither IPv4 nor IPv6 for port {port}")


def _bound(family: socket.AddressFamily, host: str, port: int) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.setblocking(False)
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return bound
