"""A DNS server for Services: answers A queries; AAAA gets no data, every other name NXDOMAIN."""

import asyncio
import contextlib
import ipaddress
import struct
from collections.abc import Callable
from typing import cast

A, IN, NAME_ERROR = 1, 1, 3
SECONDS_TO_LIVE = 1

Lookup = Callable[[str], list[str] | None]  # a name's IPv4 addresses; None when there is no such name


class Dns(asyncio.DatagramProtocol):
    """Answers each datagram as it arrives."""

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, client: tuple[str, int]) -> None:
        with contextlib.suppress(IndexError, struct.error, UnicodeDecodeError):  # not a question we can read
            self._transport.sendto(answer(data, self._lookup), client)


def answer(query: bytes, lookup: Lookup) -> bytes:
    """The reply to one query."""
    labels, position = [], 12
    while length := query[position]:
        labels.append(query[position + 1 : position + 1 + length].decode())
        position += 1 + length
    question = query[12 : position + 5]
    (kind,) = struct.unpack_from("!H", query, position + 1)
    found = lookup(".".join(labels).lower())
    addresses = found if found and kind == A else []
    error = NAME_ERROR if found is None else 0
    header = query[:2] + struct.pack("!HHHHH", 0x8580 | error, 1, len(addresses), 0, 0)
    record = struct.pack("!HHHIH", 0xC00C, A, IN, SECONDS_TO_LIVE, 4)  # 0xC00C: the name in the question
    return header + question + b"".join(record + ipaddress.IPv4Address(ip).packed for ip in addresses)
