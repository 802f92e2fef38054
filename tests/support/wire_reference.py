"""Training with coded gradients, of all ranks in one process: what real ranks are compared with, bit for bit.

Written from the papers and from the definitions in the docstrings, with nothing of the package but its plans (which
element is where). Slow and simple: loops over ranks, elements by name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

BLOCK = 64
CHUNK = 4096

Code = Callable[[Tensor], Tensor]
"""What the code of a slice stands for."""


def int8_code(values: Tensor) -> Tensor:
    """Blocks of 64: integers from -127 to 127, times a scale that is rounded up to bfloat16."""
    blocks = values.view(-1, BLOCK)
    largest = blocks.abs().amax(1)
    scale = largest / 127
    nearest = scale.bfloat16()
    above = torch.nextafter(nearest, torch.full_like(nearest, torch.inf))
    rounded = torch.where(nearest.float() < scale, above, nearest).float()
    rounded = torch.where(rounded < 2.0**-126, 0.0, rounded)
    rounded = torch.where(largest.isfinite(), rounded, torch.nan).unsqueeze(1)
    decoded = (blocks / rounded).round() * rounded
    return torch.where(rounded == 0, 0.0, decoded).view(-1)


def cast_code(dtype: torch.dtype) -> Code:
    """Rounded to ``dtype``."""
    return lambda values: values.to(dtype).float()


def as_it_is(values: Tensor) -> Tensor:
    """No code."""
    return values


def largest_of(values: Tensor, density: float, selector: str) -> Tensor:
    """Which elements are sent."""
    mask = torch.zeros(values.numel(), dtype=torch.bool)
    magnitudes = values.abs()
    if selector in ("auto", "chunked"):
        # Compared to 1 part in 2048: the 12 lowest bits do not count.
        magnitudes = (magnitudes.view(torch.int32) >> 12 << 12).view(torch.float32)
    size = values.numel() if selector == "exact" else CHUNK
    for low in range(0, values.numel(), size):
        part = magnitudes[low : low + size]
        order = torch.sort(part, descending=True, stable=True).indices
        mask[low + order[: max(round(density * part.numel()), 1)]] = True
    return mask


@dataclass
class Wire:
    """What is on the wire, in the words of ``dx.attach``.

    Attributes:
        dtype: ``wire_dtype``.
        density: of a sparse wire at a step, counted from the first coded one; None without ``compress``.
        selector: of a sparse wire.
        feedback: ``error_feedback``.
        nodes: the ranks of each node; one node for each rank by default.
    """

    dtype: torch.dtype | None = None
    density: Callable[[int], float] | None = None
    selector: str = "auto"
    feedback: bool = True
    nodes: Sequence[Sequence[int]] = ()

    @property
    def gather(self) -> Code:
        """Of sums, when they are gathered."""
        if self.dtype is None or (self.nodes and self.density is not None):
            return as_it_is
        return int8_code if self.dtype is torch.int8 else cast_code(self.dtype)

    def of_uncoded(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype of gradients that are not coded."""
        wire = self.dtype
        return wire if wire not in (None, torch.int8) and wire.itemsize < dtype.itemsize else dtype


