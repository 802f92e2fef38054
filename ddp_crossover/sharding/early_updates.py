"""Updates that are made in backward, on trial: they count if ``step()`` would have computed the same.

The gather leg of a group can only start when its shards are updated. In backward the link is idle at times, so groups
that are reduced by then are updated with the settings that the optimizer has. If nothing has changed until ``step()``,
the results are taken over, else they are dropped, and the step is made without them. While steps turn out to need
something else, as with clipping, nothing is tried.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ddp_crossover.optim.optimizer_snapshot import OptimizerSnapshot, ToUpdate
from ddp_crossover.optim.update_runner import as_if_called_by_the_user
from ddp_crossover.parameters.lazy_params import LazyParam
from ddp_crossover.parameters.pending_parameter import arm, is_armed_by
from ddp_crossover.sharding.ownership import Range

_GOOD_STEPS = 2
_LONGEST_BREAK = 1024


class EarlyUpdates:
    """The updates on trial of one iteration, and whether to try any in the next.

    Args:
        optimizer: the optimizer.
        of_ranges: the state of this rank's ranges.
    """

    def __init__(self, optimizer: Optimizer, of_ranges: dict[Range, dict[str, Any]]) -> None:
        self._optimizer = optimizer
        self._of_ranges = of_ranges
        self._trial: dict[Range, dict[str, Any]] = {}
        self._snapshot: OptimizerSnapshot | None = None
        self._group_of: dict[int, int] = {}
        self._memories: dict[LazyParam, Parameter] = {}  # of the parameters of these groups
        self._good_steps = 0
        self._break = 1
        self._resumes_in = 0
        self._is_open = False  # updates may have been tried on some rank, and there was no step since

    def begin(self, iteration: int, *, is_possible: bool) -> bool:
        """Begin an iteration; returns whether to try updates in it. The same on all ranks."""
        if self._is_open:
            self._missed(iteration)  # there was no step
        self._is_open = is_possible and self._good_steps >= _GOOD_STEPS and iteration >= self._resumes_in
        return self._is_open

    def update(self, updates: Sequence[ToUpdate], lazies: Sequence[LazyParam]) -> None:
        """Update shards with copies of their state.

        Args:
            updates: the shards.
            lazies: all parameters of the fusion group.
        """
        if self._snapshot is None:
            self._snapshot = OptimizerSnapshot(self._optimizer, state=self._trial)
            self._group_of = {
                id(p): index for index, group in enumerate(self._optimizer.param_groups) for p in group["params"]
            }
        by_index = {lazy.index: self._group_of.get(id(lazy.parameter), 0) for lazy in lazies}
        of_groups: dict[int, list[ToUpdate]] = {}
        for update in updates:
            if (state := self._of_ranges.get(update.parameter)) is not None:
                self._trial[update.parameter] = {
                    key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()
                }
            of_groups.setdefault(by_index[update.parameter.parameter], []).append(update)
        with as_if_called_by_the_user():
            if of_groups:
                self._snapshot.step(of_groups)
        for lazy in lazies:
            arm(lazy.parameter, lazy)  # a touch before step() may be a write
            self._memories[lazy] = lazy.memory

    def are_right(self, now: OptimizerSnapshot, group_of: Mapping[int, int]) -> bool:
        """Whether a step with these settings, of parameters in these param groups, computes what was tried."""
        if self._snapshot is None:
            return True
        return now.has_settings_of(self._snapshot) and all(
            is_armed_by(lazy.parameter, lazy)
            and lazy.memory is memory  # otherwise `parameter.data = ...` had moved it before backward
            and group_of.get(lazy.index) == self._group_of.get(id(lazy.parameter))
            for lazy, memory in self._memories.items()
        )

    def end_step(self, iteration: int, *, are_taken: bool) -> None:
        """Take over what was tried, or drop it.

        Args:
            iteration: the iteration of the step.
            are_taken: whether all that was tried is right, and all of the step could have been tried, on all ranks.
        """
        if are_taken:
            self._of_ranges.update(self._trial)
            self._good_steps += 1
            if self._is_open:
                self._break = 1
        elif self._is_open:
            self._missed(iteration)
        else:
            self._good_steps = 0
        self._is_open = False
        self._forget()

    def _missed(self, iteration: int) -> None:
        self._is_open = False
        self._good_steps = 0
        self._resumes_in = iteration + self._break
        self._break = min(2 * self._break, _LONGEST_BREAK)
        self._forget()

    def _forget(self) -> None:
        self._trial.clear()
        self._snapshot = None
        self._memories = {}
