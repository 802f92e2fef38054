"""The optimizer state of this rank's shards: sliced from a whole state, moved to other ranks, put together again.

While the state is spread over the ranks, any look at ``optimizer.state`` raises, and says what to do.
"""

from __future__ import annotations

import copy
import functools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from ddp_crossover.addons.shards.between_ranks import by_parameter, elements_of, in_chunks, redistribute
from ddp_crossover.addons.shards.by_element import SCALARS
from ddp_crossover.addons.shards.ownership import Ownership, ParameterRange, everything, only
from ddp_crossover.addons.shards.table import ShardTable
from ddp_crossover.comm.agreement import all_gather_json
from ddp_crossover.comm.link import Link
from ddp_crossover.pending.flat import flat_of, shaped
from ddp_crossover.torch_internals.profiling import is_asked_by_profiler
from ddp_crossover.watching.lazy_state import in_order_of_steps

CONSOLIDATE = (
    "the state of this optimizer is spread over the ranks (shard_optimizer=True): call state.consolidate() on all "
    "ranks first, with the DearState that attach() returned, and while its model lives"
)


class ShardedState(defaultdict[Any, Any]):
    """Stands for a state that is elsewhere. Always empty inside."""

    def __init__(self) -> None:
        super().__init__(dict)


def _refuse(self: ShardedState, *args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError(CONSOLIDATE)


def _get(self: ShardedState, *args: Any) -> dict[str, Any]:
    if is_asked_by_profiler():
        return {}  # as of a parameter that has no state yet
    _refuse(self)


for _name in (
    *("__contains__", "__delitem__", "__eq__", "__getitem__", "__iter__", "__len__", "__setitem__", "__bool__"),
    *("__reduce__", "__copy__", "__deepcopy__", "__missing__"),
    *("clear", "copy", "items", "keys", "pop", "popitem", "setdefault", "update", "values"),
):
    setattr(ShardedState, _name, _refuse)
ShardedState.get = _get  # type: ignore[method-assign,assignment]
ShardedState.__repr__ = lambda self: f"<{CONSOLIDATE}>"  # type: ignore[method-assign]
ShardedState.__hash__ = None


_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


class ShardStates:
    """The state of this rank's shards, for all optimizers of one model.

    Args:
        table: how parameters are shared.
        optimizers: the optimizers.
        link: link between the ranks.
        device: device of the parameters.

    Attributes:
        ownership: which rank has which ranges now.
        of_ranges: this rank's part: the state of each of its ranges, as the optimizer makes it for a flat tensor, or
            for a whole parameter if that has an owner. Ranges that were never updated have none.
    """

    def __init__(self, table: ShardTable, optimizers: Sequence[Optimizer], link: Link, device: torch.device) -> None:
        self._table = table
        self._optimizers = optimizers
        self._link = link
        self._device = device
        self.ownership = table.first_ownership()
        self.of_ranges: dict[ParameterRange, dict[str, Any]] = {}
        # State of parameters that do not travel, such as frozen ones; no step changes it.
        self._others: dict[int, dict[Any, Any]] = {}

    @property
    def mine(self) -> tuple[ParameterRange, ...]:
        return self.ownership[self._link.rank]

    # A whole state, as users know it.

    def adopt(self, number: int) -> None:
        """Take over the state of an optimizer if that holds a whole one, by slicing it.

        It holds one after it was resumed from a checkpoint, before or after attach, and after :meth:`consolidate`.
        """
        optimizer = self._optimizers[number]
        if isinstance(optimizer.state, ShardedState):
            return
        for each in self.mine:
            one = self._table.parameters[each.parameter]
            if one.optimizer == number:
                self.of_ranges.pop(each, None)
                if state := dict.get(optimizer.state, one.parameter):
                    self.of_ranges[each] = {key: self._sliced(value, each) for key, value in state.items()}
        ours = {one.parameter for one in self._table.parameters}
        self._others[number] = {key: state for key, state in dict.items(optimizer.state) if key not in ours}
        optimizer.state = ShardedState()

    def _sliced(self, value: Any, each: ParameterRange) -> Any:
        one = self._table.parameters[each.parameter]
        if not isinstance(value, Tensor):
            return copy.deepcopy(value)
        if one.owner is None and value.shape == one.parameter.shape:
            return flat_of(value, one.stride)[each.start : each.stop].clone()
        return value.clone()

    def consolidate(self, ranks: Iterable[int]) -> None:
        """Give the optimizers of these ranks their whole state, parameter-shaped. A collective."""
        ranks = set(ranks)
        states: dict[int, dict[Any, Any]] = {
            number: {} for number, optimizer in enumerate(self._optimizers) if isinstance(optimizer.state, ShardedState)
        }
        of_parameters = self._gathered(self.ownership, everything(self.ownership, ranks))
        if self._link.rank not in ranks:
            return
        for each, state in sorted(of_parameters.items()):
            one = self._table.parameters[each.parameter]
            if one.optimizer in states:
                states[one.optimizer][one.parameter] = {
                    key: self._as_parameter(value, each) for key, value in state.items()
                }
        for number, whole in states.items():
            whole.update(self._others.get(number, {}))
            optimizer = self._optimizers[number]
            # Scripts that iterate over the state see the order.
            in_order = {key: whole[key] for key in in_order_of_steps(optimizer, whole)}
            optimizer.state = defaultdict(dict, in_order)

    def _as_parameter(self, value: Any, each: ParameterRange) -> Any:
        one = self._table.parameters[each.parameter]
        is_flat = isinstance(value, Tensor) and value.dim() == 1 and value.numel() == one.parameter.numel()
        if one.owner is None and is_flat:
            return shaped(value, one.parameter.shape, one.stride)
        return value

    # Moves between ranks.

    def move_to(self, ownership: Ownership) -> None:
        """Give every range's state to the rank that has the range from now on. A collective."""
        if ownership != self.ownership:
            moved = self._gathered(self.ownership, ownership)
            self.of_ranges.clear()  # the same dict: snapshots refer to it
            self.of_ranges.update(moved)
            self.ownership = ownership

    def _gathered(self, have: Ownership, want: Ownership) -> dict[ParameterRange, dict[str, Any]]:
        rank = self._link.rank
        known: dict[int, dict[str, Any]] = {}
        for of_rank in all_gather_json(self._described(have[rank]), self._link.process_group, self._device):
            for parameter, description in of_rank.items():
                known.setdefault(int(parameter), description)
        gathered: dict[ParameterRange, dict[str, Any]] = {
            each: {key: self._scalar(entry) for key, entry in known[each.parameter].items()}
            for each in want[rank]
            if each.parameter in known
        }
        columns: dict[tuple[str, str], dict[int, list[list[int]]]] = {}
        for parameter, description in sorted(known.items()):
            for key, (kind, *rest) in description.items():
                if kind == "tensor":
                    dtype, *shape = rest
                    columns.setdefault((key, dtype), {})[parameter] = shape
        for (key, dtype), shapes in columns.items():
            bytes_of = functools.partial(_state_bytes, _DTYPES[dtype].itemsize)
            for some in in_chunks(shapes.items(), lambda _: None, bytes_of):
                self._move(key, _DTYPES[dtype], dict(some), have, want, gathered)
        return gathered

    def _move(
        self,
        key: str,
        dtype: torch.dtype,
        shapes: dict[int, list[list[int]]],
        have: Ownership,
        want: Ownership,
        gathered: dict[ParameterRange, dict[str, Any]],
    ) -> None:
        """Move what the state of these parameters, given with its shape and stride, holds under one key."""

        def in_elements(each: ParameterRange) -> ParameterRange:
            # The state of a parameter that has an owner may have other shapes than the parameter, and moves as a whole.
            if self._table.parameters[each.parameter].owner is None:
                return each
            return ParameterRange(each.parameter, 0, math.prod(shapes[each.parameter][0]))

        rank, like = self._link.rank, torch.empty(0, dtype=dtype, device=self._device)
        have, want = only(have, shapes), only(want, shapes)
        mine = {
            in_elements(each): flat_of(self.of_ranges[each][key].detach(), tuple(shapes[each.parameter][1]))
            for each in have[rank]
        }
        targets: dict[ParameterRange, Tensor] = {}
        for each in want[rank]:
            sized = in_elements(each)
            target = targets[sized] = like.new_empty(sized.numel)
            if self._table.parameters[each.parameter].owner is not None:
                shape, stride = shapes[each.parameter]
                gathered[each][key] = shaped(target, torch.Size(shape), tuple(stride))
            else:
                gathered[each][key] = target
        have, want = (tuple(tuple(map(in_elements, ranges)) for ranges in of_ranks) for of_ranks in (have, want))
        wanted = by_parameter(targets)
        for part, values in redistribute(self._link, have, want, mine, like):
            elements_of(wanted, part).copy_(values)

    def _described(self, ranges: Sequence[ParameterRange]) -> dict[int, dict[str, Any]]:
        """For each parameter of which this rank has state: the kind of each value, and scalars themselves."""
        described: dict[int, dict[str, Any]] = {}
        for each in ranges:
            if each.parameter not in described and (state := self.of_ranges.get(each)) is not None:
                described[each.parameter] = {key: _description(value) for key, value in state.items()}
        return described

    def _scalar(self, entry: list[Any]) -> Any:
        kind, *rest = entry
        if kind == "value":
            return rest[0]
        if kind == "scalar":
            dtype, value, device = rest
            return torch.tensor(value, dtype=_DTYPES[dtype], device="cpu" if device == "cpu" else self._device)
        return None  # a tensor, which comes later


def _state_bytes(itemsize: int, item: tuple[int, list[list[int]]]) -> int:
    _, (shape, _) = item
    return itemsize * math.prod(shape)


def _description(value: Any) -> list[Any]:
    if not isinstance(value, Tensor):
        if not isinstance(value, SCALARS):
            raise TypeError(
                f"the state of a sharded optimizer holds a {type(value).__name__}, which cannot travel to other ranks: "
                "keep tensors, numbers and strings in it, or leave out shard_optimizer"
            )
        return ["value", value]
    if value.dim() == 0:
        return ["scalar", str(value.dtype), value.item(), value.device.type]
    dense = torch.empty_like(value, device="meta")  # its own strides, unless it has gaps or overlaps
    return ["tensor", str(value.dtype), list(value.shape), list(dense.stride())]
