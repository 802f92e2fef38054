"""Several connections to each peer: `connections=`. That training stays exact with them is the fuzzer's."""

from __future__ import annotations

import os
import re
import signal
import sys
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ddp_crossover as dx
from ddp_crossover.comm.agreement import DisagreementError
from ddp_crossover.comm.pace import connected_tcp_sockets, copy_of_socket
from ddp_crossover.nccl import make_link
from ddp_crossover.options import Options
from ddp_crossover.torch_internals.groups import new_group
from equivalence import Case, Run
from harness import run_faulty_ranks, run_ranks
from models import WideNet
from tcp_bytes import tcp_bytes_by_socket

CONNECTIONS = 3
# Headers, acknowledgements of receives, and parts that are not cut as evenly as whole slices.
EVEN = 0.1


Ends = frozenset[Any]


def _bytes_of_each_connection(connections: int) -> list[tuple[int, Ends]]:
    """What the connections have sent that attach has opened, the busiest first, with the addresses of both ends."""
    before = connected_tcp_sockets()
    run = Run(Case(model=WideNet, steps=10, dear={"connections": connections, "fusion_mb": 0.5}), with_dear=True)
    run.attach()
    opened = connected_tcp_sockets() - before
    for x, y in run.batches():
        run.optimizer.zero_grad()
        run.loss(run.model(x), y).backward()
        run.optimizer.step()
    run.synchronize()
    sent = tcp_bytes_by_socket()
    return sorted(((sent[fd], _ends(fd)) for fd in opened), key=lambda one: -one[0])


def _ends(fd: int) -> Ends:
    with copy_of_socket(fd) as connection:
        return frozenset((connection.getsockname(), connection.getpeername()))


@pytest.mark.launches
@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's TCP_INFO")
@pytest.mark.parametrize("connections", [1, CONNECTIONS])
def test_each_connection_carries_its_part_one_way(connections: int) -> None:
    busy_ends = []
    for sent in run_ranks(_bytes_of_each_connection, 2, connections):  # in fresh processes, whose sockets are known
        busy = [(bytes_, ends) for bytes_, ends in sent if bytes_ > 0.01 * sent[0][0]]
        assert len(busy) == connections
        assert busy[-1][0] > (1 - EVEN) * busy[0][0]
        busy_ends.append({ends for _, ends in busy})
    assert busy_ends[0].isdisjoint(busy_ends[1])


def _sockets_around_attach() -> tuple[int, int, int]:
    ddp = DistributedDataParallel(torch.nn.Linear(4, 4))
    before = len(connected_tcp_sockets())
    state = dx.attach(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), connections=CONNECTIONS)
    attached = len(connected_tcp_sockets())
    dist.barrier()  # connections end with the first rank that closes them
    state.detach()
    return before, attached, len(connected_tcp_sockets())


@pytest.mark.launches
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_detach_closes_all_connections() -> None:
    for before, attached, after in run_ranks(_sockets_around_attach, 2):
        assert attached >= before + 2 * CONNECTIONS
        assert after == before


def _sockets_around_attach_that_fails() -> list[int]:
    ddp = DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    dx.attach(ddp, optimizer).detach()  # what stays open, stays from the first attach on
    counts = [len(connected_tcp_sockets())]
    opened: list[None] = []

    def fail_at_the_third(*args: Any, **options: Any) -> dist.ProcessGroup:
        opened.append(None)
        if len(opened) == 3:
            raise OSError("too many open files")
        return new_group(*args, **options)

    with mock.patch.object(make_link, "new_group", fail_at_the_third), pytest.raises(OSError, match="too many"):
        dx.attach(ddp, optimizer, connections=CONNECTIONS)
    counts.append(len(connected_tcp_sockets()))
    dist.barrier()
    dx.attach(ddp, optimizer).detach()  # all ranks can end groups together now
    return [*counts, len(connected_tcp_sockets())]


@pytest.mark.launches
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_connections_of_an_attach_that_failed_are_closed_by_the_next() -> None:
    for before, failed, after in run_ranks(_sockets_around_attach_that_fails, 2):
        assert failed > before
        assert after == before


def _lost_peer(at_fault: Any) -> str:
    run = Run(Case(model=WideNet, steps=40, dear={"connections": CONNECTIONS, "fusion_mb": 0.5}), with_dear=True)
    run.attach()
    for index, (x, y) in enumerate(run.batches()):
        if index == 8 and run.rank == 1:
            at_fault()
        run.optimizer.zero_grad()
        run.loss(run.model(x), y).backward()
        run.optimizer.step()
    return "trained to the end"


def _kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.launches
def test_a_killed_rank_ends_the_others_with_an_error_that_names_the_leg() -> None:
    outcomes = run_faulty_ranks(_lost_peer, 3, _kill_self, group_timeout_s=4.0)
    for outcome in outcomes:
        if outcome.rank != 1:
            assert outcome.error is not None, outcome.result
            assert re.search(r"rank \d.*(scatter|gather) leg", outcome.error.strip().splitlines()[-1]), outcome.error
            assert outcome.exitcode == 0


def _with_a_number_of_its_own() -> str:
    ddp = DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with pytest.raises(DisagreementError) as refused:
        dx.attach(ddp, optimizer, connections=1 + dist.get_rank())
    return str(refused.value)


def test_ranks_must_want_equally_many(on_ranks) -> None:
    for message in on_ranks(_with_a_number_of_its_own, 2):
        assert "options.connections is 1 on rank 0 and 2 on rank 1" in message


def test_nccl_is_told_to_open_them_itself() -> None:
    with (
        mock.patch.object(make_link, "backend_for", lambda *of: "nccl"),
        mock.patch.object(make_link, "family_of", lambda *of: "nccl"),
        mock.patch.object(dist, "get_process_group_ranks", lambda group: [0, 1]),
        mock.patch.object(make_link, "given_up", lambda ranks: []),
        mock.patch.object(make_link, "all_gather_json", lambda value, *of: [value]),
        pytest.raises(ValueError, match="NCCL_NSOCKS_PERTHREAD"),
    ):
        make_link.make_link(
            mock.Mock(spec=dist.ProcessGroup), torch.device("cuda"), timedelta(minutes=1), connections=2
        )


@pytest.mark.parametrize("connections", [0, 9, True, 2.0, "4", None])
def test_other_numbers_are_refused(connections: Any) -> None:
    with pytest.raises(ValueError, match="connections must be a number from 1 to 8"):
        Options(connections=connections)
