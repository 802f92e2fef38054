"""Functions that are called with parameters right after their update, whether it was deferred or not."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ddp_crossover.optim.optimizer_snapshot import optimizer_parameters, was_skipped


class AfterUpdate:
    """Calls functions once for every parameter and ``step()`` of its optimizer."""

    def __init__(self) -> None:
        self._functions: OrderedDict[int, Callable[[list[Tensor]], object]] = OrderedDict()
        self._at_steps: OrderedDict[int, Callable[[Optimizer, Sequence[Tensor]], object]] = OrderedDict()
        self._to_follow: list[Optimizer] = []

    def __bool__(self) -> bool:
        return bool(self._functions or self._at_steps)

    def add(self, function: Callable[[list[Tensor]], object]) -> RemovableHandle:
        """Call ``function`` with parameters that have just been updated."""
        handle = _added(self._functions, function)
        self._follow()
        return handle

    def add_at_steps(self, function: Callable[[Optimizer, Sequence[Tensor]], object]) -> RemovableHandle:
        """Call ``function`` at the end of each ``step()``, with the optimizer and its parameters that are pending."""
        handle = _added(self._at_steps, function)
        self._follow()
        return handle

    def follow(self, optimizers: Iterable[Optimizer]) -> None:
        """Call the functions from plain hooks of these optimizers, which get them once there is a function."""
        self._to_follow = list(optimizers)
        self._follow()

    def _follow(self) -> None:
        if self:
            for optimizer in self._to_follow:
                optimizer.register_step_post_hook(lambda stepped, *_: self.stepped(stepped))
            self._to_follow.clear()

    @torch.no_grad()
    def updated(self, parameters: list[Tensor]) -> None:
        """Call the functions with these parameters, which have their new values."""
        if not parameters:
            return
        for function in list(self._functions.values()):
            try:
                function(list(parameters))
            except Exception as error:
                name = getattr(function, "__qualname__", type(function).__name__)
                error.add_note(f"raised by {name}(), which was given to state.after_update()")
                raise

    def stepped(self, optimizer: Optimizer, later: Sequence[Tensor] = (), pending: Sequence[Tensor] = ()) -> None:
        """Call the functions for a ``step()`` that has ended.

        Args:
            optimizer: the optimizer.
            later: its parameters whose updates were deferred, and for which :meth:`updated` is called by itself.
            pending: those of them that are still pending.
        """
        if not self or was_skipped(vars(optimizer)):
            return
        deferred = set(map(id, later))
        self.updated([parameter for parameter in optimizer_parameters(optimizer) if id(parameter) not in deferred])
        for function in list(self._at_steps.values()):
            function(optimizer, pending)


def _added(functions: OrderedDict[int, Any], function: Callable[..., object]) -> RemovableHandle:
    handle = RemovableHandle(functions)
    functions[handle.id] = function
    return handle
