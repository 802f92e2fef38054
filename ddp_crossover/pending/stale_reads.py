"""Finds code that has read a parameter in forward while its update was pending, without asking for it.

If a parameter gets a gradient although no forward has touched it, some code has read it without asking for its
``__torch_function__``, and may have used the old value.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ddp_crossover import device as gpu
from ddp_crossover.hooks import Hook
from ddp_crossover.pending.lazy_param import LazyParam
from ddp_crossover.pending.lazy_params import LazyParams
from ddp_crossover.pending.pending_parameter import is_armed
from ddp_crossover.torch_internals.autograd import is_in_backward


class StaleReadGuard:
    """Detects parameters that get a gradient although no forward has touched them.

    Such a parameter was read by code that bypasses ``__torch_function__``, maybe before its update. Gradients that come
    from other graphs than that of DDP's last forward tell nothing about this forward.

    Args:
        params: the parameters.
        on_stale_read: called in backward with such a parameter.
    """

    def __init__(self, params: LazyParams, on_stale_read: Callable[[LazyParam], None]) -> None:
        self._params = params
        self._on_stale_read = on_stale_read
        self._touched_in_backward: set[LazyParam] = set()
        self._handles: list[RemovableHandle] = []
        self._forwards = 0
        self._is_reached = False
        self._is_awaited = False  # whether a forward has had no backward yet that DDP reduces
        self._suspects: list[LazyParam] = []

    def end_forward(self, call_before_backward: Callable[[Callable[[], None]], bool]) -> None:
        """Hook the gradients of parameters that are untouched, and that could be read although they were pending.

        Args:
            call_before_backward: calls a function when a backward comes to what this forward has returned, or returns
                False if it cannot.
        """
        self.remove()
        self._touched_in_backward.clear()
        self._suspects.clear()
        self._handles = [
            lazy.parameter.register_hook(_Gradient(lazy, self))
            for lazy in self._params.armed()
            if lazy.parameter.requires_grad and self._may_be_read_unseen(lazy)
        ]
        self._is_awaited = True
        self._forwards += 1
        if self._handles:
            self._is_reached = not call_before_backward(functools.partial(self._reach, self._forwards))

    def _may_be_read_unseen(self, lazy: LazyParam) -> bool:
        """Whether code can have read the value although it was pending, so that its gradient tells of that.

        Where it was covered, only a replay of a CUDA graph can have, which reads memory by its address; and if a
        forward before this one is still awaited, the gradient may come from there, and tells nothing.
        """
        return not lazy.was_covered or (gpu.has_streams(lazy.memory.device) and not self._is_awaited)

    def _reach(self, forward: int) -> None:
        if forward == self._forwards:
            self._is_reached = True
            self._suspects.clear()

    def note_touch(self, lazy: LazyParam) -> None:
        """Note a touch outside of forward. In backward it comes too late to explain the parameter's gradient."""
        if self._handles and is_in_backward():
            self._touched_in_backward.add(lazy)

    def gradient_arrives(self, lazy: LazyParam) -> None:
        """Report a parameter that was not touched before backward; a penalty in the loss may have touched it."""
        if is_armed(lazy.parameter) or lazy in self._touched_in_backward:
            if self._is_reached:
                self._on_stale_read(lazy)
            else:
                self._suspects.append(lazy)

    def end_backward(self) -> None:
        """Note that DDP has reduced what comes from the last forward, of which it may have got another output."""
        self.remove()
        if not self._is_reached:
            for lazy in self._suspects:
                self._on_stale_read(lazy)
        self._is_awaited = False

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


class _Gradient(Hook):
    """Gradient hook of a parameter that no forward has touched."""

    def __init__(self, lazy: LazyParam, guard: StaleReadGuard) -> None:
        self._lazy = lazy
        self._guard = guard

    def __call__(self, gradient: Tensor) -> None:
        self._guard.gradient_arrives(self._lazy)
