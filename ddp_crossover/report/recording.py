"""Records forward, backward and ``optimizer.step()`` of a DDP model while a trace is taken.

It follows any DDP model, with or without our communication hook, until the trace ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddp_crossover.moments import BeforeBackward, Follower, Moments
from ddp_crossover.report.clock import CommClock
from ddp_crossover.report.trace import Moment, Trace
from ddp_crossover.torch_internals.autograd import call_after_backward

# How often in a row the end-of-backward callback is queued, so that it runs after the callbacks of DDP and of its
# communication hook, which are queued once or twice each.
_LAST_CALLBACK = 3


@contextlib.contextmanager
def recording(trace: Trace, clock: CommClock, moments: Moments) -> Iterator[None]:
    """Context manager that records everything inside its block in ``trace``.

    Raises:
        RuntimeError: if another trace is being taken.
        TypeError: if an optimizer does not support step hooks.
    """
    for optimizer in moments.unheard:
        raise TypeError(
            f"{type(optimizer).__name__} does not call Optimizer.__init__(), so a trace cannot see its step(): "
            "pass the optimizer that it wraps"
        )
    with clock.tracing(trace):
        recorder = _Recorder(trace)
        moments.follow(recorder)
        try:
            yield
        finally:
            moments.leave(recorder)


class _Recorder(Follower):
    """Turns forward, backward and step of one model on one rank into spans."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._step: Moment | None = None
        self._step_is_over = True
        self._forward: Moment | None = None
        self._backward: Moment | None = None
        self._update: Moment | None = None

    def forward_begins(self, ddp: DistributedDataParallel) -> None:
        self._forward = now = self._trace.now()
        self._backward = None  # drop a backward that raised and so never ended
        if torch.is_grad_enabled() and self._step_is_over:
            if self._step is not None:
                self._trace.add("step", self._step, now)
            self._step, self._step_is_over = now, False

    def forward_ends(self, ddp: DistributedDataParallel, output: Any, before_backward: BeforeBackward) -> None:
        if self._forward is not None:
            self._trace.add("forward", self._forward, self._trace.now())
            self._forward = None
        before_backward(self._backward_begins)

    def _backward_begins(self) -> None:
        if self._backward is None:
            self._backward = self._trace.now()
            self._after_backward(_LAST_CALLBACK)

    def _after_backward(self, callbacks: int) -> None:
        if callbacks:
            call_after_backward(lambda: self._after_backward(callbacks - 1))
        elif self._backward is not None:
            self._trace.add("backward", self._backward, self._trace.now())
            self._backward = None

    def step_begins(self, optimizer: Optimizer) -> None:
        self._update = self._update or self._trace.now()

    def step_ends(self, optimizer: Optimizer) -> None:
        if self._update is not None:
            self._trace.add("update", self._update, self._trace.now())
            self._update = None
        self._step_is_over = True
