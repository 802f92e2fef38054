"""The mean over ranks of one tensor for each parameter, while training goes on: in fusion groups, with both legs.

Knows legs and wires. It does not know what the tensors are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from ddp_crossover.addons.codes.feedback import Feedback
from ddp_crossover.addons.codes.wire import CodedWire
from ddp_crossover.comm.fusion_buffer import FusionBuffer
from ddp_crossover.comm.leg import Leg
from ddp_crossover.comm.link import Link
from ddp_crossover.comm.wire import Wire
from ddp_crossover.fusion import FusionGroup
from ddp_crossover.plan.cutting import plan_fusion
from ddp_crossover.plan.gradient_specs import gradient_specs

_FUSION_MB = 4.0


class MeanExchange:
    """Sends tensors like the parameters and brings their means.

    Args:
        named: names and parameters, in the same order on all ranks.
        link: runs the legs.
        wire: what tensors are on the wire.

    Attributes:
        feedback: memory for what codes leave out; None without codes.
    """

    def __init__(self, named: Sequence[tuple[str, Parameter]], link: Link, wire: Wire) -> None:
        self._link = link
        specs = gradient_specs(named, wire)
        order = range(len(specs))
        self._plan = plan_fusion(
            specs,
            order,
            order,
            world_size=link.world_size,
            fusion_mb=_FUSION_MB,
            shard_align_bytes=link.shard_align_bytes,
        )
        dtypes = {
            spec.arena: wire.travels_as(p.dtype, is_coded=spec.is_coded)
            for spec, (_, p) in zip(specs, named, strict=True)
        }
        device = named[0][1].device
        self._arenas = {
            arena: torch.zeros(numel, dtype=dtypes[arena], device=device)
            for arena, numel in self._plan.arena_numel.items()
        }
        self.feedback: Feedback | None = None
        if isinstance(wire, CodedWire) and self._plan.is_coded:
            self.feedback = Feedback(wire, specs, link, device)
            self.feedback.use(self._plan)
        link.connect(self._arenas.values())
        self._views = [
            self._arenas[spec.arena][low : low + spec.numel].view(parameter.shape)
            for spec, low, (_, parameter) in zip(specs, self._plan.offsets, named, strict=True)
        ]
        self._buffers = [self._buffer(group) for group in self._plan.groups]
        self._legs: list[Leg] = []

    def _buffer(self, group: FusionGroup) -> FusionBuffer:
        memory = self._arenas[group.arena].narrow(0, group.offset, group.numel)
        is_coded = self._plan.gradients[group.pieces[0].parameter].is_coded
        return FusionBuffer((memory,), travel=self.feedback.travel(group) if self.feedback and is_coded else None)

    @property
    def sent_bytes(self) -> int:
        return self._link.sent_bytes

    @torch.no_grad()
    def start(self, tensors: Iterable[Tensor]) -> None:
        """Send this rank's tensors, one for each parameter, which may be overwritten. All ranks must call it."""
        assert not self._legs
        self._link.begin_iteration()
        if self.feedback is not None:
            for arena in self._arenas.values():
                arena.zero_()  # codes of padding must not bring anything
            self.feedback.begin_step(1.0)
        for view, tensor in zip(self._views, tensors, strict=True):
            view.copy_(tensor.mul_(1.0 / self._link.world_size))  # in the tensor's dtype, and rounded once
        scatters = [
            self._link.reduce_scatter(group.index, b) for group, b in zip(self._plan.groups, self._buffers, strict=True)
        ]
        self._legs = [
            self._link.all_gather(scatter, urgency if self._link.chooses_gather_order else None)
            for urgency, scatter in enumerate(scatters)
        ]
        self._link.end_scatter_legs()

    def finish(self) -> list[Tensor]:
        """Wait for the means; one for each parameter, in the dtype of the wire, valid until the next start."""
        for leg in self._legs:
            leg.wait()
        if self._legs and self.feedback is not None:
            coded = [group for group, b in zip(self._plan.groups, self._buffers, strict=True) if b.travel is not None]
            self.feedback.end_step((), self.feedback.finite_sums(coded))
        self._legs = []
        return self._views

    def bring(self, means: Sequence[Tensor]) -> None:
        """Have :meth:`finish` return these means, which an earlier run has received."""
        assert not self._legs
        for view, mean in zip(self._views, means, strict=True):
            view.copy_(mean)
