"""What the kernel says about bytes on their way, on real connections."""

from __future__ import annotations

import os
import socket
import time

import torch

from ddp_crossover.comm.pace import SocketBacklog, connected_tcp_sockets
from equivalence import Case, Run
from tcp import drain, fill, tcp_pair

SOON_S = 10.0


def _empties(backlog: SocketBacklog) -> bool:
    deadline_s = time.monotonic() + SOON_S
    while backlog.unacknowledged_bytes() and time.monotonic() < deadline_s:
        time.sleep(1e-3)
    return backlog.unacknowledged_bytes() == 0


def test_what_the_peer_has_not_taken_counts_and_what_it_has_does_not() -> None:
    with tcp_pair() as (writer, reader):
        backlog = SocketBacklog([writer.fileno()])
        assert backlog.unacknowledged_bytes() == 0
        written = fill(writer)
        assert 0 < backlog.unacknowledged_bytes() <= written
        drain(reader, written)
        assert _empties(backlog)


def test_all_sockets_count() -> None:
    with tcp_pair() as (one, _), tcp_pair() as (other, _):
        parts = [SocketBacklog([end.fileno()]) for end in (one, other)]
        fill(one)
        fill(other)
        both = SocketBacklog([one.fileno(), other.fileno()]).unacknowledged_bytes()
        assert both == sum(part.unacknowledged_bytes() for part in parts)
        assert all(part.unacknowledged_bytes() for part in parts)


def test_a_closed_socket_and_what_is_no_socket_count_as_empty() -> None:
    with tcp_pair() as (writer, _):
        backlog = SocketBacklog([writer.fileno()])
        fill(writer)
        assert backlog.unacknowledged_bytes() > 0
        writer.close()
        assert backlog.unacknowledged_bytes() == 0
    reading, writing = os.pipe()
    os.write(writing, b"bytes")
    try:
        assert SocketBacklog([writing, 10**6]).unacknowledged_bytes() == 0
    finally:
        os.close(reading)
        os.close(writing)


def test_only_connected_tcp_sockets_are_found() -> None:
    before = connected_tcp_sockets()
    with tcp_pair() as (writer, reader), socket.socket() as unconnected, socket.socketpair()[0] as local:
        with socket.socket(type=socket.SOCK_DGRAM) as datagram:
            datagram.connect(writer.getsockname())
            found = connected_tcp_sockets() - before
        assert found == {writer.fileno(), reader.fileno()}
        assert unconnected.fileno() not in found and local.fileno() not in found
        assert writer.getpeername()  # its copy was closed, not the connection
    assert connected_tcp_sockets() == before


def _sockets_of_a_link() -> tuple[int, int]:
    """How many connections a link watches, and how many of these belong to groups made before or after it."""
    before = connected_tcp_sockets()
    run = Run(Case(), with_dear=True)
    run.attach()
    with_link = connected_tcp_sockets()
    later = torch.distributed.new_group()
    others = before | connected_tcp_sockets() - with_link
    watched = set(run.state._link.pace._backlog._fds)
    torch.distributed.destroy_process_group(later)
    run.detach()
    return len(watched), len(watched & others)


def test_a_link_watches_its_connections_of_both_directions_and_no_others(on_ranks) -> None:
    assert on_ranks(_sockets_of_a_link, 3) == [(4, 0)] * 3
