"""Chooses the link for a device type and a backend."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from ddp_crossover.comm.agreement import all_gather_json, refuse_difference
from ddp_crossover.comm.all_reduce import backend_for, family_of, stream_for_all_reduces
from ddp_crossover.comm.gloo_link import GlooLink
from ddp_crossover.comm.gloo_messages import Connection
from ddp_crossover.comm.link import Link
from ddp_crossover.comm.pace import SocketBacklog, connected_tcp_sockets
from ddp_crossover.nccl.copy_engine_link import CopyEngineLink, is_asked_for, refuse_unless_possible
from ddp_crossover.nccl.nccl_link import NcclLink
from ddp_crossover.nccl.staged_gloo_link import StagedGlooLink
from ddp_crossover.torch_internals.groups import OwnedGroups, destroy, given_up, new_group


def make_link(
    process_group: dist.ProcessGroup,
    device: torch.device,
    timeout: timedelta,
    own_group: dist.ProcessGroup | None = None,
    *,
    sums_in_fp32: bool = False,
    connections: int = 1,
) -> Link:
    """Make the link for a device type and backend, on its own process group over the same ranks.

    Args:
        process_group: process group whose ranks and backend to use.
        device: device of the gradients.
        timeout: time after which a leg fails.
        own_group: process group for the link; a new one with the same backend by default.
        sums_in_fp32: whether gloo links add up 16-bit buffers in fp32 and round once. NCCL adds by itself.
        connections: number of connections to each peer, on gloo.

    Raises:
        ValueError: if the backend is neither gloo nor NCCL, or ``own_group`` has other ranks, or asks for copy engines
            (see :class:`CopyEngineLink`) where there are none, or for several connections on NCCL.
        DisagreementError: if ranks want different numbers of connections.
    """
    # The legs may use another backend than DDP: gloo copies CUDA tensors through the host, and so leaves the GPU alone.
    of_legs = own_group if own_group is not None else process_group
    backend, family = backend_for(of_legs, device), family_of(of_legs, device)
    links = {("gloo", "cpu"): GlooLink, ("gloo", "cuda"): StagedGlooLink, ("nccl", "cuda"): NcclLink}
    link = links.get((family, device.type))
    if link is None:
        raise ValueError(
            f"dear_hook runs on gloo (CPU or CUDA parameters) and NCCL (CUDA parameters), but the process group "
            f"uses {family!r} for parameters on {device}; call init_process_group with one of these backends"
        )
    ranks = dist.get_process_group_ranks(process_group)
    if own_group is not None and (others := dist.get_process_group_ranks(own_group)) != ranks:
        raise ValueError(
            f"process_group has the ranks {others}, but the model is replicated over {ranks}: "
            "make it over the same ranks, or leave it out"
        )
    on_copy_engines = link is NcclLink and own_group is not None and is_asked_for(own_group, device)
    if on_copy_engines:
        refuse_unless_possible(of_legs, device)
    of_ranks = all_gather_json({"given_up": given_up(ranks), "connections": connections}, process_group, device)
    refuse_difference("setup", [{"options": {"connections": one["connections"]}} for one in of_ranks])
    if connections > 1 and link is NcclLink:
        raise ValueError(
            f"connections={connections} is for gloo: NCCL opens several connections by itself, as many as "
            "NCCL_NSOCKS_PERTHREAD in the environment says"
        )
    # Here, because all ranks attach; and only those that all have given up: each has a garbage collector of its own.
    destroy(sorted(set.intersection(*(set(one["given_up"]) for one in of_ranks))))
    of_ddp = process_group
    opened: list[dist.ProcessGroup] = []

    def open_group(purpose: str) -> dist.ProcessGroup:
        opened.append(new_group(ranks, backend=backend, timeout=timeout, purpose=purpose))
        return opened[-1]

    try:
        before = connected_tcp_sockets()
        process_group = own_group or open_group("legs")
        if link is NcclLink:
            kind = CopyEngineLink if on_copy_engines else NcclLink
            made: Link = kind(process_group, device, open_group("norms"), timeout)
        else:
            several = []
            for number in range(1, connections + 1):
                ascending = process_group if number == 1 else open_group(f"legs, connection {number}")
                descending = open_group(f"legs, connection {number}, back") if len(ranks) > 1 else ascending
                several.append(Connection(ascending, descending))
            # New sockets are those of the new groups. The sockets of a given `own_group` are unknown, and on macOS all
            # are; the backlog is then empty, and gather legs are posted as soon as they are ready.
            sockets = connected_tcp_sockets() - before if own_group is None else ()
            made = link(several, device, SocketBacklog(sockets), sums_in_fp32=sums_in_fp32)
    except BaseException:
        unused = OwnedGroups()
        for group in opened:
            unused.add(group)
        unused.give_up()
        raise
    for group in opened:
        made.owned_groups.add(group)
    if made.all_reduce_stream is None:
        made.all_reduce_stream = stream_for_all_reduces(of_ddp, device)
    return made