@dataclass
class Ranks:
    """All ranks of a run.

    Attributes:
        residual: by rank, by name, flat: what codes have left out.
        steps: coded steps that counted.
    """

    wire: Wire
    world_size: int
    residual: list[dict[str, Tensor]] = field(default_factory=list)
    steps: int = 0

    def __post_init__(self) -> None:
        self.residual = [{} for _ in range(self.world_size)]

    def mean(self, gradients: Sequence[Mapping[str, Tensor]], plan: Any) -> dict[str, Tensor]:
        """The mean of the ranks' gradients (flat, by name, in memory order) as every rank gets it."""
        terms = [{name: gradient * (1.0 / self.world_size) for name, gradient in one.items()} for one in gradients]
        coded = set() if plan is None else {spec.name for spec in plan.gradients if spec.is_coded}
        names = terms[0].keys()
        mean = {name: self._uncoded([one[name] for one in terms]) for name in names if name not in coded}
        if plan is None or not plan.is_coded:
            return mean
        residual = self._zeros(terms[0], coded)
        finite = True
        for group in plan.groups:
            inside = [plan.gradients[piece.parameter].name for piece in group.pieces]
            if not coded.intersection(inside):
                continue
            flat = _Layout(plan, group)
            buffers = [flat.gathered(one) for one in terms]
            e = [flat.gathered(one) for one in self.residual]
            total, e = self._coded(buffers, e)
            finite = finite and bool(total.isfinite().all())
            flat.scattered(total, mean, terms[0])
            for rank in range(self.world_size):
                flat.scattered(e[rank], residual[rank])
        if finite:
            self.steps += 1
            self.residual = residual
        return mean

    def _zeros(self, like: Mapping[str, Tensor], names: Iterable[str]) -> list[dict[str, Tensor]]:
        return [{name: torch.zeros(like[name].numel()) for name in names} for _ in range(self.world_size)]

    def _uncoded(self, terms: list[Tensor]) -> Tensor:
        dtype = terms[0].dtype
        wire = self.wire.of_uncoded(dtype)
        terms = [term.to(wire) for term in terms]
        if self.wire.dtype not in (None, torch.int8):
            terms = [term.float() if wire.itemsize < 4 else term for term in terms]
        if self.wire.nodes:
            terms = [_sum([terms[rank] for rank in node]) for node in self.wire.nodes]
        return _sum(terms).to(wire).to(dtype)

    def _coded(self, terms: list[Tensor], e: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """The sum of a fusion buffer that all ranks get, and the new residuals."""
        nodes = self.wire.nodes or [[rank] for rank in range(self.world_size)]
        places = len(nodes[0])
        e = [one.clone() for one in e]
        total = torch.empty_like(terms[0])
        size = total.numel() // self.world_size
        for place in range(places):
            # Inside of a node nothing is coded.
            part = slice(place * len(nodes) * size, (place + 1) * len(nodes) * size)
            at_home = [
                _sum([self._handed_over(i == place, terms[rank][part], e[rank][part]) for i, rank in enumerate(node)])
                for node in nodes
            ]
            across = [node[place] for node in nodes]
            own_e = [e[rank][part] for rank in across]
            if places > 1 and self.wire.density is not None:
                pieces = [slice(0, at_home[0].numel())]  # sent to all as a whole, and summed by each
                total[part] = self._one_slice(at_home, own_e, None)
                continue
            pieces = [slice(i * size, (i + 1) * size) for i in range(len(across))]
            for owner, piece in enumerate(pieces):
                total[part][piece] = self._one_slice(
                    [one[piece] for one in at_home], [one[piece] for one in own_e], owner
                )
        return total, e

    def _handed_over(self, is_own: bool, term: Tensor, e: Tensor) -> Tensor:
        """A rank's gradients of a part, with what it has left out of it if another rank of the node codes it."""
        if is_own:
            return term
        term = term + e
        e.zero_()
        return term

    def _one_slice(self, terms: list[Tensor], e: list[Tensor], owner: int | None) -> Tensor:
        """The sum of a slice as its owner sends it; changes residuals in place."""
        wire, sent = self.wire, []
        for i, term in enumerate(terms):
            value = term + e[i] if wire.feedback else term.clone()
            if i == owner:
                sent.append(value)
                e[i].zero_()
                continue
            if wire.density is not None:
                mask = largest_of(value, wire.density(self.steps), wire.selector)
                code = torch.where(mask, value, 0.0)
                if wire.feedback:
                    e[i].copy_(torch.where(mask, 0.0, value))
            else:
                code = int8_code(value)
                if wire.feedback:
                    e[i].copy_(value - code)
            sent.append(code)
        total = _sum(sent)
        if owner is None:
            return total
        code = wire.gather(total)
        if wire.feedback:
            e[owner].add_(total - code)
        return code


class _Layout:
    """Between gradients by name and the flat buffer of a fusion group."""

    def __init__(self, plan: Any, group: Any) -> None:
        self._plan = plan
        self._group = group

    def gathered(self, named: Mapping[str, Tensor]) -> Tensor:
        flat = torch.zeros(self._group.numel)
        for name, there, here in self._pieces():
            if name in named:
                flat[there] = named[name][here].float()
        return flat

    def scattered(self, flat: Tensor, named: dict[str, Tensor], like: Mapping[str, Tensor] | None = None) -> None:
        for name, there, here in self._pieces():
            if like is not None and name not in named:
                named[name] = torch.empty_like(like[name])
            named[name][here] = flat[there].to(named[name].dtype)

    def _pieces(self) -> Iterable[tuple[str, slice, slice]]:
        for piece in self._group.pieces:
            low = self._plan.offsets[piece.parameter] + piece.start - self._group.offset
            name = self._plan.gradients[piece.parameter].name
            yield name, slice(low, low + piece.numel), slice(piece.start, piece.start + piece.numel)


def _sum(terms: Sequence[Tensor]) -> Tensor:
    total = terms[0].clone()
    for term in terms[1:]:
        total = total + term
    return total


def in_memory_order(tensor: Tensor) -> Tensor:
    """Flat, as the elements of a dense tensor lie in memory."""
    order = sorted(range(tensor.dim()), key=lambda dim: (-tensor.stride()[dim], dim))
    return tensor.permute(order).reshape(-1)


class OneProcess:
    """A model that all ranks train, in one process.

    Args:
        model: the model; a copy is trained.
        optimizer: makes its optimizer.
        wire: what is on the wire.
        world_size: number of ranks.
    """

    def __init__(self, model: nn.Module, optimizer: Callable[[nn.Module], Any], wire: Wire, world_size: int) -> None:
        self.model = copy.deepcopy(model)
        self.optimizer = optimizer(self.model)
        self.ranks = Ranks(wire, world_size)

    def parameters(self) -> dict[str, Tensor]:
        """By name."""
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def gradients(self, losses: Sequence[Callable[[nn.Module], Tensor]]) -> list[dict[str, Tensor]]:
        """Each rank's own gradients."""
        all_ranks = []
        for loss in losses:
            self.model.zero_grad()
            loss(self.model).backward()
            named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
            all_ranks.append({name: in_memory_order(p.grad).clone() for name, p in named if p.grad is not None})
        return all_ranks

    def step(self, losses: Sequence[Callable[[nn.Module], Tensor]], plan: Any) -> dict[str, Tensor]:
        """One training step; returns the mean gradients, flat, in memory order."""
        mean = self.ranks.mean(self.gradients(losses), plan)
        for name, parameter in self.model.named_parameters():
            if name in mean:
                in_order = sorted(range(parameter.dim()), key=lambda dim: (-parameter.stride()[dim], dim))
                shape = [parameter.shape[dim] for dim in in_order]
                back = [in_order.index(dim) for dim in range(parameter.dim())]
                parameter.grad = mean[name].view(shape).permute(back).clone()
        self.optimizer.step()
        return mean
