"""Decides for each parameter how its update is shared by the ranks, or refuses at attach."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddp_crossover.addons.optimizers.lamb import LAMB
from ddp_crossover.addons.optimizers.lars import LARS
from ddp_crossover.addons.optimizers.layer_sums import LayerSumOptimizer
from ddp_crossover.addons.shards.by_element import unscales_gradients, why_not_by_element, why_not_shared
from ddp_crossover.addons.shards.ownership import Ownership, ParameterRange, in_equal_parts, owners_by_cost
from ddp_crossover.comm.link import Link
from ddp_crossover.pipeline.staging import gradient_stride
from ddp_crossover.plan.gradient_specs import ShardKind
from ddp_crossover.watching.at_sight import why_no_copy
from ddp_crossover.watching.caches import why_no_shards
from ddp_crossover.watching.lazy_state import why_state_is_shared
from ddp_crossover.watching.optimizer_snapshot import optimizer_parameters, reads_attributes
from ddp_crossover.watching.separability import judge
from ddp_crossover.watching.state_entries import why_entries_depend

_WAY_OUT = "Leave out shard_optimizer to have it run on every rank"


class ShardedParameter(NamedTuple):
    """One parameter.

    Attributes:
        name: full name.
        parameter: the parameter.
        stride: stride of its gradient, which is dense; ranges count elements in its memory order.
        optimizer: index of its optimizer; None if it has none.
        owner: the rank that updates all of it; None if all ranks share it.
    """

    name: str
    parameter: Parameter
    stride: tuple[int, ...]
    optimizer: int | None
    owner: int | None


class ShardTable:
    """How the updates of all parameters are shared.

    Args:
        named: names and parameters that DDP manages.
        optimizers: their optimizers.
        link: the link between the ranks.

    Attributes:
        parameters: one entry per parameter, in the same order.
        owners: the ranks that update whole parameters.
        why_whole: for each optimizer, why its parameters have owners; None if ranks share them.
        unscales: for each optimizer, whether it unscales gradients in place, if a GradScaler leaves that to it.

    Raises:
        ValueError: for an optimizer that cannot be sharded; the message says why, and the way out.
    """

    def __init__(self, named: Sequence[tuple[str, Parameter]], optimizers: Sequence[Optimizer], link: Link) -> None:
        index_of = {id(parameter): index for index, (_, parameter) in enumerate(named)}
        self.owners: dict[int, int] = {}
        self.why_whole: list[str | None] = []
        self.unscales: list[bool] = []
        optimizer_of: dict[int, int] = {}
        for number, optimizer in enumerate(optimizers):
            _refuse_optimizer(optimizer)
            self.unscales.append(unscales_gradients(optimizer))
            mine = sorted(index_of[id(p)] for p in _trained(optimizer, index_of))  # their order may differ on ranks
            for index in mine:
                if optimizer_of.setdefault(index, number) != number:
                    raise ValueError(
                        f"{named[index][0]} has two optimizers, so shard_optimizer=True cannot tell whose state its "
                        f"shards hold. {_WAY_OUT}"
                    )
            reason = None if isinstance(optimizer, LayerSumOptimizer) else why_not_by_element(optimizer)
            self.why_whole.append(reason)
            if reason is not None:
                if not link.takes_parts:
                    raise ValueError(
                        f"{type(optimizer).__name__} updates whole parameters, each on one rank, because {reason}, and "
                        f"shard_optimizer=True can do that on gloo only. {_WAY_OUT}"
                    )
                is_fused = any(group.get("fused") for group in optimizer.param_groups)
                costs = {index: _cost(named[index][1], is_fused) for index in mine}
                self.owners |= owners_by_cost(costs, link.world_size)
        self.parameters = [
            ShardedParameter(
                name, parameter, gradient_stride(parameter), optimizer_of.get(index), self.owners.get(index)
            )
            for index, (name, parameter) in enumerate(named)
        ]
        self._world_size = link.world_size

    def kinds(self) -> list[ShardKind]:
        """How parameters are kept apart in fusion groups: by optimizer, and whole ones from shared ones."""
        return [
            ShardKind("no optimizer" if one.optimizer is None else f"optimizer {one.optimizer}", one.owner is not None)
            for one in self.parameters
        ]

    def first_ownership(self) -> Ownership:
        """Who updates what before gradients travel in fusion groups."""
        whole = [ParameterRange(index, 0, one.parameter.numel()) for index, one in enumerate(self.parameters)]
        shared = {each.parameter: each.numel for each in whole if each.parameter not in self.owners}
        return tuple(
            (*ranges, *(each for each in whole if self.owners.get(each.parameter) == rank))
            for rank, ranges in enumerate(in_equal_parts(shared, self._world_size))
        )

    def give(self, index: int, number: int) -> bool:
        """Give a parameter that has no optimizer to this one, unless that updates whole parameters."""
        one = self.parameters[index]
        if one.optimizer is None and self.why_whole[number] is None:
            self.parameters[index] = one._replace(optimizer=number)
        return self.parameters[index].optimizer == number

    def drop_references(self) -> None:
        self.parameters.clear()


def _refuse_optimizer(optimizer: Optimizer) -> None:
    kind = type(optimizer).__name__
    if isinstance(optimizer, LayerSumOptimizer) and type(optimizer) not in (LARS, LAMB):
        raise ValueError(
            f"shard_optimizer=True cannot shard {kind}: a class of your own over LayerSumOptimizer may look at whole "
            f"layers where it gets slices. {_WAY_OUT}"
        )
    verdict = judge(optimizer)
    reason = verdict.why_not or why_not_shared(optimizer) or why_state_is_shared(optimizer)
    reason = reason or why_entries_depend(optimizer) or why_no_copy(optimizer, verdict.counters)
    reason = reason or why_attributes_matter(optimizer)
    reason = reason or why_no_shards(optimizer, verdict.counters)
    if reason is None and verdict.edits_gradients:
        reason = "its step() changes gradients, and each rank would change only those of its shards"
    if reason is not None:
        raise ValueError(f"shard_optimizer=True cannot shard {kind}, because {reason}. {_WAY_OUT}")


def why_attributes_matter(optimizer: Optimizer) -> str | None:
    """Why attributes of its parameters prevent sharding, or None. They may be set at any time."""
    if reads_attributes(optimizer) and any(map(vars, optimizer_parameters(optimizer))):
        return "it may read attributes that were set on parameters, which shards do not have"
    return None


def _trained(optimizer: Optimizer, index_of: Mapping[int, int]) -> list[Tensor]:
    """The optimizer's parameters that can get a gradient, now or once they are thawed."""
    trained = [p for p in optimizer_parameters(optimizer) if p.requires_grad or id(p) in index_of]
    for parameter in trained:
        if id(parameter) not in index_of:
            raise ValueError(
                f"{type(optimizer).__name__} trains a parameter of shape {tuple(parameter.shape)} that this DDP model "
                "does not reduce, and shard_optimizer=True shares what all ranks have. Give it an optimizer of its "
                "own that is not attached"
            )
    return trained


def _cost(parameter: Tensor, is_fused: bool) -> float:
    """About how long an update takes: matrix optimizers multiply a matrix by itself, along its shorter side."""
    numel = float(parameter.numel())
    if is_fused or parameter.dim() < 2 or not numel:
        return numel
    return numel * min(parameter.shape[0], numel / parameter.shape[0])


def refuse_sharding(link: Link, device: torch.device, plain_reason: str | None, ddp: DistributedDataParallel) -> None:
    """Raise ValueError where no shards can be updated between the legs."""
    if plain_reason is not None:
        raise ValueError(f"shard_optimizer=True needs the two legs of a fusion group, but {plain_reason}")
    if device.type == "cuda" and link.streams is not None and not link.spins_on_device:
        raise ValueError(
            "shard_optimizer=True updates shards on the device, and gloo sends CUDA gradients through the host: use a "
            "process group of NCCL, or leave out shard_optimizer"
        )
    if getattr(ddp, "skip_all_reduce_unused_params", False):
        raise ValueError(
            "DistributedDataParallel(skip_all_reduce_unused_params=True) changes in every step which gradients travel, "
            "and so which shards a rank has: leave it out, or leave out shard_optimizer"
        )
