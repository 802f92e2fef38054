"""The hooks that wait: before a module uses a parameter, the parameter's update has been applied."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from ddp_crossover.dear import Pipeline
from ddp_crossover.first_use import FirstUseAudit, owners
from ddp_crossover.hooks import Hook
from ddp_crossover.profiling import ComputeProfiler
from ddp_crossover.slots import GroupInFlight, Slot
from ddp_crossover.torch_internals import call_before_compiled, is_compiled


class StaleParameterError(RuntimeError):
    """A forward used a parameter whose update had not been applied yet."""


class ForwardWatch:
    """Hooks on the DDP module itself: when its forward begins and ends.

    Args:
        ddp: the model.
        on_begin: called before each forward.
        on_end: called after each forward, with whether it returned (and did not raise).
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        on_begin: Callable[[], None],
        on_end: Callable[[bool], None],
    ) -> None:
        self.depth = 0
        self._handled: BaseException | None = None
        self._on_begin = on_begin
        self._on_end = on_end
        # Never part of a compiled graph: what they decide changes from one forward to the next.
        self._handles = [
            ddp.register_forward_pre_hook(torch.compiler.disable(self._before), prepend=True),
            ddp.register_forward_hook(torch.compiler.disable(self._after), always_call=True),
        ]

    def _before(self, module: nn.Module, args: Any) -> None:
        self.depth = 1  # not one more: a KeyboardInterrupt may have skipped the end
        self._handled = sys.exc_info()[1]
        self._on_begin()

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        self.depth = 0
        # The model may be called where an exception is being handled; only a new one is its own.
        self._on_end(sys.exc_info()[1] is self._handled)

    def remove(self) -> None:
        """Take the hooks down."""
        for handle in self._handles:
            handle.remove()


class WaitPoints:
    """Installs the waits of one pipeline.

    Args:
        ddp: the model.
        pipeline: whose updates to wait for.
        audit: tells which module first uses each parameter.
        inside_forward: whether ``ddp``'s forward is running.
        profiler: told when parameters are used, if times are being measured.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        pipeline: Pipeline,
        audit: FirstUseAudit,
        inside_forward: Callable[[], bool],
        profiler: ComputeProfiler | None,
    ) -> None:
        self._profiler = profiler
        pipeline.turns.profiler = profiler
        self._pipeline = pipeline
        self._inside_forward = inside_forward
        self._undo: list[Callable[[], None]] = []
        self._guards: dict[Slot, RemovableHandle] = {}
        root = ddp.module
        needs: dict[nn.Module, list[Slot]] = {root: []}
        owned_by = owners(root, [slot.parameter for slot in pipeline.slots])
        for slot, owning in zip(pipeline.slots, owned_by, strict=True):
            known = audit.waiters(slot.index)
            for module in known | {owner for owner in owning if audit.runs_hooks(owner)}:
                needs.setdefault(module, []).append(slot)
        self._at_root = groups_of(needs[root])
        for module, slots in needs.items():
            self._install(module, _Wait(self, slots), audit)

    def _install(self, module: nn.Module, wait: _Wait, audit: FirstUseAudit) -> None:
        if is_compiled(module):
            self._undo.append(call_before_compiled(module, wait.run))
        elif audit.runs_hooks(module):
            self._undo.append(module.register_forward_pre_hook(wait, prepend=True).remove)

    def remove(self) -> None:
        """Take the hooks down."""
        for undo in self._undo:
            undo()
        self._disarm()

    def _disarm(self) -> None:
        for slot, guard in self._guards.items():
            slot.applied_unused = False
            guard.remove()
        self._guards.clear()

    def begin_forward(self) -> None:
        """Wait for what the root itself uses, and for what no audit has seen used."""
        self._disarm()
        self._pipeline.catch_up(self._at_root)

    def end_forward(self) -> None:
        """Updates that no module of this forward waited for: no gradient may come of them."""
        if not self._pipeline.has_updates or not torch.is_grad_enabled():
            return
        for slot in self._pipeline.slots:
            if slot.update is not None and slot.parameter.requires_grad:
                slot.applied_unused = False
                self._guards[slot] = slot.parameter.register_hook(_RefuseStale(slot))

    def wait(self, groups: list[GroupInFlight], parameters: list[int]) -> None:
        """Apply the updates of these groups; all updates if a module is called from outside."""
        if self._profiler is not None:
            self._profiler.used(parameters)
        # Before the early exit: another stream may have applied them.
        self._pipeline.order.join()
        if self._pipeline.has_updates:
            if self._inside_forward():
                self._pipeline.catch_up(groups)
            else:
                self._pipeline.flush()


def groups_of(slots: Iterable[Slot]) -> list[GroupInFlight]:
    """The fusion groups that carry these parameters, each once."""
    return list(dict.fromkeys(group for slot in slots for group in slot.groups))


class _Wait(Hook):
    """Forward pre-hook: what this module uses must be up to date."""

    def __init__(self, points: WaitPoints, slots: list[Slot]) -> None:
        self._points = points
        self._groups = groups_of(slots)
        self._parameters = [slot.index for slot in slots]
        self._run_eagerly = torch.compiler.disable(self.run)

    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            # The module was compiled after it was audited: break the graph here and wait.
            self._run_eagerly()
        else:
            self.run()

    def run(self) -> None:
        self._points.wait(self._groups, self._parameters)


class _RefuseStale(Hook):
    """Gradient hook of a parameter that should not have been used yet."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot

    def __call__(self, gradient: Tensor) -> None:
        if self._slot.update is not None or self._slot.applied_unused:
            raise StaleParameterError(
                f"{self._slot.name} was used by this forward in a way that the first forwards did not show, before "
                "its update was applied. Call state.synchronize() before such a forward, or attach "
                "with schedule='allreduce'"
            )
