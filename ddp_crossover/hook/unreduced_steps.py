"""Finds steps whose gradients DDP has not reduced, although nothing has asked for that.

The commonest faults of training with DDP raise nothing: a forward through ``ddp.module``, a second backward, a step in
a hook of backward, parameters that were moved after DDP was built. Each rank then trains on its own gradients.

A gradient does not tell whether a backward has left it like that, or the script has set or averaged it by itself. So
once a step looks unreduced, a few elements of one gradient are copied in each backward from then on. If ``step()``
finds them again, but for a factor and clipping, nobody has averaged them. Before that, no gradient costs anything.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddp_crossover.hook.weighing import Weighing
from ddp_crossover.log import first_of
from ddp_crossover.pending.early_reads import SOMEWHERE, caller
from ddp_crossover.pending.gradient_marks import version_of
from ddp_crossover.pending.pending_gradient import PendingGrad, resolved
from ddp_crossover.pending.reduced_gradients import ReducedGradients
from ddp_crossover.report.stats import FallbackLog
from ddp_crossover.torch_internals.autograd import is_in_backward
from ddp_crossover.torch_internals.ddp import unmanaged_parameters
from ddp_crossover.torch_internals.dispatch import outside_of_modes
from ddp_crossover.watching.optimizer_snapshot import optimizer_parameters

_SAMPLED = 4096  # elements
_FEWEST_WITHIN = 4  # elements within the limit of clipping: of fewer nobody can tell
_ROUNDING = 1e-5  # of 16-bit gradients that are clipped or unscaled

_ON_PURPOSE = "To train ranks apart on purpose, say so with ddp.no_sync()"


class _Cause(NamedTuple):
    """Why a backward was not reduced, in words that follow it, and the way out."""

    why: str
    way_out: str


_PAST_DDP = _Cause("did not come from a forward of DDP", f"Call ddp(x) in training, not ddp.module(x). {_ON_PURPOSE}")
_SECOND = _Cause(
    "came after the one that DDP has reduced, and DDP reduces one for each forward",
    f"Add up losses before one backward. {_ON_PURPOSE}",
)
_NOT_ENDED = _Cause(
    "had not ended, and DDP reduces gradients behind their hooks", f"Call step() behind backward(). {_ON_PURPOSE}"
)
_OUT_OF_SIGHT = _Cause(
    "was not seen by DDP, although its forward ran",
    "Move, cast and parametrize parameters (.to(), .cpu(), .double()) before DistributedDataParallel is built, and "
    "make the loss of ddp(x), not of ddp.module(x)",
)


class UnreducedSteps:
    """Follows the reductions and the steps of one model.

    Args:
        ddp: the model.
        named: the parameters that DDP manages, with their names.
        optimizers: its optimizers.
        fallbacks: told of the first such step.
        world_size: number of ranks; one has nobody to reduce with.
        weighing: what ranks weigh. If it needs a reduction, such a step is an error, and is looked for from the first
            step on.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        named: Sequence[tuple[str, Parameter]],
        optimizers: Sequence[Optimizer],
        fallbacks: FallbackLog,
        world_size: int,
        weighing: Weighing,
    ) -> None:
        self._ddp = weakref.ref(ddp)
        self._names = {id(parameter): name for name, parameter in named}
        self._fallbacks = fallbacks
        self._weighing = weighing
        self._is_over = world_size == 1
        self._reductions = 0
        self._reductions_at_step: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._is_asked_for = self._awaits_reduction = False
        self._first = weakref.ref(named[0][1])
        self._first_as_reduced: _Writes | None = None
        self._watched: _WatchedGradient | None = None
        # Those that are trained already are said at attach.
        self._frozen = [(name, weakref.ref(p)) for name, p in unmanaged_parameters(ddp) if not p.requires_grad]
        if weighing.needs_reduction and not self._is_over:
            self._watch(parameter for optimizer in optimizers for parameter in self._parameters_of(optimizer))

    def remove(self) -> None:
        self._is_over = True
        if self._watched is not None:
            self._watched.remove()

    # What the reducer tells.

    def forward_ended(self, *, reduces: bool) -> None:
        """Note a forward of DDP, with gradients; one in ``no_sync()`` asks for gradients that are not reduced."""
        self._awaits_reduction = self._awaits_reduction or reduces
        self._is_asked_for = self._is_asked_for or not reduces

    def backward_reduced(self, gradients: ReducedGradients | None) -> None:
        """Note that a backward has ended whose gradients are reduced, but for those that DDP takes for unused."""
        self._reductions += 1
        self._is_asked_for = self._awaits_reduction = False
        self._first_as_reduced = _writes_to(self._first())
        if self._watched is not None and not _is_unassigned(self._watched.parameter, gradients):
            self._watched.forget()

    # What optimizers tell.

    def refuse_unreduced(self, optimizer: Optimizer, gradients: ReducedGradients | None, *, has_closure: bool) -> None:
        """See :class:`ddp_crossover.step.deferred_updates.Reductions`."""
        were_added_to = gradients is not None and gradients.were_added_to
        self._weighing.refuse_unreduced(optimizer, were_added_to=were_added_to)
        if self._is_over:
            return
        if self._frozen:
            self._say_what_thawed()
        was_reduced = self._reductions != self._reductions_at_step.get(optimizer, 0)
        self._reductions_at_step[optimizer] = self._reductions
        # Gradients that are to be weighted have to be reduced, whatever earlier micro-batches asked for. What is there
        # before a closure is not what the update takes: sharpness-aware steps climb by each rank's own.
        may_be_own = has_closure or not self._weighing.needs_reduction
        if may_be_own and (self._is_asked_for or not self._synchronizes):
            return
        if self._awaits_reduction and is_in_backward():
            self._say_in_backward(optimizer)
        elif self._watched is not None:
            self._judge(optimizer, self._watched, gradients, was_reduced=was_reduced)
        elif not was_reduced:
            self._watch(p for p in self._parameters_of(optimizer) if p.grad is not None)
        elif self._may_be_unreduced(gradients):
            self._watch(p for p in self._parameters_of(optimizer) if self._looks_unreduced(p, gradients))

    @property
    def _synchronizes(self) -> bool:
        ddp = self._ddp()
        return ddp is not None and ddp.require_backward_grad_sync

    def _parameters_of(self, optimizer: Optimizer) -> Iterator[Tensor]:
        # Of one element nobody can tell whether it was averaged or multiplied.
        return (
            parameter
            for parameter in optimizer_parameters(optimizer)
            if id(parameter) in self._names and parameter.requires_grad and parameter.numel() > 1
        )

    def _may_be_unreduced(self, gradients: ReducedGradients | None) -> bool:
        """Whether any gradient may be other than the latest reduction has left it; looks at no single one."""
        if gradients is not None and (gradients.were_added_to or gradients.unassigned):
            return True
        return self._first_has_changed()

    def _first_has_changed(self) -> bool:
        before, now = self._first_as_reduced, _writes_to(self._first())
        # Not `==`, which compares values; a tensor has one reference object as long as it lives.
        return before is not None and now is not None and (before.grad is not now.grad or before.number != now.number)

    def _looks_unreduced(self, parameter: Tensor, gradients: ReducedGradients | None) -> bool:
        if (grad := parameter.grad) is None:
            return False
        if isinstance(grad, PendingGrad) and grad.was_added_to:
            return True
        return _is_unassigned(parameter, gradients) or (parameter is self._first() and self._first_has_changed())

    def _watch(self, candidates: Iterator[Tensor]) -> None:
        if (parameter := next(candidates, None)) is not None:
            self._watched = _WatchedGradient(parameter, self._backward_writes)

    def _backward_writes(self) -> None:
        self._is_asked_for = self._is_asked_for or not self._synchronizes

    def _judge(
        self, optimizer: Optimizer, watched: _WatchedGradient, gradients: ReducedGradients | None, *, was_reduced: bool
    ) -> None:
        parameter = watched.parameter
        if parameter is None or not any(own is parameter for own in optimizer_parameters(optimizer)):
            return
        if (is_own := watched.is_of_this_rank()) is None:
            return
        if is_own:
            if _is_unassigned(parameter, gradients):
                cause = _OUT_OF_SIGHT
            elif was_reduced:
                cause = _SECOND
            else:
                cause = _OUT_OF_SIGHT if self._awaits_reduction else _PAST_DDP
            self._say(optimizer, parameter, watched.written_at, cause)
        if not self._weighing.needs_reduction:
            self.remove()  # it is said, or the script averages gradients by itself

    def _say_in_backward(self, optimizer: Optimizer) -> None:
        """Say that this step, in a hook of a backward that DDP is to reduce, comes before that."""
        if (parameter := next((p for p in self._parameters_of(optimizer) if p.grad is not None), None)) is None:
            return
        self._say(optimizer, parameter, SOMEWHERE, _NOT_ENDED)
        self.remove()

    def _say_what_thawed(self) -> None:
        refs = ((name, ref()) for name, ref in self._frozen)
        thawed = [name for name, p in refs if p is not None and p.requires_grad and p.grad is not None]
        if not thawed:
            return
        self._frozen.clear()
        what = (
            f"{first_of(thawed)} required no gradient when DistributedDataParallel was built, so DDP does not reduce "
            "what they get now, and ranks train apart, with this package as without"
        )
        way_out = (
            "Freeze parameters after DistributedDataParallel(find_unused_parameters=True) is built: what it was built "
            "with it goes on reducing when it thaws"
        )
        if self._weighing.needs_reduction:
            raise RuntimeError(f"{what}; gradients that are not reduced are not weighted (weighted=True). {way_out}")
        self._fallbacks.note(what, way_out)

    def _say(self, optimizer: Optimizer, parameter: Tensor, written_at: str, cause: _Cause) -> None:
        step = f"{type(optimizer).__name__}.step() at {caller()}"
        backward = "its backward" if written_at == SOMEWHERE else f"the backward at {written_at}"
        what = f"{step}: the gradient of {self._names[id(parameter)]} was not reduced by DDP in this step"
        why = f"because {backward} {cause.why}"
        if self._weighing.needs_reduction:
            raise RuntimeError(f"{what}, and so not weighted (weighted=True), {why}. {cause.way_out}")
        self._fallbacks.note(f"{what}, so ranks train apart, {why}", cause.way_out)


