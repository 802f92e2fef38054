"""The lease in a job that gives no gaps away: hooks on its model take the lease and give it back.

The one room of the lease that knows torch and the package around it. It is loaded by
:meth:`.client.GpuLease.instrument` when called, and by nothing else.

What is hung up, and why just that: forward pre-hooks on modules; gradient hooks on parameters, which run as backward
gets on; a gradient hook on what the model returned, which is first in backward; an engine callback for its end. None
adds a node to the autograd graph or changes a tensor, so in-place operations, checkpointing and compiled modules work
as without them. (``register_full_backward_hook`` puts an identity around a module, whose results are views that nobody
may change in place.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..torch_internals import call_after_backward, has_hooks, is_compiled_in_place, is_in_backward, tensors_in
from .run_ahead import RunAhead


class Holder(Protocol):
    """The lease, as far as the hooks know it."""

    @property
    def undisturbed(self) -> bool: ...

    @property
    def holding(self) -> bool: ...

    @property
    def asked_to_yield(self) -> bool: ...

    @property
    def pressed(self) -> bool: ...

    def acquire(self) -> bool: ...

    def yield_turn(self) -> bool: ...

    def release(self) -> None: ...


class Instrument:
    """Hooks on one model, made by :meth:`.client.GpuLease.instrument`. At the end of a ``with`` they are removed."""

    def __init__(
        self,
        lease: Holder,
        model: nn.Module,
        optimizer: Optimizer | None,
        quantum_s: float,
        run_ahead: RunAhead | None,
    ) -> None:
        if isinstance(model, DistributedDataParallel):
            raise ValueError(
                "the lease would be held while DDP communicates: use lease.held() around what only computes"
            )
        if is_compiled_in_place(model):
            raise ValueError("model.compile() runs no hooks: instrument torch.compile(model), or use lease.held()")
        self._lease = lease
        self._quantum_s = quantum_s
        self._quantum_ends_s = 0.0
        self._run_ahead = run_ahead
        self._leased: bool | None = None  # whether this turn has the lease; None between turns
        self._in_backward = False
        self._backward_follows = _Habit()
        self._step_follows = _Habit() if optimizer is not None else None
        self._undo: list[Callable[[], None]] = []
        self._hang_up(model, optimizer)

    def remove(self) -> None:
        """Take the hooks down, and release. Copies of the model leave the lease alone from now on, too."""
        for undo in self._undo:
            undo()
        self._undo.clear()
        self._end()

    def __enter__(self) -> Instrument:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __deepcopy__(self, memo: dict[int, Any]) -> Instrument:
        return self  # a copy of the model (an average of its weights, say) computes on the same GPU

    def __reduce__(self) -> NoReturn:
        raise TypeError("an instrumented model cannot be pickled: save its state_dict(), or remove() the hooks first")

    def _hang_up(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        handles = [
            model.register_forward_pre_hook(self._before_forward, prepend=True),
            model.register_forward_hook(self._after_forward, always_call=True),
            *(module.register_forward_pre_hook(self._on_module) for module in _hookable(model) if module is not model),
            *(
                parameter.register_hook(partial(self._on_gradient, index))
                for index, parameter in enumerate(model.parameters())
                if parameter.requires_grad
            ),
        ]
        if optimizer is not None and has_hooks(optimizer):
            handles.append(optimizer.register_step_pre_hook(self._before_step))
            handles.append(optimizer.register_step_post_hook(self._after_step))
        self._undo.extend(handle.remove for handle in handles)

    # ---- what happens in the job

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return  # within compiled code there is no time at which to look
        if not is_in_backward():  # where checkpointing repeats a forward
            self._in_backward = False  # after a backward that raised
        self._begin_or_check(module)

    def _on_module(self, module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            self._check(module)

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        results = [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]
        for result in results:
            result.register_hook(partial(self._on_gradient, "result"))
        if is_in_backward():
            return
        if not (results and module.training and self._backward_follows.comes_next()):
            self._end()

    def _on_gradient(self, point: Hashable, gradient: Tensor) -> None:
        if not self._in_backward:
            self._in_backward = True
            call_after_backward(self._after_backward)
        self._begin_or_check(point)

    def _after_backward(self) -> None:
        self._in_backward = False
        self._backward_follows.has_come()
        if self._step_follows is None or not self._step_follows.comes_next():
            self._end()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._begin_or_check(optimizer)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        assert self._step_follows is not None
        self._step_follows.has_come()
        self._end()

    # ---- turns

    def _begin_or_check(self, point: Hashable) -> None:
        if self._leased is not None:
            self._check(point)
        elif self._undo:  # not after remove(), in a copy of the model
            self._start(self._lease.acquire())

    def _start(self, leased: bool) -> None:
        self._leased = leased
        self._quantum_ends_s = time.monotonic() + self._quantum_s
        if self._run_ahead is not None:
            self._run_ahead.restart()

    def _check(self, point: Hashable) -> None:
        """Between two pieces of work. A turn that has no lease goes on without: it has waited enough."""
        if not self._leased:
            return
        if self._run_ahead is not None:
            self._run_ahead.mark(point)
        lease = self._lease
        if lease.undisturbed:
            return
        if not lease.holding or lease.asked_to_yield or (lease.pressed and time.monotonic() >= self._quantum_ends_s):
            self._start(lease.yield_turn())

    def _end(self) -> None:
        if self._leased is None:
            return
        if self._leased and self._run_ahead is not None:
            self._run_ahead.mark(None)  # else the next turn would begin with what the last module has queued
        self._leased = None
        self._lease.release()


class _Habit:
    """How often something is done before something else follows: as often as last time.

    So the lease is kept from a forward to its backward, and from that to the optimizer's step, but not where a forward
    stands alone or gradients are accumulated: there a data loader may come next.
    """

    def __init__(self) -> None:
        self._usual = 1
        self._count = 0

    def comes_next(self) -> bool:
        """It is done once more: whether the other is to follow now."""
        self._count += 1
        return self._count == self._usual

    def has_come(self) -> None:
        if self._count:
            self._usual, self._count = self._count, 0


def gpu_run_ahead(limit_s: float) -> RunAhead:
    """On the current stream of the current CUDA device. The events sleep: spinning would take a core."""
    return RunAhead(limit_s, lambda: torch.cuda.Event(enable_timing=True, blocking=True))


def _hookable(module: nn.Module) -> list[nn.Module]:
    """``module`` and what is inside of it, except for encoder layers of torch: a hook anywhere in one turns off its
    fast path in eval mode, which computes other numbers."""
    if isinstance(module, nn.TransformerEncoderLayer):
        return []
    return list(dict.fromkeys([module, *(inner for child in module.children() for inner in _hookable(child))]))
