"""One parameter, its memory, and the state of its pending update.

States:

* *plain*: an ``nn.Parameter`` with an up-to-date value.
* *pending*: a ``PendingParameter`` whose update was deferred by ``step()``. A touch, from any thread, applies the
  update first, together with those of the other parameters in its fusion group.
* *updating*: the update is being written. The class is still ``PendingParameter``, and other threads wait for the lock.
  A signal handler that interrupts the update sees the memory half updated, as it would during a plain ``step()``.
* *untouched*: a ``PendingParameter`` whose value is up to date, because its group was updated, but that has not been
  touched since ``step()``. The first touch makes it plain. Only where that touch has to be seen, see ``see_all_uses``.

    plain, untouched --step()--> pending --touch, or its group's--> updating --> untouched --touch--> plain
                                                                            \\----------------------^

Updates are written through a second tensor of the same memory, so that they do not touch the parameter itself.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from ddp_crossover.own_threads import refuse_to_wait
from ddp_crossover.pending.pending_parameter import disarm, is_armed
from ddp_crossover.torch_internals.memory import Covers, set_data, storage_use_count


class StaleParameterError(RuntimeError):
    """A parameter was read or written while its update was pending, by code that bypasses ``__torch_function__``."""


class Deferrer(Protocol):
    """Who has made parameters pending, and updates them."""

    def bring_up_to_date(self, lazies: Iterable[LazyParam]) -> None:
        """Apply the pending updates of these parameters, whose values are about to be used. Called under the lock."""

    def join(self) -> None:
        """On CUDA, make the current stream wait for updates that were written on another stream."""


class Model(Protocol):
    """All parameters of a model, for one of them. See ``LazyParams``."""

    covers: Covers
    lock: threading.RLock
    updating: frozenset[LazyParam]
    deferrer: Deferrer | None
    on_use: Callable[[LazyParam], None]

    def use_all(self) -> None:
        """Apply all pending updates, and make all parameters plain."""


class LazyParam:
    """One parameter, its memory, and whether its update is pending.

    Attributes:
        index: position among the parameters that DDP manages.
        name: full name, for messages.
        parameter: the parameter.
        memory: an ``nn.Parameter`` over the same memory, for the optimizer to update.
        is_waiting: whether the parameter is pending.
        version: autograd's version counter of the memory after ``step()``, or after its update: a change means that
            somebody else has written.
        shadow: a copy of the value while ``strict`` fills the memory with NaN, else None.
        is_covered: whether the parameter points to its cover, so that unobserved reads do not find the old value.
        was_covered: whether they raised an error from ``step()`` until its update was applied.
        overlaps: whether its memory overlaps that of another parameter.
        why_never_lazy: why its updates are never deferred, or None.
    """

    __slots__ = (
        "_cover",
        "_model",
        "index",
        "is_covered",
        "is_waiting",
        "memory",
        "name",
        "neighbours",
        "overlaps",
        "parameter",
        "shadow",
        "storage",
        "version",
        "was_covered",
        "why_never_lazy",
    )

    def __init__(self, model: Model, index: int, name: str, parameter: Parameter) -> None:
        self._model = model
        self.index = index
        self.name = name
        self.parameter = parameter
        self.is_waiting = self.is_covered = self.was_covered = self.overlaps = False
        self.shadow: Tensor | None = None
        kind = type(parameter)
        self.why_never_lazy = None if kind is Parameter else f"is a {kind.__name__}, a subclass of nn.Parameter"
        self.follow_memory()

    def follow_memory(self) -> None:
        """Use the parameter's new memory, after ``parameter.data = ...`` for instance."""
        # As no update of a frozen parameter is deferred, the optimizer meets only those that require a gradient.
        self.memory = Parameter(self.parameter.detach())
        # Optimizers look at attributes that users have set on a parameter.
        self.memory.__dict__ = self.parameter.__dict__
        self.storage = self.parameter.untyped_storage()
        self.neighbours = [self]
        self.version = -1  # of what the script has put there
        self._cover = self._model.covers.make(
            self.memory.detach(),
            f"{self.name} is used while ddp_crossover has its update pending, by code that bypasses "
            "__torch_function__ (torch.tensor(p), TorchScript, a C++ extension): pass p.detach() instead of the "
            "parameter, or call state.synchronize() first",
        )

    def share_storage(self, neighbours: list[LazyParam]) -> None:
        """Join the parameters whose memory lies in the same storage."""
        self.neighbours = neighbours
        neighbours.append(self)

    def cover(self) -> None:
        """Keep reads and writes that bypass the class from the old value, if the update is still pending.

        Call in :func:`unrecorded`.
        """
        is_waiting = self.is_waiting
        if self._cover is not None and is_waiting:
            self.is_covered, self.was_covered = True, self._model.covers.raise_errors
            set_data(self.parameter, self._cover)
            if not self.is_waiting:  # a signal handler applied the update meanwhile
                self.is_covered = True
                self.uncover()

    def uncover(self) -> None:
        """Remove the cover before the update is written. Call in :func:`unrecorded`."""
        if self.is_covered:
            set_data(self.parameter, self.memory)
            self.is_covered = False

    def use(self) -> None:
        """Apply the update if it is pending, and make the parameter plain, because its value is about to be used."""
        model = self._model
        refuse_to_wait()
        with model.lock:
            if self in model.updating:
                return
            if model.deferrer is not None:
                if self.is_waiting:
                    model.deferrer.bring_up_to_date((self,))
                else:
                    model.deferrer.join()
            if is_armed(self.parameter):
                model.on_use(self)
                disarm(self.parameter)

    def note_overlap(self, overlaps: bool) -> None:
        """Note whether its memory overlaps that of another parameter: one then has to be updated before the other."""
        self.overlaps = overlaps
        if overlaps:
            self.never_defer("overlaps in memory with another parameter")

    def end_wait(self) -> None:
        """Note that the update is being applied, or was taken back."""
        self.is_waiting = False

    def never_defer(self, reason: str) -> None:
        """Apply updates of this parameter at the end of each ``step()`` from now on."""
        self.why_never_lazy = reason

    def expect_version(self) -> None:
        """Take any write from now on for one of somebody else."""
        self.version = self.memory._version

    @property
    def is_edited(self) -> bool:
        """Whether others have written to the memory since its last update, or a neighbour's update has."""
        return self.memory._version != self.version

    def show_value(self) -> None:
        """Restore the value hidden by ``strict``, and raise if the memory was written to while the update was pending.

        Raises:
            StaleParameterError: code that torch cannot observe wrote to the parameter.
        """
        is_written = self.is_written
        if self.shadow is not None:
            is_written = is_written or not bool(self.memory.isnan().all())
            self.memory.data.copy_(self.shadow)
            self.shadow = None
        if is_written:
            raise StaleParameterError(
                f"{self.name} was written while its deferred update was pending, by code that bypasses "
                "__torch_function__ (a C++ extension, or a pointer from data_ptr()): call state.synchronize() before "
                "such a write, so that it changes the updated value"
            )

    def hide_value(self) -> None:
        """Fill the memory with NaN until :meth:`show_value`."""
        self.shadow = self.memory.detach().clone()
        self.memory.data.fill_(float("nan"))

    def begin_wait(self) -> None:
        """Note that the update is pending."""
        self.version = self.memory._version
        self.is_waiting, self.was_covered = True, False

    def use_all(self) -> None:
        """Apply all pending updates of the model, because any of its values may be about to be used."""
        self._model.use_all()

    def why_not_lazy_now(self, references_alone: tuple[int, int]) -> str | None:
        """Why this update cannot be deferred although the gradient was not read; None if it can be."""
        extra = len(self.neighbours) - 1
        covered = sum(lazy.is_covered for lazy in self.neighbours) if extra else 0
        tensors, variables = references_alone
        if references(self.storage) != (tensors + 2 * extra - covered, variables + extra):
            return (
                "shares its memory with another tensor (p.data, p.detach(), a view, or an autograd graph that is still "
                "alive). Drop that tensor before optimizer.step(), or keep a clone instead, to have the update deferred"
            )
        if self.memory.is_cpu and self.storage.is_shared():
            return "is in shared memory, where another process may read it at any time"
        return None

    @property
    def is_written(self) -> bool:
        """Whether C++ wrote to the memory since ``step()``.

        Always False for parameters in a common storage: they share a version counter, which every update raises.
        """
        return len(self.neighbours) == 1 and self.memory._version != self.version


def references(storage: torch.UntypedStorage) -> tuple[int, int]:
    """Numbers of tensors and of Python variables that refer to this storage, each plus a constant."""
    return storage_use_count(storage), sys.getrefcount(storage)
