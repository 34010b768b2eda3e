"""Ports are reachable by IPv4 and IPv6. review/operator-users.md 6."""

import errno
import socket

import pytest

from slipway_api import listening
from slipway_api.listening import bound_sockets


def families(sockets):
    return {one.family for one in sockets}


def close(sockets):
    for one in sockets:
        one.close()


def test_all_addresses_are_one_port_of_both_families():
    sockets = bound_sockets("::", 0)

    assert families(sockets) == {socket.AF_INET, socket.AF_INET6}
    assert len({one.getsockname()[1] for one in sockets}) == 1
    close(sockets)


def test_one_address_is_one_socket():
    sockets = bound_sockets("127.0.0.1", 0)

    assert families(sockets) == {socket.AF_INET}
    close(sockets)


@pytest.mark.parametrize("absent", [socket.AF_INET, socket.AF_INET6])
def test_a_family_that_the_machine_does_not_have_is_left_out(absent, monkeypatch):
    bind = listening._bound

    def without(family, host, port):
        if family == absent:
            raise OSError(errno.EAFNOSUPPORT, "no such family")
        return bind(family, host, port)

    monkeypatch.setattr(listening, "_bound", without)

    sockets = bound_sockets("::", 0)

    assert families(sockets) == {socket.AF_INET, socket.AF_INET6} - {absent}
    close(sockets)


def test_a_port_that_is_taken_is_an_error():
    taken = bound_sockets("::", 0)
    for one in taken:
        one.listen()

    with pytest.raises(OSError, match="in use"):
        bound_sockets("::", taken[0].getsockname()[1])
    close(taken)
