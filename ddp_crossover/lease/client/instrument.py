"""The lease in jobs without gaps: hooks on the model acquire and release the lease.

This is the only module of the lease that imports torch and the parent package when it is loaded. Only
:meth:`.client.GpuLease.instrument` imports it.

The hooks are: forward pre-hooks on modules, a forward hook on the model, gradient hooks on parameters, which run as
backward proceeds, gradient hooks on the model's outputs, which are the first to run in backward, an engine callback at
the end of backward, and hooks around the optimizer's step. They add no node to the autograd graph and change no tensor,
so in-place operations, checkpointing and compiled modules work as before. ``register_full_backward_hook`` is not used:
it wraps a module in an identity, and the resulting views cannot be modified in place.
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

from ...torch_internals import call_after_backward, has_hooks, is_compiled_in_place, is_in_backward, tensors_in
from .run_ahead import RunAhead


class Holder(Protocol):
    """The part of the lease's interface that the hooks use."""

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
    """Hooks on one model, made by :meth:`.client.GpuLease.instrument`. The end of a ``with`` block removes them."""

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
        self._leased: bool | None = None  # whether the current turn got the lease; None between turns
        self._in_backward = False
        self._backward_follows = _Habit()
        self._step_follows = _Habit() if optimizer is not None else None
        self._undo: list[Callable[[], None]] = []
        self._hang_up(model, optimizer)

    def remove(self) -> None:
        """Remove the hooks and release the lease. Copies of the model stop using the lease as well."""
        for undo in self._undo:
            undo()
        self._undo.clear()
        self._end()

    def __enter__(self) -> Instrument:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __deepcopy__(self, memo: dict[int, Any]) -> Instrument:
        return self  # a copy of the model, such as AveragedModel's, computes on the same GPU

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

    # ---- hooks

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return  # compiled code cannot check the lease while it runs
        if not is_in_backward():  # in backward, this is checkpointing's recomputed forward
            self._in_backward = False  # a backward that raised may have left it True
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
        elif self._undo:  # empty after remove(), when hooks on a copy of the model still run
            self._start(self._lease.acquire())

    def _start(self, leased: bool) -> None:
        self._leased = leased
        self._quantum_ends_s = time.monotonic() + self._quantum_s
        if self._run_ahead is not None:
            self._run_ahead.restart()

    def _check(self, point: Hashable) -> None:
        """Yield if another job is due; request a lost turn again. An unleased turn stays so: it has waited enough."""
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
            self._run_ahead.mark(None)  # count the last module's work in this turn, not the next
        self._leased = None
        self._lease.release()


class _Habit:
    """Predicts that one event follows another after as many repetitions as last time.

    The lease is thus kept from a forward to its backward, and from the backward to the optimizer's step. It is not kept
    after a forward without backward or while gradients are accumulated, because a data loader may run next.
    """

    def __init__(self) -> None:
        self._usual = 1
        self._count = 0

    def comes_next(self) -> bool:
        """Count one more repetition and return whether the other event is expected next."""
        self._count += 1
        return self._count == self._usual

    def has_come(self) -> None:
        if self._count:
            self._usual, self._count = self._count, 0


def gpu_run_ahead(limit_s: float) -> RunAhead:
    """A :class:`.run_ahead.RunAhead` on the current CUDA stream. Its events block: spinning would occupy a core."""
    return RunAhead(limit_s, lambda: torch.cuda.Event(enable_timing=True, blocking=True))


def _hookable(module: nn.Module) -> list[nn.Module]:
    """``module`` and its submodules, each once, without any ``nn.TransformerEncoderLayer`` and its contents.

    A hook in such a layer turns off its fast path in eval mode, and the slow path's results differ in the last bits.
    """
    if isinstance(module, nn.TransformerEncoderLayer):
        return []
    return list(dict.fromkeys([module, *(inner for child in module.children() for inner in _hookable(child))]))
