"""Sockets of this process: which are found, and what shutting does to them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from picotron_ray.comm import sockets
from picotron_ray.comm.sockets import SocketInfo, shut_connections, tcp_sockets


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket, socket.socket]]:
    """One that listens, one that has connected to it, and the one that was accepted."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
        with client, accepted:
            yield server, client, accepted


def by_number() -> dict[int, SocketInfo]:
    return {info.fd: info for info in tcp_sockets()}


def test_tcp_sockets_are_found_with_both_ends(
    pair: tuple[socket.socket, socket.socket, socket.socket],
) -> None:
    server, client, accepted = pair
    found = by_number()
    for one, listening, peer in (
        (server, True, None),
        (client, False, server.getsockname()),
        (accepted, False, client.getsockname()),
    ):
        inode = os.readlink(f"/proc/self/fd/{one.fileno()}")
        assert found[one.fileno()] == SocketInfo(one.fileno(), inode, listening, one.getsockname(), peer)


def test_other_descriptors_are_not_found() -> None:
    one, other = socket.socketpair()
    with one, other, socket.socket(type=socket.SOCK_DGRAM) as datagrams, open("/dev/null") as file:
        found = by_number()
        for each in (one, other, datagrams, file):
            assert each.fileno() not in found
    with socket.socket(socket.AF_INET6) as new_protocol:
        assert new_protocol.fileno() in by_number()


def test_a_mapped_address_is_a_plain_one() -> None:
    assert sockets._plain(("::ffff:10.0.0.3", 77, 5, 9)) == ("10.0.0.3", 77)
    assert sockets._plain(("fe80::1", 78, 0, 0)) == ("fe80::1", 78)


def test_connections_that_are_wanted_are_shut_for_reading(
    pair: tuple[socket.socket, socket.socket, socket.socket],
) -> None:
    server, client, accepted = pair
    client.settimeout(5)
    assert shut_connections(lambda info: info.fd in (server.fileno(), client.fileno())) == 1
    assert client.recv(1) == b"", "what reads has ended"
    client.sendall(b"x")
    assert accepted.recv(1) == b"x", "what writes goes on, and so does the other end"
    with socket.create_connection(server.getsockname()) as later:
        server.accept()[0].close()
        assert shut_connections(lambda info: False) == 0
        assert later.fileno() in by_number()


def test_all_that_are_wanted_are_counted(pair: tuple[socket.socket, socket.socket, socket.socket]) -> None:
    numbers = {one.fileno() for one in pair}
    assert shut_connections(lambda info: info.fd in numbers) == 2


def test_a_number_that_was_used_again_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, pair: tuple[socket.socket, socket.socket, socket.socket]
) -> None:
    _, client, accepted = pair
    seen = by_number()[client.fileno()]._replace(inode="socket:[1]")
    gone = seen._replace(fd=9_999)
    monkeypatch.setattr(sockets, "tcp_sockets", lambda: iter([gone, seen]))
    assert shut_connections(lambda info: True) == 0
    accepted.sendall(b"y")
    assert client.recv(1) == b"y"
