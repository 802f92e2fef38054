"""Batches of different sizes on the ranks: how many samples each rank has, and when the ranks tell each other.

The count of a step travels while its forward runs, and is waited for when the first gradients are to be sent. A sum of
gradients, weighted by counts, is that of the whole batch: with g_r the gradient of a mean over the n_r samples of rank
r, the gradient of the mean over all n samples is the sum of n_r / n * g_r.

A rank without data does DDP's forward and backward with a gradient of zeros, and without the model: other ranks' DDP
expects its buckets, whatever is in them.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddp_crossover.addons.weights.batch_timer import BatchTimer
from ddp_crossover.addons.weights.unreduced_samples import UnreducedSamples
from ddp_crossover.comm.link import Link
from ddp_crossover.comm.sums import RankWeights
from ddp_crossover.compute_waits import ComputeWaits
from ddp_crossover.hook.forwards import UseOrder
from ddp_crossover.log import say
from ddp_crossover.moments import BeforeBackward, Follower
from ddp_crossover.pending.gradient_marks import Mark, are_empty, are_same, marks_of
from ddp_crossover.pending.lazy_params import LazyParams
from ddp_crossover.pending.slots import Slot
from ddp_crossover.torch_internals.ddp import is_in_training_mode, runs_instead_of_model
from ddp_crossover.torch_internals.loss_scale import without_loss
from ddp_crossover.watching.optimizer_snapshot import optimizer_parameters


def why_not_without_data(ddp: DistributedDataParallel) -> str | None:
    """The setting of DDP for which each rank needs a forward of the model; None if there is none."""
    return next((name for name in ("find_unused_parameters", "static_graph") if getattr(ddp, name)), None)


def take_part_without_data(ddp: DistributedDataParallel, parameters: Sequence[nn.Parameter]) -> None:
    """Do what a step's forward and backward do with other ranks; the gradients of this rank are zeros.

    Args:
        ddp: the model.
        parameters: those that DDP manages, in the order in which the model's forward uses them.

    Raises:
        RuntimeError: if DDP wants to see which parameters a real forward uses.
    """
    if (setting := why_not_without_data(ddp)) is not None:
        raise RuntimeError(
            f"batch(0) without a forward cannot tell DDP with {setting}=True which parameters the other ranks use: "
            "run forward and backward with any sample in batch(0), whose gradients count for nothing"
        )

    def number_of_each() -> list[Tensor]:
        # Of a single element the sum hands on the gradient itself, which would look like one that a script keeps.
        return [(parameter * 1 if parameter.numel() == 1 else parameter).sum() for parameter in parameters]

    # In place of the model's forward alone: what surrounds it looks at the model.
    with runs_instead_of_model(ddp, number_of_each), torch.enable_grad():
        numbers = ddp.forward()
    torch.autograd.backward(numbers, [torch.zeros_like(number) for number in numbers])


_INSIDE = (
    "this model is attached with weighted=True: put its forward and its backward into `with state.batch(n):`, with the "
    "number of samples (or tokens) over which the loss of this rank is a mean"
)
_IS_EVALUATION = (
    "state.batch(0) without a forward takes part in a training step, and the model is in eval mode: put an evaluation "
    "under torch.no_grad(), around state.batch(); to train in eval mode, run forward and backward with any sample in "
    "state.batch(0), whose gradients count for nothing"
)
_NOT_REDUCED = (
    "this state.batch() has ended with all of its forwards under no_sync(), so no gradient was reduced: if it is one "
    "of several micro-batches of a step, enter no_sync() before state.batch(); if it is the whole step, leave the last "
    "micro-batch that has samples out of no_sync()"
)
_DROPPED = (
    "the gradients of earlier micro-batches were set to None or to zeros between a forward and its backward, when the "
    "other ranks had been told of their samples: call optimizer.zero_grad() before the forward"
)


class _Announced(NamedTuple):
    """What this rank has told the others about the step that comes next.

    Attributes:
        samples: number of samples.
        of_ranks: waits for what the others have announced.
    """

    samples: int
    of_ranks: Callable[[], list[int]]


class WeightedBatches(Follower):
    """Follows the batches of one model through forward and backward. Implements ``Weighing``.

    Args:
        ddp: the model.
        link: tells the ranks' counts.
        weights: set for each backward.
        compute_waits: what the wait for counts goes through.
        params: the parameters that DDP manages.
        use_order: in which order the model's forward uses them.

    Attributes:
        timer: times batches, for a balancer; None if nobody wants to know.
    """

    may_leave_out_forwards = True  # a rank without samples in a micro-batch makes none
    needs_reduction = True

    def __init__(
        self,
        ddp: DistributedDataParallel,
        link: Link,
        weights: RankWeights,
        compute_waits: ComputeWaits,
        params: LazyParams,
        use_order: UseOrder,
    ) -> None:
        self._ddp = weakref.ref(ddp)
        self._link = link
        self._weights = weights
        self._compute_waits = compute_waits
        self._params = params
        self._use_order = use_order
        # Of the batch under way; None outside of one.
        self._count: int | None = None
        self._has_reduced = self._was_unsynced = self._has_no_data = False
        self._unreduced = UnreducedSamples(self._parameters)
        self._trained = 0  # samples of the last step
        self._announced: _Announced | None = None
        # The same, of a batch that has raised before its backward: it counts for the step that the others are in.
        self._carried_over: _Announced | None = None
        self._has_warned = False
        # Forwards with a broadcast of buffers, in the batch under way and in the last one that was reduced.
        self._broadcasts = self._usual_broadcasts = 0
        self._kept: list[tuple[nn.Parameter, torch.Tensor | None]] | None = None
        self._gradients_before: list[Mark | None] = []  # the latest forward, with find_unused_parameters
        self.timer: BatchTimer | None = None

    def remove(self) -> None:
        """Remove the timer's hook on the model."""
        if self.timer is not None:
            self.timer.remove()

    # What users call.

    @contextlib.contextmanager
    def batch(self, count: int) -> Iterator[None]:
        """Context of the forward and backward of a batch of ``count`` samples on this rank.

        Args:
            count: number of samples.

        Raises:
            TypeError, ValueError: unless ``count`` is a whole number from 0.
            RuntimeError: in another batch; if it ends without the reduced backward that other ranks wait for.
        """
        count = checked_count(count)
        if self._count is not None:
            raise RuntimeError("state.batch() inside of state.batch(): one batch is the data of one optimizer step")
        if not torch.is_grad_enabled():
            yield  # an evaluation
            return
        ddp = self._model
        self._count = count
        self._has_reduced = self._was_unsynced = False
        self._broadcasts = 0
        is_unsynced = not ddp.require_backward_grad_sync
        self._unreduced.begin_batch(count, is_unsynced=is_unsynced)
        has_raised = True
        if self.timer is not None:
            self.timer.batch_begins()
        try:
            yield
            if not (count or self._has_reduced or is_unsynced):
                if not is_in_training_mode(ddp):
                    raise RuntimeError(_IS_EVALUATION)
                self._take_part(ddp)
            if not self._has_reduced and self._announced is not None:
                self._skip_step(self._announced)
            elif not self._has_reduced and self._was_unsynced and not is_unsynced:
                raise RuntimeError(_NOT_REDUCED)
            if self.timer is not None:
                self.timer.batch_ended(count, self._trained if self._has_reduced else None)
            has_raised = False
        finally:
            if self._has_reduced:
                self._usual_broadcasts = self._broadcasts
            else:
                if has_raised:
                    self._carried_over = self._announced or self._carried_over
                self._put_back()
                self._unreduced.end_batch(is_whole=is_unsynced, has_raised=has_raised)
            self._count = self._announced = self._kept = None

    def _skip_step(self, announced: _Announced) -> None:
        """End a batch with a forward and no backward, which is right if no rank has one."""
        announced.of_ranks()
        if self.timer is not None:
            self.timer.step_skipped(announced.samples)
        if not self._has_warned:
            self._has_warned = True
            say(
                "a state.batch() has ended after a forward without a backward, which all ranks have to leave out "
                "together: if the others go backward they wait for this rank, so multiply its loss by 0 instead",
                logging.WARNING,
            )

    @torch.no_grad()
    def _put_back(self) -> None:
        """Undo what the backward of a micro-batch without samples has added to gradients."""
        for parameter, gradient in self._kept or ():
            if gradient is None or parameter.grad is None:
                parameter.grad = None
            else:
                parameter.grad.copy_(gradient)

    def _parameters(self) -> list[nn.Parameter]:
        # The DDP object has none while a rank without data takes part; `params` has none after detach.
        return [lazy.parameter for lazy in self._params.all] or list(self._model.parameters())

    def _in_use_order(self) -> list[nn.Parameter]:
        return [lazy.parameter for lazy in self._use_order.sorted(self._params.all)]

    def _take_part(self, ddp: DistributedDataParallel) -> None:
        if self._usual_broadcasts > 1:
            raise RuntimeError(
                f"DDP broadcasts buffers in each forward, of which the last step had {self._usual_broadcasts}, and an "
                "empty state.batch(0) stands for one: run forwards and backward with any sample in it, whose gradients "
                "count for nothing, or build DistributedDataParallel with broadcast_buffers=False"
            )
        self._has_no_data = True
        try:
            with without_loss():
                take_part_without_data(ddp, self._in_use_order())
        finally:
            self._has_no_data = False

    def take_left_over(self) -> int:
        """Number of samples whose gradients are in ``.grad`` and have not been reduced; from now on none."""
        return self._unreduced.take()

    # What the reducer calls.

    def refuse_unreduced(self, optimizer: Optimizer, *, were_added_to: bool) -> None:
        """Raise RuntimeError if this optimizer is about to use gradients that are not reduced, and so not weighted.

        Args:
            optimizer: the optimizer.
            were_added_to: whether a backward has added this rank's own gradients to reduced ones.
        """
        if (self._unreduced.number or were_added_to) and not are_empty(optimizer_parameters(optimizer)):
            # Where a framework calls the closure, it is tempting to put batch() around step().
            closure = "" if self._count is None else "; if step() gets a closure, enter state.batch() inside of it"
            raise RuntimeError(
                "optimizer.step() was called with gradients of this rank alone, which were not reduced and so not "
                "weighted (weighted=True): leave the last micro-batch of a step out of no_sync(), add up losses before "
                f"one backward, or call optimizer.zero_grad() to drop them{closure}"
            )

    def forward_begins(self, ddp: DistributedDataParallel) -> None:
        """Send this rank's count, if the backward of this forward is going to reduce gradients."""
        reduces = ddp.require_backward_grad_sync
        if self._count is None:
            raise RuntimeError(_INSIDE)
        self._broadcasts += ddp.will_sync_module_buffers()
        if not self._has_reduced:
            self._unreduced.forward_begins(reduces=reduces)
        if not reduces:
            self._was_unsynced = True
            if self._count == 0 and self._kept is None:  # what its backward adds counts for nothing
                self._kept = [
                    (parameter, None if parameter.grad is None else parameter.grad.clone())
                    for parameter in self._in_use_order()
                ]
        elif not self._has_reduced and self._announced is None:
            self._announce()
        if ddp.find_unused_parameters:
            self._gradients_before = marks_of(self._parameters())

    def forward_ends(self, ddp: DistributedDataParallel, output: Any, before_backward: BeforeBackward) -> None:
        """Watch the gradients of earlier micro-batches until the backward of this forward begins."""
        if self._unreduced.earlier and not self._has_reduced:
            before_backward(self._backward_begins)

    def _backward_begins(self) -> None:
        if self._count is None or self._has_reduced:
            return
        if self._unreduced.forget_what_was_dropped() and self._announced is not None:
            raise RuntimeError(_DROPPED)

    def _announce(self) -> _Announced:
        """Tell the others this rank's number of samples in this step, unless they have been announced."""
        if self._carried_over is None:
            of_ranks = self._link.exchange_numbers(self._unreduced.number)
            self._announced = _Announced(self._unreduced.number, of_ranks)
        elif self._carried_over.samples == self._unreduced.number:
            self._announced, self._carried_over = self._carried_over, None
        else:
            raise RuntimeError(
                "the last batch() of this rank has raised between forward and backward, "
                f"when the others knew of its {self._carried_over.samples} samples, and they wait for its gradients: "
                "repeat it with as many samples, and multiply the loss by 0 to have none of them count; if all ranks "
                "skip such a step, catch the error inside of state.batch()"
            )
        return self._announced

    def weigh(self) -> None:
        """Wait for the counts of all ranks, and set the weights of the backward that begins.

        Raises:
            RuntimeError: outside of a batch; if gradients of no sample would be added to others.
            ValueError: if no rank has a sample.
        """
        if self._count is None:
            raise RuntimeError(_INSIDE)
        if self._has_reduced:
            return  # the second backward of this batch
        if self._count == 0 and self._unreduced.number and not self._has_no_data:
            way_out = (
                "leave out forward and backward in state.batch(0)"
                if why_not_without_data(self._model) is None
                else "share samples so that no rank's last micro-batch is empty"
            )
            raise RuntimeError(
                "this batch has no sample, and its gradients would be added to those that earlier batches have left in "
                f".grad: {way_out}"
            )
        announced = self._announced or self._announce()  # a forward may not go through DDP
        since_s = time.perf_counter()
        with self._compute_waits.others.released(), self._compute_waits.of("counts of samples"):
            counts = announced.of_ranks()
        self._link.clock.waited(since_s, "counts of samples")
        self._weights.set_counts(counts)
        self._announced = None
        self._has_reduced = True
        self._trained = announced.samples
        self._unreduced.are_reduced()
        self._kept = None

    def refuse_unweighted(self, unassigned: Sequence[Slot]) -> None:
        """Raise RuntimeError if the backward has left gradients in ``.grad`` that DDP has not reduced."""
        for slot in unassigned:
            [mark] = marks_of([slot.parameter])
            if mark is not None and not are_same([self._gradients_before[slot.index]], [mark]):
                raise RuntimeError(
                    f"DDP takes {slot.name} for unused, and backward has made a gradient of it, which is not reduced "
                    "and not weighted (weighted=True): build DistributedDataParallel after "
                    "torch.nn.utils.parametrize.register_parametrization(), then attach"
                )

    def end(self) -> None:
        """Set the weights of a backward whose forward has begun, while ranks can still tell each other."""
        if self._announced is not None:
            self.weigh()

    @property
    def is_settled(self) -> bool:
        """Whether the sizes of batches will stay about as they are, so that measured times hold."""
        return self.timer is None or self.timer.is_settled

    @property
    def _model(self) -> DistributedDataParallel:
        ddp = self._ddp()
        assert ddp is not None  # the model is running
        return ddp


def checked_count(count: int) -> int:
    """The number of samples, if it is one. Raises TypeError or ValueError."""
    try:
        count = operator.index(count)
    except TypeError:
        raise TypeError(
            f"state.batch() takes the number of samples of this rank's batch, a whole number, got {count!r}"
        ) from None
    if count < 0:
        raise ValueError(f"state.batch() takes the number of samples of this rank's batch, 0 or more, got {count}")
    return count
