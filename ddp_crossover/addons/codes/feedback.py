"""Memory for what codes have left out, in the layout of the arenas, and when it changes; see [Note: error feedback]."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddp_crossover.addons.codes.coding import BeforeAfter, Coding
from ddp_crossover.addons.codes.rounds import CodedTravel
from ddp_crossover.addons.codes.top_k import TopKCodec
from ddp_crossover.addons.codes.wire import CodedWire
from ddp_crossover.comm.link import Link
from ddp_crossover.fusion import FusionGroup, FusionPlan, GradientSpec
from ddp_crossover.plan.cutting import arena_capacity

# A loss scale that has changed by more than this factor is another one: residuals are dropped.
_MOST_RESCALED = 16.0


class _ArenaState:
    """A state of all gradients of one arena before and after a step.

    Both are the same where this rank codes nothing, as with nodes: there no step writes what is after it.
    """

    def __init__(self, numel: int, device: torch.device) -> None:
        self.before, self.after = (torch.zeros(numel, device=device) for _ in range(2))

    def swap(self) -> None:
        self.before, self.after = self.after, self.before

    def take_over_if(self, finite: Tensor) -> None:
        """Take over the state after the step if ``finite``, which the host does not know."""
        torch.where(finite, self.after, self.before, out=self.before)

    def of(self, group: FusionGroup) -> BeforeAfter:
        return BeforeAfter(self.before, self.after).of(group.offset, group.offset + group.numel)


class ArenaRange(NamedTuple):
    """Elements ``[low, high)`` of an arena."""

    arena: str
    low: int
    high: int


class Feedback:
    """The residuals of one rank. They stay when plans change.

    Args:
        wire: what gradients are on the wire.
        specs: all gradients.
        link: carries the gradients, and codes them on the host or on its streams, where the host waits for no results.
        device: where the parameters are.

    Attributes:
        steps: training steps whose gradients were coded.
        scale: loss scale of the gradients of which these are residuals.
    """

    def __init__(self, wire: CodedWire, specs: Sequence[GradientSpec], link: Link, device: torch.device) -> None:
        assert wire.scatter is not None
        coded_on, streams = (torch.device("cpu"), None) if link.codes_on_host else (device, link.streams)
        self.steps = 0
        self.scale: float | Tensor = 1.0
        self._host_knows = streams is None
        self._wire = wire
        self._scatter = wire.scatter
        coded = [spec for spec in specs if spec.is_coded]
        sizes = arena_capacity(coded, link.world_size, link.shard_align_bytes)
        self._residuals = (
            {arena: _ArenaState(numel, coded_on) for arena, numel in sizes.items()} if wire.has_feedback else {}
        )
        self._specs = specs
        self._plan: FusionPlan | None = None
        self._loaded: dict[str, Tensor] | None = None
        if streams is not None:
            for pair in self._residuals.values():
                for memory in (pair.before, pair.after):
                    streams.keep_until_done(memory)
        self._codings: dict[FusionGroup, Coding] = {}

    def use(self, plan: FusionPlan) -> None:
        """Move all to the places that gradients have in this plan."""
        self._codings.clear()
        if not plan.is_coded:
            return
        if self._plan is not None:
            for arena, pair in self._residuals.items():
                pair.after.zero_()
                for index, spec in enumerate(plan.gradients):
                    if spec.arena == arena:
                        here, there = self._plan.offsets[index], plan.offsets[index]
                        pair.after[there : there + spec.numel] = pair.before[here : here + spec.numel]
                pair.swap()
                pair.after.copy_(pair.before)
        self._plan = plan
        self._place_loaded()

    def travel(self, group: FusionGroup) -> CodedTravel:
        """How the slices of a group's fusion buffer travel in all steps under the plan in use."""
        coding = self._codings[group] = Coding(self._scatter, self._wire.gather)
        return CodedTravel(coding)

    def finite_sums(self, groups: Iterable[FusionGroup]) -> list[Tensor]:
        """0-dim tensors that tell whether the sums of these groups in this step are finite."""
        return [one for group in groups for one in self._codings[group].finite]

    def begin_step(self, scale: float | Tensor) -> None:
        """Begin a step whose loss is multiplied by ``scale``, which may be a 0-dim tensor on the device."""
        if isinstance(scale, Tensor) or isinstance(self.scale, Tensor) or scale != self.scale:
            change = scale / self.scale
            ratio = change if isinstance(change, Tensor) else torch.tensor(change, device="cpu")
            is_the_same_scaler = (ratio >= 1 / _MOST_RESCALED) & (ratio <= _MOST_RESCALED)
            for pair in self._residuals.values():
                for state in (pair.before, pair.after):
                    state.mul_(torch.where(is_the_same_scaler, ratio, 0.0).to(state))
            self.scale = scale
        if self._wire.top_k is not None and isinstance(self._scatter, TopKCodec):
            density = self._wire.top_k.density_at(self.steps)
            if density != self._scatter.density:
                self._scatter = self._scatter.with_density(density)
        for group, coding in self._codings.items():
            residual = self._residuals.get(group.arena)
            coding.begin_step(self._scatter, None if residual is None else residual.of(group))

    def end_step(self, unused: Iterable[ArenaRange], finite: Sequence[Tensor]) -> None:
        """Take over what the step has left out.

        Args:
            unused: where no rank has used the parameters, so that nothing was sent, or nobody takes what was sent.
            finite: 0-dim tensors that tell whether sums are finite; else nothing changes.
        """
        if self._host_knows and not all(map(bool, finite)):
            return
        self.steps += 1
        for arena, low, high in unused:
            if (pair := self._residuals.get(arena)) is not None:
                pair.after[low:high] = pair.before[low:high]
        if self._host_knows:
            for pair in self._residuals.values():
                pair.swap()
        elif finite:
            all_finite = torch.stack(list(finite)).all()
            for pair in self._residuals.values():
                pair.take_over_if(all_finite)

    def state_dict(self) -> dict[str, Any]:
        """Copies of everything, by name of the parameter, flat, in memory order."""
        state: dict[str, Any] = {"steps": self.steps, "scale": float(self.scale)}
        if self._loaded is not None:  # not in place yet
            return state | {"residual": dict(self._loaded)}
        return state | {"residual": self._copies()}

    def _copies(self) -> dict[str, Tensor]:
        if self._plan is None:
            return {}
        return {
            spec.name: self._residuals[spec.arena].before[low : low + spec.numel].clone().cpu()
            for spec, low in zip(self._plan.gradients, self._plan.offsets, strict=True)
            if spec.arena in self._residuals
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`; takes effect with the first plan.

        Raises:
            ValueError: if it is the state of another model.
        """
        numels = {spec.name: spec.numel for spec in self._specs}
        for name, values in state["residual"].items():
            if numels.get(name) != values.numel():
                raise ValueError(
                    f"this state was saved for another model: it has {values.numel()} elements of {name!r}, and "
                    f"the model {numels.get(name, 'no such parameter')}"
                )
        self.steps, self.scale = int(state["steps"]), float(state["scale"])
        self._loaded = {name: values.clone() for name, values in state["residual"].items()}
        self._place_loaded()

    def _place_loaded(self) -> None:
        if self._plan is None or self._loaded is None:
            return
        for spec, low in zip(self._plan.gradients, self._plan.offsets, strict=True):
            if (pair := self._residuals.get(spec.arena)) is not None:
                values = self._loaded.get(spec.name)
                for state in (pair.before, pair.after):
                    state[low : low + spec.numel] = 0.0 if values is None else values
        self._loaded = None
