"""Functions that are called with parameters right after their update, whether it was deferred or not."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ddp_crossover.torch_internals.optimizers import move_to_front
from ddp_crossover.watching.optimizer_snapshot import optimizer_parameters, was_skipped


class AfterUpdate:
    """Calls functions once for every parameter and ``step()`` of its optimizer."""

    def __init__(self) -> None:
        self._functions: OrderedDict[int, Callable[[list[Tensor]], object]] = OrderedDict()
        self._at_steps: OrderedDict[int, Callable[[Optimizer, Sequence[Tensor]], object]] = OrderedDict()
        # Weak: DDP's reducer, which is opaque to the garbage collector, refers to this object.
        self._left_alone: list[weakref.ref[Optimizer]] = []
        self._left_out: list[weakref.ref[Tensor]] = []
        self._others_of: Callable[[Optimizer], Iterable[int]] = lambda optimizer: ()

    def __bool__(self) -> bool:
        return bool(self._functions or self._at_steps)

    def add(self, function: Callable[[list[Tensor]], object]) -> RemovableHandle:
        """Call ``function`` with parameters that have just been updated."""
        return self._added(self._functions, function)

    def add_at_steps(self, function: Callable[[Optimizer, Sequence[Tensor]], object]) -> RemovableHandle:
        """Call ``function`` at the end of each ``step()``, with the optimizer and its parameters that are pending."""
        return self._added(self._at_steps, function)

    def leave_out(self, parameters: Iterable[Tensor]) -> None:
        """Never call functions with these: they are another model's, also when that is no longer attached."""
        self._left_out += map(weakref.ref, parameters)

    def leave_alone(self, optimizers: Iterable[Optimizer], others_of: Callable[[Optimizer], Iterable[int]]) -> None:
        """Follow these optimizers by plain hooks from now on, once there is a function.

        Args:
            optimizers: the optimizers.
            others_of: gives ids of the parameters of other models that are attached and that an optimizer trains, too.
        """
        self._others_of = others_of
        self._left_alone = [weakref.ref(optimizer) for optimizer in optimizers]
        if self:
            self._follow()

    def _follow(self) -> None:
        for left_alone in self._left_alone:
            if (optimizer := left_alone()) is not None:
                after = optimizer.register_step_post_hook(lambda one, *_: self.stepped(one, self._others_of(one)))
                move_to_front(optimizer, after)  # as while it was attached: the user's hooks see what functions leave
        self._left_alone.clear()

    def _added(self, functions: OrderedDict[int, Any], function: Callable[..., object]) -> RemovableHandle:
        handle = RemovableHandle(functions)
        functions[handle.id] = function
        self._follow()
        return handle

    @torch.no_grad()
    def updated(self, parameters: list[Tensor]) -> None:
        """Call the functions with these parameters, which have their new values."""
        if not parameters:
            return
        for key, function in list(self._functions.items()):
            if key not in self._functions:  # removed by one of the others
                continue
            try:
                function(list(parameters))
            except Exception as error:
                name = getattr(function, "__qualname__", type(function).__name__)
                error.add_note(f"raised by {name}(), which was given to state.after_update()")
                raise

    def stepped(self, optimizer: Optimizer, others: Iterable[int] = (), pending: Sequence[Tensor] = ()) -> None:
        """Call the functions for a ``step()`` that has ended.

        Args:
            optimizer: the optimizer.
            others: ids of parameters for which :meth:`updated` is called by itself, because their updates were deferred
                or they are those of another attached model.
            pending: the parameters of this model that are still pending.
        """
        if not self or was_skipped(vars(optimizer)):
            return
        others = frozenset(others).union(id(parameter()) for parameter in self._left_out)
        self.updated([parameter for parameter in optimizer_parameters(optimizer) if id(parameter) not in others])
        for function in list(self._at_steps.values()):
            function(optimizer, pending)
