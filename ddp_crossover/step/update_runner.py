"""Applies deferred updates, when the gradients of their parameters are complete, or takes them back.

A step can be taken back while none of its updates has been written. An update that breaks off in the middle leaves some
parameters updated and others not, as a plain ``step()`` would; training does not go on after it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from ddp_crossover.comm.leg import LegError
from ddp_crossover.dear import Pipeline
from ddp_crossover.log import say
from ddp_crossover.pending.lazy_params import LazyParams, StaleParameterError
from ddp_crossover.pending.slots import Slot
from ddp_crossover.step.after_update import AfterUpdate
from ddp_crossover.step.run_updates import DeferredUpdate, as_if_called_by_the_user
from ddp_crossover.torch_internals.autograd import unrecorded


class UpdateRunner:
    """Applies the deferred updates of one model.

    Args:
        params: the parameters that DDP manages.
        after_update: told which parameters have been updated.
        write: puts the updated values into these parameters.
        strict: whether pending parameters hold NaN, so that their values have to be restored first.
    """

    def __init__(
        self,
        params: LazyParams,
        after_update: AfterUpdate,
        write: Callable[[Pipeline, Mapping[Slot, DeferredUpdate]], None],
        *,
        strict: bool,
    ) -> None:
        self._params = params
        self._after_update = after_update
        self._write = write
        self._strict = strict
        self._pipeline: Pipeline | None = None
        self._broken = ""
        self._written_in = 0  # the latest iteration of which any update has been written

    def use(self, pipeline: Pipeline | None) -> None:
        """Apply updates with the gradients of this pipeline from now on."""
        self._pipeline = pipeline
        self._written_in = 0

    def note_written(self) -> None:
        """Note that an update of this iteration has been or is being written, so that the step cannot be taken back."""
        if self._pipeline is not None:
            self._written_in = self._pipeline.iteration

    def refuse_to_go_on(self) -> None:
        """Raise if the last ``step()`` was taken back, or if an update failed midway.

        Raises:
            StaleParameterError: training must restart from a checkpoint.
        """
        if self._broken:
            raise StaleParameterError(f"{self._broken}: restart training from a checkpoint")

    def take_back(self, error: LegError) -> None:
        """Drop the updates of the last ``step()``, some of which cannot be completed because of ``error``.

        Raises:
            LegError: ``error``, if one of the updates has been written already.
        """
        pipeline = self._pipeline
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

    def apply(self, slots: list[Slot]) -> None:
        """Run the deferred updates of these parameters, whose reduced gradients are complete."""
        pipeline = self._pipeline
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
