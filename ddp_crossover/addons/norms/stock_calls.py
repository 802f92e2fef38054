"""Torch's own clipping and loss scaling on shards, for ``norms="sharded"``.

``torch.nn.utils.clip_grad_norm_``, ``get_total_norm``, ``clip_grads_with_norm_`` and ``torch.amp.GradScaler`` pass
gradients to a few operators, which reach :class:`PendingGrad`. Norms and checks for infinities are computed on shards,
for one small exchange; a factor is left pending. So none of them waits for a gather leg.

The exchange is a collective: every rank must make the same calls. So only these functions are answered here, and no
operator that a script calls itself: ``p.grad.norm()`` on one rank works as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ddp_crossover.addons.norms import sharded_norms as shards
from ddp_crossover.comm.leg import LegError
from ddp_crossover.dear import Pipeline
from ddp_crossover.pending.pending_gradient import PendingGrad
from ddp_crossover.pending.slots import Slot
from ddp_crossover.torch_internals.gradient_calls import (
    FOREACH_MUL_,
    FOREACH_NORM,
    FOREACH_UNSCALE_,
    Caller,
    GradientCall,
    gradient_caller,
)


class StockCalls:
    """Answers the operators that torch's functions call with pending gradients.

    Args:
        pipeline: the pipeline that carries the gradients.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._answers: dict[Any, tuple[GradientCall, Callable[..., Any]]] = {
            FOREACH_NORM: (GradientCall.NORM, self._norms),
            torch.linalg.vector_norm: (GradientCall.NORM, self._norm),
            FOREACH_MUL_: (GradientCall.CLIP, self._scale_all),
            Tensor.mul_: (GradientCall.CLIP, self._scale),
            FOREACH_UNSCALE_: (GradientCall.UNSCALE, self._unscale),
        }
        # Norms that torch will ask for next, with the list of gradients of its call. Torch takes norms one by one, or
        # by dtype; all of them need one exchange.
        self._asked: Sequence[Tensor] = ()
        self._ready: dict[int, Tensor] = {}
        self._left = 0
        self._slots: dict[int, Slot] = {}
        self._slots_of_iteration = -1

    def answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of ``func(*args, **kwargs)``, or ``NotImplemented`` if it needs whole gradients."""
        expected, answer = self._answers.get(func, (None, None))
        if answer is None or kwargs or not self._pipeline.has_shared_gradients:
            return NotImplemented
        caller = gradient_caller()
        if caller is None or caller.call is not expected:
            return NotImplemented
        with torch.no_grad():
            try:
                return answer(caller, *args)
            except LegError as error:
                raise LegError(f"{error}. Or ranks called different functions. {shards.EVERY_RANK}") from error

    def _norms(self, caller: Caller, gradients: Sequence[Tensor], norm_type: float = 2.0) -> Any:
        if not norm_type > 0:
            return NotImplemented
        if self._asked is not caller.gradients:
            self._forget()
            self._ready = self._norms_on_shards(caller.gradients, norm_type)
            self._asked, self._left = caller.gradients, self._count(caller.gradients)
        others = [self._plain(gradient) for gradient in gradients if id(gradient) not in self._ready]
        of_others = iter(FOREACH_NORM(others, norm_type) if others else ())
        norms = [
            next(of_others) if (norm := self._ready.get(id(gradient))) is None else norm.to(gradient.dtype)
            for gradient in gradients
        ]
        self._left -= self._count(gradients)
        if self._left <= 0:
            self._forget()
        return norms

    def _norm(self, caller: Caller, gradient: Tensor, norm_type: float = 2.0) -> Any:
        norms = self._norms(caller, [gradient], norm_type)
        return norms if norms is NotImplemented else norms[0]

    def _count(self, gradients: Sequence[Tensor]) -> int:
        """How many of these gradients torch will pass here, and not to another model's, or to its own norm."""
        return sum(self._is_ours(gradient) for gradient in gradients)

    def _forget(self) -> None:
        self._asked, self._ready = (), {}  # a reference to a gradient would have it delivered before the next backward

    def _norms_on_shards(self, gradients: Sequence[Tensor], norm_type: float) -> dict[int, Tensor]:
        """The norms by id of the gradient, of those that are some parameter's ``.grad``."""
        pipeline = self._pipeline
        slot_of = {id(slot.parameter.grad): slot for slot in pipeline.slots if slot.parameter.grad is not None}
        slots = {id(gradient): slot_of[id(gradient)] for gradient in gradients if id(gradient) in slot_of}
        where = shards.shared_gradients(pipeline, [slot.parameter for slot in dict.fromkeys(slots.values())])
        assert where is not None  # `answer` has made sure that they are shared, and all of them have slots
        norms = shards.norms(pipeline, where, norm_type)
        return {key: norms[slot] for key, slot in slots.items()}

    def _scale_all(self, caller: Caller, gradients: Sequence[Tensor], factor: Tensor) -> Sequence[Tensor]:
        others = [self._plain(gradient) for gradient in gradients if not self._leave_pending(gradient, factor)]
        if others:
            FOREACH_MUL_(others, factor)
        return gradients

    def _scale(self, caller: Caller, gradient: Tensor, factor: Tensor) -> Tensor:
        if not self._leave_pending(gradient, factor):
            self._plain(gradient).mul_(factor)
        return gradient

    def _unscale(self, caller: Caller, gradients: Sequence[Tensor], found_inf: Tensor, inverse_scale: Tensor) -> None:
        norms = self._norms_on_shards(gradients, float("inf"))
        others = [self._plain(gradient) for gradient in gradients if id(gradient) not in norms]
        if norms:
            # The maximum norm is NaN or infinite exactly when an element is.
            finite = torch.stack(list(norms.values())).isfinite().all()
            found_inf.copy_(torch.maximum(found_inf, (~finite).to(found_inf)))
        known = [gradient for gradient in gradients if id(gradient) in norms]
        self._scale_all(caller, known, inverse_scale.reshape(()))
        if others:
            FOREACH_UNSCALE_(others, found_inf, inverse_scale)

    def _leave_pending(self, gradient: Tensor, factor: Tensor) -> bool:
        """Have the gradient multiplied when it is complete; returns False if it is not on the wire, or used already."""
        pipeline = self._pipeline
        if self._slots_of_iteration != pipeline.iteration:
            self._slots = {id(slot.pending.current): slot for slot in pipeline.slots}
            self._slots_of_iteration = pipeline.iteration
        slot = self._slots.get(id(gradient))
        if slot is None or slot.parameter.grad is not gradient or not pipeline.gradients.is_pending(slot):
            return False
        if slot in pipeline.updates:  # after step() the fusion buffer belongs to the update
            return False
        slot.scale_by(factor)
        return True

    def _plain(self, gradient: Tensor) -> Tensor:
        """The gradient's value; another model's pending gradient stays what it is, for that model to answer."""
        return gradient.resolve() if self._is_ours(gradient) else gradient  # type: ignore[attr-defined]

    def _is_ours(self, gradient: Tensor) -> bool:
        return isinstance(gradient, PendingGrad) and gradient.is_answered_by(self.answer)


def answers_of_shards(pipeline: Pipeline) -> Callable[..., Any]:
    """What answers torch's clipping and loss scaling from shards; see :class:`DeferredUpdates`."""
    return StockCalls(pipeline).answer