class _WatchedGradient:
    """The gradient of one parameter, as the latest backward has left it that DDP has not reduced.

    Attributes:
        written_at: file and line of that backward, as far as is known.

    Args:
        parameter: the parameter.
        on_write: called in each backward that writes its gradient.
    """

    def __init__(self, parameter: Tensor, on_write: Callable[[], None]) -> None:
        self.written_at = SOMEWHERE
        self._parameter = weakref.ref(parameter)
        self._on_write = on_write
        self._own: Tensor | None = None
        self._handle = parameter.register_post_accumulate_grad_hook(self._is_written)

    def remove(self) -> None:
        self._handle.remove()
        self._own = None

    @property
    def parameter(self) -> Tensor | None:
        return self._parameter()

    def forget(self) -> None:
        self._own = None

    def _is_written(self, parameter: Tensor) -> None:
        if parameter.grad is None:  # a hook before this one has used and dropped it
            self.forget()
            return
        self._own = outside_of_modes(lambda: _sample(parameter).clone())
        self.written_at = caller()
        self._on_write()

    def is_of_this_rank(self) -> bool | None:
        """Whether it is still as backward has left it, but for a factor and clipping; None if it cannot be compared."""
        parameter, own = self.parameter, self._own
        if parameter is None or parameter.grad is None or own is None:
            return None
        return outside_of_modes(lambda: _is_left(_sample(parameter), own))


