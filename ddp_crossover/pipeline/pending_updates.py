"""Updates that ``step()`` was asked for and that wait for their gradients: who waits for what, before one is applied.

For the terms see [Note: DeAR's terms] in ``pipeline``.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Collection, Iterable
from typing import final

import torch

from ddp_crossover import device as gpu
from ddp_crossover.comm.link import Link
from ddp_crossover.comm.stream_order import StreamOrder
from ddp_crossover.compute_waits import ComputeWaits
from ddp_crossover.pending.slots import Group, Slot
from ddp_crossover.pipeline.gathers import GatherOrder
from ddp_crossover.torch_internals.dispatch import is_traced, outside_of_modes
from ddp_crossover.torch_internals.profiling import named_range


@final
class GatherWaits:
    """Waits for gather legs, before somebody uses what they bring.

    Args:
        order: orders streams.
        compute_waits: what waits of compute go through.
        groups: all fusion groups.
        device: where gradients are.
    """

    def __init__(
        self,
        order: StreamOrder,
        compute_waits: ComputeWaits,
        groups: Collection[Group],
        device: torch.device,
    ) -> None:
        self._order = order
        self._groups = groups
        self._compute_waits = compute_waits
        self._device = device

    def complete(self, group: Group) -> bool:
        """Complete the group, on the current stream alone; whether nobody had done so before."""
        self._order.join()
        if group.is_complete:
            return False
        self.arrival(group)
        group.complete()
        return True

    def arrival(self, group: Group) -> None:
        """Wait until the group's gather leg has arrived, on the current stream alone."""
        self._refuse_capture()
        assert group.gather is not None
        index = group.spec.index
        # No profiler range if the leg is done, where it only costs time, or if `torch.jit.trace` would record it.
        unnamed = group.gather.is_done() or is_traced()
        # Protects the optimizer and readers of `.grad` or of parameters from partly gathered values.
        with self._compute_waits.of(index, self._all_have_arrived) as host_wait:
            if unnamed:
                group.gather.wait(host_wait)
            else:
                with named_range(f"ddp_crossover::wait[{index}]"):
                    group.gather.wait(host_wait)

    def _all_have_arrived(self) -> bool:
        return all(group.gather is None or group.gather.is_done() for group in self._groups)

    def _refuse_capture(self) -> None:
        if gpu.is_capturing(self._device):
            raise RuntimeError(
                "a CUDA graph cannot wait for gradients that are still under way: call state.synchronize() before the "
                "capture, and before each replay of a graph that uses the model's parameters"
            )


@final
class PendingUpdates(dict[Slot, object]):
    """What an optimizer has noted of each update that is pending, by the parameter's slot.

    Args:
        apply_now: runs the updates of some parameters, whose reduced gradients are complete, and takes them out.
        waits: waits for gather legs.
        gather_order: the order in which forward uses groups.
        link: runs the legs.
        order: orders streams.
        compute_waits: notified when compute begins.
        lock: held while updates are applied, from any thread.
    """

    def __init__(
        self,
        apply_now: Callable[[list[Slot]], None],
        waits: GatherWaits,
        gather_order: GatherOrder,
        link: Link,
        order: StreamOrder,
        compute_waits: ComputeWaits,
        lock: threading.RLock,
    ) -> None:
        super().__init__()
        self._apply_now = apply_now
        self._waits = waits
        self._gather_order = gather_order
        self._link = link
        self._order = order
        self._compute_waits = compute_waits
        self._lock = lock

    def apply(self, slots: Iterable[Slot]) -> None:
        """Apply the pending updates of these parameters and of the others in their fusion groups."""
        with self._lock:
            self._order.join()
            if not self:
                return
            groups = dict.fromkeys(group for slot in slots if slot in self for group in slot.groups)
            arrived = self._arrived_behind(groups)
            # Wait for all groups before the first update: a leg that fails must not leave only some of them updated.
            for group in (*groups, *arrived):
                self._waits.complete(group)
            # Else group by group: gradients cast back to the parameters' dtype never take more than one group.
            for together in [(*groups, *arrived)] if arrived else [(group,) for group in groups]:
                self._apply_complete(dict.fromkeys(slot for group in together for slot in group.slots))

    def flush(self) -> None:
        """Apply all, in the usual order of parameters, whichever optimizer has asked first."""
        self.apply(sorted(self, key=lambda slot: slot.index))

    def own_gradient_of(self, slot: Slot) -> bool:
        """Whether the gradient in the fusion buffer is what an update that is pending will use."""
        return slot in self and not any(group.put_aside for group in slot.groups)

    def _arrived_behind(self, groups: Collection[Group]) -> list[Group]:
        """The groups that forward uses next, as far as their gather legs have ended, to be updated together with these.

        If they have, a GPU waits for the host, whose time goes into calls of the optimizer: one for many groups costs
        little more than one for one. On CPU a group that is updated just before its use stays in the cache.
        """
        if self._link.streams is None or not groups:
            return []
        in_order = self._gather_order.in_use_order()
        behind = in_order[max(map(in_order.index, groups)) + 1 :]
        return list(itertools.takewhile(_has_arrived_as_it_is, behind))

    def _apply_complete(self, slots: Iterable[Slot]) -> None:
        due = [slot for slot in slots if slot in self and all(group.is_complete for group in slot.groups)]
        if due:
            outside_of_modes(functools.partial(self._run, due))

    def _run(self, slots: list[Slot]) -> None:
        self._compute_waits.others.resume()
        begin = self._link.clock.mark()
        with self._link.meter.host.of("update") if self._link.streams is not None else contextlib.nullcontext():
            self._apply_now(slots)
        self._link.clock.span("update", begin)
        self._order.publish()


def _has_arrived_as_it_is(group: Group) -> bool:
    """Whether the gather leg has ended, and what it has brought needs no copy in another dtype."""
    return group.gather is not None and group.gather.is_done() and not any(slot.is_cast for slot in group.slots)
