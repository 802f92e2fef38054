"""Hooks that record forward, backward and ``optimizer.step()`` of a DDP model while a trace is taken.

They work on any DDP model, with or without our communication hook, and are removed when the trace ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddp_crossover.hooks import Hook
from ddp_crossover.torch_internals.autograd import call_after_backward
from ddp_crossover.torch_internals.dispatch import tensors_in
from ddp_crossover.torch_internals.optimizers import has_hooks
from ddp_crossover.tracing.clock import CommClock
from ddp_crossover.tracing.trace import Moment, Trace

# How often in a row the end-of-backward callback is queued, so that it runs after the callbacks of DDP and of its
# communication hook, which are queued once or twice each.
_LAST_CALLBACK = 3


@contextlib.contextmanager
def recording(
    trace: Trace, clock: CommClock, ddp: DistributedDataParallel, optimizers: Sequence[Optimizer]
) -> Iterator[None]:
    """Context manager that records everything inside its block in ``trace``.

    Raises:
        RuntimeError: if another trace is being taken.
        TypeError: if an optimizer does not support step hooks.
    """
    for optimizer in optimizers:
        if not has_hooks(optimizer):
            raise TypeError(
                f"{type(optimizer).__name__} does not call Optimizer.__init__(), so a trace cannot see its step(): "
                "pass the optimizer that it wraps"
            )
    with clock.tracing(trace):
        recorder = _Recorder(trace)
        handles = [
            ddp.register_forward_pre_hook(torch.compiler.disable(recorder.before_forward), prepend=True),
            ddp.register_forward_hook(torch.compiler.disable(recorder.after_forward), always_call=True),
        ]
        for optimizer in optimizers:
            handles.append(optimizer.register_step_pre_hook(recorder.before_step))
            handles.append(optimizer.register_step_post_hook(recorder.after_step))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class _Recorder(Hook):
    """Hooks that turn forward, backward and step of one model on one rank into spans."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._step: Moment | None = None
        self._step_is_over = True
        self._forward: Moment | None = None
        self._backward: Moment | None = None
        self._update: Moment | None = None

    def before_forward(self, module: nn.Module, args: Any) -> None:
        self._forward = now = self._trace.now()
        self._backward = None  # drop a backward that raised and so never ended
        if torch.is_grad_enabled() and self._step_is_over:
            if self._step is not None:
                self._trace.add("step", self._step, now)
            self._step, self._step_is_over = now, False

    def after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._forward is not None:
            self._trace.add("forward", self._forward, self._trace.now())
            self._forward = None
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(self.before_backward)

    def before_backward(self, gradient: Tensor) -> None:
        if self._backward is None:
            self._backward = self._trace.now()
            self._after_backward(_LAST_CALLBACK)

    def _after_backward(self, callbacks: int) -> None:
        if callbacks:
            call_after_backward(lambda: self._after_backward(callbacks - 1))
        elif self._backward is not None:
            self._trace.add("backward", self._backward, self._trace.now())
            self._backward = None

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._update = self._update or self._trace.now()

    def after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._update is not None:
            self._trace.add("update", self._update, self._trace.now())
            self._update = None
        self._step_is_over = True