def _sample(parameter: Tensor) -> Tensor:
    return resolved(parameter.grad).detach().reshape(-1)[:_SAMPLED]


def _is_left(value: Tensor, of: Tensor) -> bool | None:
    """Whether one is a multiple of the other, or was before clipping by value; None if one is zero or not finite."""
    size = value.abs()
    within = size < size.max()
    is_multiple = _is_multiple(value, of)
    if is_multiple is False and int(within.sum()) >= _FEWEST_WITHIN:
        return _is_multiple(value[within], of[within])
    return is_multiple


def _is_multiple(value: Tensor, of: Tensor) -> bool | None:
    """Whether one is a multiple of the other; None if one is zero or not finite."""
    value, of = value.double(), of.double()
    product_of_lengths = float(value.norm() * of.norm())
    if not 0 < product_of_lengths < float("inf"):
        return None
    return abs(float(value @ of)) >= (1 - _ROUNDING) * product_of_lengths


class _Writes(NamedTuple):
    """The object in ``.grad``, and how often it was written (by autograd, if its value is still on the wire)."""

    grad: weakref.ref[Tensor]
    number: int


def _writes_to(parameter: Tensor | None) -> _Writes | None:
    grad = None if parameter is None else parameter.grad
    return None if grad is None else _Writes(weakref.ref(grad), version_of(grad))


def _is_unassigned(parameter: Tensor | None, gradients: ReducedGradients | None) -> bool:
    return gradients is not None and any(slot.parameter is parameter for slot in gradients.unassigned)
