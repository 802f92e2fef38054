"""The lease in jobs without gaps: hooks on the model acquire and release the lease.

This is the only module of the lease that imports torch and the parent package when it is loaded. Only
:meth:`.lease.GpuLease.instrument` imports it.

The hooks are: forward pre-hooks on modules, a forward hook on the model, gradient hooks on parameters, which run as
backward proceeds, gradient hooks on the model's outputs, which are the first to run in backward, an engine callback at
the end of backward, and hooks around the optimizer's step. They add no node to the autograd graph and change no tensor,
so in-place operations, checkpointing and compiled modules work as before. ``register_full_backward_hook`` is not used:
it wraps a module in an identity, and the resulting views cannot be modified in place.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable
from enum import Enum, auto
from functools import partial
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from .... import device as gpu
from ....torch_internals.autograd import call_after_backward, is_in_backward
from ....torch_internals.compiled import is_compiled_in_place
from ....torch_internals.dispatch import tensors_in_output
from ....torch_internals.optimizers import has_hooks


class TurnTaker(Protocol):
    """The part of :class:`.lease.GpuLease` that the hooks use."""

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


class _Turn(Enum):
    """State of the job's turn, as far as the hooks know."""

    NONE = auto()  # no forward, backward or step is running: the next hook acquires the lease
    LEASED = auto()  # the lease was acquired
    UNLEASED = auto()  # acquiring it failed: this turn runs without it, since it has waited long enough


