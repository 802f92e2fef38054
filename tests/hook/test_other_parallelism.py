"""A model that is distributed in another way than by DDP alone is refused by name, as is a device without legs."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_crossover.hook.refusals import refuse_device

# Imports of torch's other ways are inside of the functions: they take long, and run on ranks only.


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def _attach(model: nn.Module) -> None:
    import ddp_crossover as dx

    dx.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))


def _mesh(*names: str):
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (2, 1)[: len(names)], mesh_dim_names=names)


def _tensor_parallel(*, init_sync: bool) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = _mesh("dp", "tp")
    net = parallelize_module(_net(), mesh["tp"], {"0": ColwiseParallel()})
    _attach(DistributedDataParallel(net, device_mesh=mesh["dp"]) if init_sync else _unsynced(net))


def _unsynced(net: nn.Module) -> DistributedDataParallel:
    # DDP broadcasts DTensors neither at the start nor at all, but takes them with this setting.
    return DistributedDataParallel(net, init_sync=False)


def _hybrid_sharded() -> None:
    from torch.distributed.fsdp import fully_shard

    _attach(fully_shard(_net(), mesh=_mesh("replicate", "shard")))


def _fsdp1() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    _attach(FullyShardedDataParallel(_net(), device_id=torch.device("cpu")))


def _ddp_over_a_part_in_fsdp() -> None:
    from torch.distributed.fsdp import fully_shard

    net = _net()
    fully_shard(net[0], mesh=_mesh("dp"))
    # What scripts do that combine the two by hand.
    net._ddp_params_and_buffers_to_ignore = ["0.weight", "0.bias"]
    _attach(DistributedDataParallel(net))


def _replicate() -> None:
    from torch.distributed._composable.replicate import replicate

    _attach(replicate(_net()))


def _ddp_inside_of_replicate() -> None:
    from torch.distributed._composable.replicate import replicate

    net = replicate(_net())
    net(torch.ones(2, 4)).sum().backward()
    _attach(replicate.state(net)._ddp)


def _replicate_with_fsdp() -> None:
    from torch.distributed._composable.replicate_with_fsdp import replicate

    _attach(replicate(_net(), mesh=_mesh("dp")))


# What provokes the error, and what it names.
OTHERS: dict[str, tuple[Callable[[], None], str]] = {
    "DDP over tensor parallelism": (
        lambda: _tensor_parallel(init_sync=True),
        r"0\.weight.*DTensor.*tensor parallelism",
    ),
    "DDP over DTensors": (lambda: _tensor_parallel(init_sync=False), r"0\.weight.*DTensor.*tensor parallelism"),
    "HSDP": (_hybrid_sharded, "FSDPSequential.*HSDP"),
    "FSDP1": (_fsdp1, "FullyShardedDataParallel"),
    "DDP over a part in FSDP": (_ddp_over_a_part_in_fsdp, "^0 inside of this.*FSDP"),
    "replicate()": (_replicate, r"DDPSequential.*replicate\(\)"),
    "DDP inside of replicate()": (_ddp_inside_of_replicate, r"replicate\(\)"),
    "replicate() with FSDP": (_replicate_with_fsdp, r"ReplicateSequential.*replicate\(\)"),
}


def _error(name: str) -> str | None:
    try:
        OTHERS[name][0]()
    except (TypeError, ValueError) as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", OTHERS)
def test_other_ways_to_distribute_a_model_are_refused_by_name(on_ranks, name) -> None:
    for message in on_ranks(_error, 2, name):
        assert message is not None, "not refused"
        assert re.search(OTHERS[name][1], message), message
        assert "wrap the plain model in DistributedDataParallel" in message


@pytest.mark.quick
@pytest.mark.parametrize("device", ["xpu:0", "mps", "privateuseone:0"])
def test_a_device_without_legs_is_refused_by_name(device) -> None:
    with pytest.raises(ValueError, match=rf"head\.weight is on {device}.*DDP_CROSSOVER=off"):
        refuse_device(torch.device(device), "head.weight")


def _slice_of_a_mesh_without_tensor_parallelism() -> int:
    import ddp_crossover as dx

    model = DistributedDataParallel(_net(), device_mesh=_mesh("dp", "tp")["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = dx.attach(model, optimizer)
    for _ in range(6):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return state.stats().pipelined_iterations


def test_a_device_mesh_alone_is_not_refused(on_ranks) -> None:
    assert all(on_ranks(_slice_of_a_mesh_without_tensor_parallelism, 2))
