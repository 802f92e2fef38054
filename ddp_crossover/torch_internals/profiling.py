"""Ranges for profilers."""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import Any

import torch
from torch.autograd import profiler
from torch.optim import Optimizer

from ddp_crossover.torch_internals.private import private

_NO_RANGE = contextlib.nullcontext()


def named_range(name: str) -> contextlib.AbstractContextManager[object]:
    """Show the block under this name in a profile that is being taken.

    Without one it does nothing: ``record_function`` takes some 60 us where caches are cold, as on a thread that wakes
    up for each leg.
    """
    return profiler.record_function(name) if private(profiler, "_is_profiler_enabled") else _NO_RANGE


def is_asked_by_profiler() -> bool:
    """Whether the caller of this was called by a profile with stacks, which notes each optimizer's state in ``step()``.

    It does so from C, when Python enters a method that is there for this alone.
    """
    return sys._getframe(2).f_code is private(Optimizer, "_optimizer_step_code").__code__


@functools.cache
def let_handlers_look_up() -> None:
    """Let signal handlers look up ``__torch_function__`` also while torch's ranges end, in this process from now on.

    ``record_function.__exit__`` skips look-ups over several lines of Python, and a handler that runs there would read
    parameters without them (torch 2.11 to 2.15). Each ``step()``, ``zero_grad()`` and batch of a loader ends a range.
    """
    original = profiler.record_function.__exit__
    end_range = private(torch.ops.profiler._record_function_exit._RecordFunction, "_op")

    @functools.wraps(original)  # TorchScript compiles the original
    def __exit__(self: Any, *raised: Any) -> None:
        if self.run_callbacks_on_exit:
            # One call of C, in which no handler runs.
            torch._C._disabled_torch_function_impl(end_range, (), (self.record,), {})
            self.run_callbacks_on_exit = False
        original(self, *raised)

    # Dynamo leaves alone what this file of torch has, and would compile ours.
    ours: Any = __exit__
    ours.__code__ = ours.__code__.replace(co_filename=original.__code__.co_filename)
    profiler.record_function.__exit__ = ours  # type: ignore[method-assign]
