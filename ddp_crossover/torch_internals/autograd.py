"""The autograd engine and its modes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd import Variable

from ddp_crossover.torch_internals.private import private


def call_after_backward(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the current autograd graph task has ended."""
    private(Variable._execution_engine, "queue_callback")(callback)


def graph_task() -> int:
    """The number of the autograd graph task of which this thread is running a part; -1 outside of a backward."""
    return int(private(torch._C, "_current_graph_task_id")())


def is_in_backward() -> bool:
    """Whether this thread is running part of an autograd graph task."""
    return graph_task() != -1


def keeps_overwritten_values() -> bool:
    """Whether ``with torch.autograd.graph.allow_mutation_on_saved_tensors():`` is active."""
    return bool(private(torch.autograd.graph, "_allow_mutation_on_saved_tensors_enabled"))


class unrecorded:
    """Hide operators in this context from profilers: one that records values would read from a cover's address."""

    __slots__ = ("_enable",)

    def __enter__(self) -> None:
        self._enable = private(torch.autograd, "_enable_record_function")
        self._enable(False)

    def __exit__(self, *raised: object) -> None:
        self._enable(True)
