"""Models over some of the ranks: attach leaves nothing behind that the other ranks, which never hear of it, lack."""

from __future__ import annotations

import random
import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

import ddp_crossover as dx
from ddp_crossover.torch_internals.groups import new_group
from models import INPUTS, DeepNet

_STEPS = 6


def _train(group: dist.ProcessGroup, *, attached: bool = True) -> list[torch.Tensor]:
    torch.manual_seed(0)
    net = DeepNet()
    ddp = DistributedDataParallel(net, process_group=group)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    state = dx.attach(ddp, optimizer, fusion_mb=1e-4) if attached else None
    for step in range(_STEPS):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        optimizer.zero_grad()
        ddp(torch.randn(4, INPUTS, generator=generator)).square().mean().backward()
        optimizer.step()
    if state is not None:
        assert state.stats().pipelined_iterations
        state.detach()
    return [parameter.detach().clone() for parameter in net.parameters()]


def _is_member(ranks: Sequence[int]) -> bool:
    return dist.get_rank() in ranks


def _uses(group: dist.ProcessGroup) -> list[float]:
    total = torch.tensor([float(1 + dist.get_rank())])
    dist.all_reduce(total, group=group)
    return total.tolist()


def _makes_groups_afterwards() -> list[list[float]]:
    pair = dist.new_group([0, 1])
    for _ in range(2):
        if _is_member([0, 1]):
            _train(pair)
    results = [_uses(dist.new_group()), _uses(dist.new_group([0, 1, 2]))]
    if _is_member([1, 2]):
        results.append(_uses(dist.new_group([1, 2], use_local_synchronization=True)))
    return results


def test_a_script_makes_groups_of_all_ranks_after_some_have_attached(on_ranks) -> None:
    assert on_ranks(_makes_groups_afterwards, 3) == [[[6.0]] * 2, [[6.0]] * 2 + [[5.0]], [[6.0]] * 2 + [[5.0]]]


def _trains_in_overlapping_groups() -> bool:
    groups = {ranks: dist.new_group(ranks) for ranks in ((0, 1), (1, 2), (0, 2))}
    trained = {ranks: _train(group) for ranks, group in groups.items() if _is_member(ranks)}
    plain = {ranks: _train(group, attached=False) for ranks, group in groups.items() if _is_member(ranks)}
    return all(torch.equal(a, b) for ranks in trained for a, b in zip(trained[ranks], plain[ranks], strict=True))


def test_a_rank_may_belong_to_several_subgroups(on_ranks) -> None:
    assert on_ranks(_trains_in_overlapping_groups, 3) == [True] * 3


def _globals_of_torch() -> dict[str, Any]:
    return {
        "groups": distributed_c10d._world.group_count,
        "names": len(distributed_c10d._world.pg_names),
        "device": torch.get_default_device(),
        "dtype": torch.get_default_dtype(),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "deterministic": (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic),
        "gradients": torch.is_grad_enabled(),
        "torch random": torch.get_rng_state().tolist(),
        "python random": random.getstate(),
        "numpy random": [str(part) for part in np.random.get_state()],
        "warnings": list(warnings.filters),
    }


def _compares_globals() -> dict[str, tuple[Any, Any]]:
    pair = dist.new_group([0, 1])
    if not _is_member([0, 1]):
        return {}
    _train(pair, attached=False)  # torch loads what it needs
    _train(pair)
    net = DeepNet()
    ddp = DistributedDataParallel(net, process_group=pair)
    optimizer = torch.optim.AdamW(net.parameters())
    before = _globals_of_torch()
    state = dx.attach(ddp, optimizer, fusion_mb=1e-4)
    for _ in range(_STEPS):
        optimizer.zero_grad()
        ddp(torch.ones(4, INPUTS)).square().mean().backward()
        optimizer.step()
    state.detach()
    after = _globals_of_torch()
    return {name: (before[name], after[name]) for name in before if before[name] != after[name]}


def test_attach_and_training_leave_the_globals_of_torch_as_they_were(on_ranks) -> None:
    assert on_ranks(_compares_globals, 3) == [{}] * 3


def _splits_of_a_bound_device() -> list[bool]:
    split_from: list[Any] = []

    def noting(options: Any, backend_options: Any) -> Any:
        split_from.append(options.split_from)
        return distributed_c10d._create_gloo_process_group(options, backend_options)

    dist.Backend.register_backend("noting", noting, extended_api=True, devices=["cpu", "cuda"])
    default = dist.group.WORLD
    default.bound_device_id = torch.device("cuda", 0)
    try:
        if _is_member([0, 1]):
            group = new_group([0, 1], backend="noting", timeout=timedelta(seconds=30), purpose="test")
            assert group.bound_device_id == torch.device("cuda", 0)
            _uses(group)
        assert default.bound_device_id == torch.device("cuda", 0)
    finally:
        default.bound_device_id = None
    return [one is None for one in split_from]


def test_a_group_of_some_ranks_is_not_split_off_a_group_that_has_others_too(on_ranks) -> None:
    # `ncclCommSplit` takes all ranks of the communicator that it splits.
    assert on_ranks(_splits_of_a_bound_device, 3) == [[True], [True], []]