class Instrument:
    """Hooks on one model, made by :meth:`ddp_crossover.GpuLease.instrument`. The end of a ``with`` block removes them.

    The lease is held from the beginning of a forward to its end. If a backward is expected, because one followed last
    time, it is held to the end of that backward; with ``optimizer``, to the end of an expected step. Hooks at each
    module and gradient check whether another job waits. If so, the lease is released and requested again: at once for
    a filler that is asked to yield, otherwise after the quantum. A check takes about a microsecond while no job waits.

    Compiled modules and torch's ``TransformerEncoderLayer`` are hooked from outside only; CUDA graphs run no hooks. A
    copy of the model uses the lease as well.
    """

    def __init__(
        self,
        lease: TurnTaker,
        model: nn.Module,
        optimizer: Optimizer | None,
        quantum_s: float,
        run_ahead: RunAhead | None,
    ) -> None:
        if isinstance(model, DistributedDataParallel):
            raise ValueError(
                "model must not be a DDP model, because the lease would be held while DDP communicates: "
                "attach the lease with ddp_crossover.attach(), or use lease.held() around code that only computes"
            )
        if is_compiled_in_place(model):
            raise ValueError(
                "model was compiled by model.compile(), which runs no hooks: instrument torch.compile(model) instead, "
                "or use lease.held()"
            )
        self._lease = lease
        self._quantum_s = quantum_s
        self._quantum_ends_s = 0.0
        self._run_ahead = run_ahead
        self._turn = _Turn.NONE
        self._in_backward = False
        self._backward = _EventPredictor()
        self._step = _EventPredictor() if optimizer is not None else None
        self._hooks = self._install_hooks(model, optimizer)

    def remove(self) -> None:
        """Remove the hooks and release the lease. Copies of the model stop using the lease as well."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._end_turn()

    def __enter__(self) -> Instrument:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __deepcopy__(self, memo: dict[int, Any]) -> Instrument:
        return self  # a copy of the model, such as AveragedModel's, computes on the same GPU

    def __reduce__(self) -> NoReturn:
        raise TypeError("an instrumented model cannot be pickled: save its state_dict(), or remove() the hooks first")

    def _install_hooks(self, model: nn.Module, optimizer: Optimizer | None) -> list[RemovableHandle]:
        hooks = [
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
            hooks.append(optimizer.register_step_pre_hook(self._before_step))
            hooks.append(optimizer.register_step_post_hook(self._after_step))
        return hooks

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
        results = [tensor for tensor in tensors_in_output(output) if tensor.grad_fn is not None]
        for result in results:
            result.register_hook(partial(self._on_gradient, "result"))
        if is_in_backward():
            return
        if not (results and module.training and self._backward.is_next()):
            self._end_turn()

    def _on_gradient(self, point: Hashable, gradient: Tensor) -> None:
        if not self._in_backward:
            self._in_backward = True
            call_after_backward(self._after_backward)
        self._begin_or_check(point)

    def _after_backward(self) -> None:
        self._in_backward = False
        self._backward.note()
        if self._step is None or not self._step.is_next():
            self._end_turn()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._begin_or_check(optimizer)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        assert self._step is not None
        self._step.note()
        self._end_turn()

    # ---- turns

    def _begin_or_check(self, point: Hashable) -> None:
        if self._turn is not _Turn.NONE:
            self._check(point)
        elif self._hooks:  # empty after remove(), when hooks on a copy of the model still run
            self._start_turn(self._lease.acquire())

    def _start_turn(self, leased: bool) -> None:
        self._turn = _Turn.LEASED if leased else _Turn.UNLEASED
        self._quantum_ends_s = time.monotonic() + self._quantum_s
        if self._run_ahead is not None:
            self._run_ahead.restart()

    def _check(self, point: Hashable) -> None:
        """Yield if another job is due, and request a lost turn again. An unleased turn stays unleased."""
        if self._turn is not _Turn.LEASED:
            return
        if self._run_ahead is not None:
            self._run_ahead.mark(point)
        lease = self._lease
        if lease.undisturbed:
            return
        if not lease.holding or lease.asked_to_yield or (lease.pressed and time.monotonic() >= self._quantum_ends_s):
            self._start_turn(lease.yield_turn())

    def _end_turn(self) -> None:
        if self._turn is _Turn.NONE:
            return
        if self._turn is _Turn.LEASED and self._run_ahead is not None:
            self._run_ahead.mark(None)  # count the last module's work in this turn, not the next
        self._turn = _Turn.NONE
        self._lease.release()


class _EventPredictor:
    """Predicts that an event, such as a backward, follows another one after as many repetitions as last time.

    The lease is thus kept from a forward to its backward, and from the backward to the optimizer's step. It is not kept
    after a forward without backward or while gradients are accumulated, because a data loader may run next.
    """

    def __init__(self) -> None:
        self._usual = 1
        self._count = 0

    def is_next(self) -> bool:
        """Count one more repetition of the other event and return whether this event is expected next."""
        self._count += 1
        return self._count == self._usual

    def note(self) -> None:
        if self._count:
            self._usual, self._count = self._count, 0


_BETWEEN_TURNS = object()


class _Segment(NamedTuple):
    """The device work queued between two hooks."""

    point: Hashable
    end: gpu.Event
    expected_s: float


class RunAhead:
    """Bounds the device time that is queued when a hook returns, so that a filler can give the GPU back soon.

    The work between two hooks (a segment) is expected to take as long as last time. An unmeasured segment counts as the
    limit, so the first pass runs one segment at a time. If a segment takes longer than the limit, the host waits for
    it. Queued work cannot be withdrawn, so the bound is the limit or the longest segment, whichever is longer.

    Args:
        limit_s: seconds of device time that may be queued when :meth:`mark` returns.
        record: a new event at the end of what is queued now. It must measure time, and release the GIL while the host
            waits for it.
    """

    def __init__(self, limit_s: float, record: Callable[[], gpu.Event]) -> None:
        self._limit_s = limit_s
        self._record = record
        self._took_s: dict[Hashable, float] = {}
        self._queued: deque[_Segment] = deque()
        self._queued_s = 0.0
        self._start: gpu.Event | None = None  # start of the oldest queued segment

    def restart(self) -> None:
        """Start measuring here: earlier device time belonged to another job or was idle."""
        self._queue(_BETWEEN_TURNS, 0.0)

    def mark(self, point: Hashable) -> None:
        """End a segment at the hook ``point``, and wait until the expected queued time fits the limit."""
        self._queue(point, self._took_s.get(point, self._limit_s))

    def _queue(self, point: Hashable, expected_s: float) -> None:
        event = self._record()
        self._queued.append(_Segment(point, event, expected_s))
        self._queued_s += expected_s
        while self._queued and (self._queued_s > self._limit_s or self._queued[0].end.query()):
            self._retire(self._queued.popleft())

    def _retire(self, segment: _Segment) -> None:
        segment.end.synchronize()
        if self._start is not None:
            self._took_s[segment.point] = self._start.elapsed_time(segment.end) / 1e3
        self._start = segment.end
        self._queued_s -= segment.expected_s


def gpu_run_ahead(limit_s: float) -> RunAhead:
    """A :class:`RunAhead` on the current CUDA stream. Its events block: spinning would occupy a core."""
    return RunAhead(limit_s, lambda: gpu.record(gpu.current_stream(), timed=True, awaited=True))


def _hookable(module: nn.Module) -> list[nn.Module]:
    """``module`` and its submodules, each once, without any ``nn.TransformerEncoderLayer`` and its contents.

    A hook in such a layer turns off its fast path in eval mode, and the slow path's results differ in the last bits.
    """
    if isinstance(module, nn.TransformerEncoderLayer):
        return []
    return list(dict.fromkeys([module, *(inner for child in module.children() for inner in _hookable(child))]))
