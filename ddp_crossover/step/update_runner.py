"""The updates of one model that are pending: deferred at the end of a step, applied when somebody asks, or taken back.

A step can be taken back while none of its updates has been written. An update that breaks off in the middle leaves some
parameters updated and others not, as a plain ``step()`` would; training does not go on after it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ddp_crossover.comm.leg import LegError
from ddp_crossover.comm.stream_order import StreamOrder
from ddp_crossover.dear import Pipeline
from ddp_crossover.log import say
from ddp_crossover.pending.early_reads import EarlyReads, is_saving
from ddp_crossover.pending.lazy_param import LazyParam, StaleParameterError
from ddp_crossover.pending.lazy_params import LazyParams
from ddp_crossover.pending.slots import Slot
from ddp_crossover.pipeline.gathers import Gathers
from ddp_crossover.report.stats import FallbackLog
from ddp_crossover.step.after_update import AfterUpdate
from ddp_crossover.step.run_updates import DeferredUpdate, as_if_called_by_the_user
from ddp_crossover.step.step_call import note_not_deferred
from ddp_crossover.torch_internals.autograd import unrecorded

# Returns what answers torch functions without gathered gradients, see `PendingGrad.arm`.
EarlyAnswers = Callable[[Pipeline], Callable[..., Any]]


class UpdateRunner:
    """Runs the deferred updates of one model; see ``dear.Updater`` for what a pipeline asks.

    Args:
        params: the parameters that DDP manages.
        after_update: told which parameters have been updated.
        early_reads: records which line of the script forces pending updates or gradients early.
        fallbacks: records why a parameter's update was not deferred.
        write: puts the updated values into these parameters.
        gathers: makes what gather legs carry for the updates.
        early_answers: makes what answers torch's clipping and loss scaling; or None.
        strict: fill pending parameters with NaN until they are updated.

    Attributes:
        pipeline: the pipeline with whose gradients it applies updates; None: gradients travel by plain all-reduces.
        deferred_steps: number of steps that have left updates to it.
    """

    def __init__(
        self,
        params: LazyParams,
        after_update: AfterUpdate,
        early_reads: EarlyReads,
        fallbacks: FallbackLog,
        write: Callable[[Pipeline, Mapping[Slot, DeferredUpdate]], None],
        gathers: Callable[[Pipeline, Mapping[str, Tensor]], Gathers],
        early_answers: EarlyAnswers | None,
        *,
        strict: bool,
    ) -> None:
        self._params = params
        self._after_update = after_update
        self._early_reads = early_reads
        self._fallbacks = fallbacks
        self._write = write
        self._gathers = gathers
        self._early_answers = early_answers
        self._strict = strict
        self.deferred_steps = 0
        self.pipeline: Pipeline | None = None
        self._order: StreamOrder | None = None
        self._broken = ""
        self._written_in = 0  # the latest iteration of which any update has been written

    def use(self, pipeline: Pipeline | None) -> None:
        """Apply updates with the gradients of this pipeline from now on."""
        self.pipeline = pipeline
        self._written_in = 0
        if pipeline is not None:
            self._order = pipeline.order if pipeline.link.streams is not None else None

    def gathers(self, pipeline: Pipeline, memory: Mapping[str, Tensor]) -> Gathers:
        """See ``dear.Updater``."""
        return self._gathers(pipeline, memory)

    def early_answer(self, pipeline: Pipeline) -> Callable[..., Any] | None:
        """See ``dear.Updater``."""
        return None if self._early_answers is None else self._early_answers(pipeline)

    def note_written(self) -> None:
        """Note that an update of this iteration has been or is being written, so that the step cannot be taken back."""
        if self.pipeline is not None:
            self._written_in = self.pipeline.iteration

    def refuse_to_go_on(self) -> None:
        """Raise if the last ``step()`` was taken back, or if an update failed midway.

        Raises:
            StaleParameterError: training must restart from a checkpoint.
        """
        if self._broken:
            raise StaleParameterError(f"{self._broken}: restart training from a checkpoint")

    def make_pending(self, pipeline: Pipeline, updates: Sequence[tuple[Sequence[LazyParam], DeferredUpdate]]) -> None:
        """Make the parameters of these updates pending; those that cannot be are updated at once."""
        self.deferred_steps += 1
        with self._params.lock:
            # Checked after the step, which may itself have created references to a parameter's memory.
            why_not = self._params.why_not_lazy([lazy for lazies, _ in updates for lazy in lazies])
            made: list[LazyParam] = []
            for lazies, update in updates:

                def note_update(lazy: LazyParam, update: DeferredUpdate = update) -> None:
                    pipeline.updates[pipeline.slots[lazy.index]] = update

                waiting = []
                for lazy in lazies:
                    if lazy in why_not:
                        lazy.expect_version()
                        note_update(lazy)
                    else:
                        waiting.append(lazy)
                self._params.make_lazy(waiting, note_update, by=self, hide_values=self._strict)
                made += waiting
            reason = None if self._strict else self._params.cover(made)
            # A signal handler may have read gradients since the step looked. From now on the script may change these.
            read = [slot for slot in list(pipeline.updates) if slot.is_shared and slot.pending.current.resolved]
            now = [*why_not, *(made if reason is not None else ())]
            pipeline.updates.apply([*read, *(pipeline.slots[lazy.index] for lazy in now)])
            note_not_deferred(why_not, self._early_reads, self._fallbacks)
            if reason is not None:
                self._early_reads.explain()
                self._fallbacks.note_here(reason)

    # What parameters ask for, see `lazy_param.Deferrer`.

    def join(self) -> None:
        if self._order is not None:
            self._order.join()

    def bring_up_to_date(self, lazies: Iterable[LazyParam]) -> None:
        """Apply the pending updates of these parameters, whose values are about to be used."""
        pipeline = self.pipeline
        if pipeline is None or not pipeline.updates:
            return
        slots = [slot for lazy in lazies if (slot := pipeline.slots[lazy.index]) in pipeline.updates]
        if not slots:
            return
        self._early_reads.note_parameter_read()
        if self._early_reads.is_inside_forward:
            pipeline.updates.apply(slots)
            return
        try:
            # A checkpoint must not mix two steps: apply all pending updates, or none if a leg fails.
            pipeline.updates.apply(list(pipeline.updates) if is_saving() else slots)
        except LegError as error:
            self._take_back(error)

    def _take_back(self, error: LegError) -> None:
        """Drop the updates of the last ``step()``, some of which cannot be completed because of ``error``.

        Raises:
            LegError: ``error``, if one of the updates has been written already.
        """
        pipeline = self.pipeline
        assert pipeline is not None
        if self._written_in == pipeline.iteration:
            raise error
        with unrecorded():
            for slot in list(pipeline.updates):  # a signal handler may apply some
                lazy = slot.lazy
                lazy.show_value()
                lazy.uncover()
                lazy.end_wait()
        pipeline.updates.clear()
        self._broken = f"the last optimizer.step() was taken back, because {error}"
        say(
            f"{self._broken}. Parameters and optimizer state are those from before that step: save them and restart",
            logging.WARNING,
        )

    # What the pipeline asks for.

    def gradient_is_read(self, slot: Slot) -> None:
        """Apply an update that changes the gradient as well, before a script reads it."""
        pipeline = self.pipeline
        assert pipeline is not None
        self._early_reads.note_gradient_read()
        update = pipeline.updates.get(slot)
        if isinstance(update, DeferredUpdate) and (update.edits_gradient or slot.is_shared):
            pipeline.updates.apply([slot])

    def needs_gradient(self, slot: Slot) -> bool:
        # Updates that are being written are needed, too: a signal handler may read gradients meanwhile.
        pipeline = self.pipeline
        assert pipeline is not None
        return slot in pipeline.updates or slot.lazy in self._params.updating

    def apply(self, slots: list[Slot]) -> None:
        """Run the deferred updates of these parameters, whose reduced gradients are complete."""
        pipeline = self.pipeline
        assert pipeline is not None
        self.note_written()
        slots.sort(key=lambda slot: slot.index)  # the usual order, which matters for parameters that share memory
        params = self._params
        lazies = [slot.lazy for slot in slots]
        claimed: dict[Slot, DeferredUpdate] = {}
        with unrecorded():
            for lazy in lazies:
                lazy.uncover()
        try:
            with params.being_updated(lazies):
                for slot, lazy in zip(slots, lazies, strict=True):
                    # Clear first: a retry after a partial failure would update twice.
                    if (update := pipeline.updates.pop(slot, None)) is not None:
                        assert isinstance(update, DeferredUpdate)
                        claimed[slot] = update
                    lazy.end_wait()
                for slot in claimed:
                    if self._strict or slot.lazy.is_written:
                        slot.lazy.show_value()
                self._write(pipeline, claimed)
                if self._after_update and not self._broken:
                    # In this context: these uses come before forward's, and must not count as its touches.
                    with as_if_called_by_the_user():
                        self._after_update.updated(
                            [slot.parameter for slot, update in claimed.items() if not update.snapshot.was_skipped]
                        )
                params.end_updates(slot.lazy for slot in claimed)
        except BaseException as error:
            # As after a plain step() that raised: values can be read and saved, but training must not go on.
            self._broken = (
                f"the deferred update of {slots[0].name} and its fusion group failed midway "
                f"({type(error).__name__}: {error})"
            )
            raise
        finally:
            for lazy in lazies:
                lazy.memory.grad = None  # frees a copy that was cast back from the wire dtype
