"""This rank's shards of parameters and gradients, as tensors that an optimizer takes, and its step on them.

It knows neither when which of them are updated, nor how their new values get to the other ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from ddp_crossover.addons.optimizers.layer_sums import LayerSumOptimizer
from ddp_crossover.addons.shards.between_ranks import sums_over_ranks
from ddp_crossover.addons.shards.errors_of_ranks import ErrorsOfRanks
from ddp_crossover.addons.shards.ownership import ParameterRange
from ddp_crossover.addons.shards.shard_states import ShardStates
from ddp_crossover.addons.shards.table import ShardTable
from ddp_crossover.comm.link import Link
from ddp_crossover.pending.flat import flat_of, shaped
from ddp_crossover.pending.lazy_params import LazyParams
from ddp_crossover.step.run_updates import is_aligned
from ddp_crossover.watching.optimizer_snapshot import OptimizerSnapshot, StandIn, ToUpdate
from ddp_crossover.watching.outside_settings import Outside
from ddp_crossover.watching.update_guard import UnforeseenError, guarded


class ShardCall(NamedTuple):
    """A call of ``step()``.

    Attributes:
        stand_in: runs in the optimizer's place, on no parameter.
        snapshot: the optimizer as it was then.
        outside: what its code refers to outside of it.
        group_of: the index of the param group of each parameter to update.
    """

    stand_in: StandIn
    snapshot: OptimizerSnapshot
    outside: Outside
    group_of: dict[int, int]

    @property
    def grad_scale(self) -> Tensor | None:
        """The scale that a fused optimizer has been given by a GradScaler, to unscale gradients itself."""
        return getattr(self.snapshot.optimizer, "grad_scale", None)

    @property
    def needs_all_shards(self) -> bool:
        """Whether the update of one shard depends on the others."""
        return isinstance(self.snapshot.optimizer, LayerSumOptimizer)

    def unscaling(self) -> Tensor | None:
        """What an optimizer multiplies gradients by that a GradScaler leaves this to; None if it has left nothing."""
        if self.grad_scale is None:
            return None
        factor = self.grad_scale.reciprocal()
        found_inf = getattr(self.snapshot.optimizer, "found_inf", None)
        return factor if found_inf is None else torch.where(found_inf.bool(), 1.0, factor)


class OwnShards:
    """This rank's shards of the parameters of one model.

    Args:
        params: the parameters that DDP manages.
        table: how they are shared.
        states: the state of this rank's shards.
        link: link between the ranks.
        device: device of the parameters.
        errors: keeps an error of an update for all ranks.
    """

    def __init__(
        self,
        params: LazyParams,
        table: ShardTable,
        states: ShardStates,
        link: Link,
        device: torch.device,
        errors: ErrorsOfRanks,
    ) -> None:
        self._params = params
        self._table = table
        self._states = states
        self._link = link
        self._device = device
        self._errors = errors

    # Of whole tensors.

    def flat(self, index: int, tensor: Tensor) -> Tensor:
        """All elements of a tensor that is shaped like this parameter, in the order in which ranges count them."""
        return flat_of(tensor.detach(), self._table.parameters[index].stride)

    def of(self, gradients: Mapping[int, Tensor]) -> list[ToUpdate]:
        """This rank's shards of these parameters, in their memory, and of their whole gradients."""
        mine = self._states.mine
        return [self._shard(each, gradients[each.parameter]) for each in mine if each.parameter in gradients]

    def without_elements(self, parameters: Container[int]) -> list[ToUpdate]:
        """Those of these parameters without elements that this rank updates: no fusion group has a piece of them."""
        empty = [each for each in self._states.mine if not each.numel and each.parameter in parameters]
        # Without elements, the memory serves as the gradient as well.
        return [self._shard(each, self._params.all[each.parameter].memory) for each in empty]

    def _shard(self, each: ParameterRange, gradient: Tensor) -> ToUpdate:
        one = self._table.parameters[each.parameter]
        # In place, unless that has gaps; the exchange then brings it there.
        values = self._elements(self._params.all[each.parameter].memory, each)
        if one.owner is None:
            gradient = self._elements(gradient, each)
        else:
            values = shaped(values, one.parameter.shape, one.stride)
        return shard_to_update(each, values, gradient.detach(), one.parameter.requires_grad)

    def _elements(self, tensor: Tensor, each: ParameterRange) -> Tensor:
        return self.flat(each.parameter, tensor)[each.start : each.stop]

    # The optimizer's step.

    def update(self, call: ShardCall, updates: Sequence[ToUpdate]) -> None:
        """Update these shards. An UnforeseenError is kept: all ranks raise an error in their next step."""
        if not updates and not call.needs_all_shards:
            return
        attributes = {}
        if call.needs_all_shards:
            parameter_of = {id(update.memory): update.parameter.parameter for update in updates}
            attributes["layer_sums"] = functools.partial(
                sums_over_ranks, self._link, self._device, sorted(call.group_of), parameter_of
            )
        if call.grad_scale is not None:  # the optimizer unscales gradients in place, which whole gradients must show
            for update in updates:
                update.memory.grad = update.memory.grad.clone() if update.memory.grad is not None else None
        aligned = [(update, self._aligned(update)) for update in updates]
        of_groups: dict[int, list[ToUpdate]] = {}
        for _, update in aligned:
            of_groups.setdefault(call.group_of[update.parameter.parameter], []).append(update)
        try:
            with guarded(call.snapshot, call.outside):
                call.snapshot.step(of_groups, attributes)
        except UnforeseenError as error:
            self._errors.keep(error)
        with torch.no_grad():
            for update, used in aligned:
                if used is not update:
                    update.memory.copy_(used.memory)

    def _aligned(self, update: ToUpdate) -> ToUpdate:
        """A whole parameter, for its owner, where it would be in memory under plain DDP, see ``is_aligned``."""
        memory = update.memory
        assert memory.grad is not None
        is_whole = self._table.parameters[update.parameter.parameter].owner is not None
        if not is_whole or (is_aligned(memory) and is_aligned(memory.grad)):
            return update
        return shard_to_update(
            update.parameter, memory.detach().clone(), memory.grad.clone(), requires_grad=memory.requires_grad
        )


def shard_to_update(elements: ParameterRange, values: Tensor, gradient: Tensor, requires_grad: bool) -> ToUpdate:
    """A shard as an optimizer takes it: a parameter with a gradient."""
    # With versions of their own: legs write to other parts of that memory while an update differentiates.
    memory = Parameter(values.data, requires_grad)
    memory.grad = gradient.data
    return ToUpdate(elements, memory)
