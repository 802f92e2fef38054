"""Loops that hold other tensors over the memory of parameters, made before anything was attached or in
mid-run, and read or write through them between `optimizer.step()` and the next forward.

No operator on the parameter tells of such a read: the parameter may give up its overlap, never its value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.dlpack import from_dlpack, to_dlpack

from comparison import snapshot
from equivalence import Run, plain_loop
from models import HIDDEN, INPUTS, OUTPUTS
from stale_loops import LIMIT

Alias = Callable[[nn.Parameter], torch.Tensor]


def data(p: nn.Parameter) -> torch.Tensor:
    """What `.data` gives."""
    return p.data


def flat_view(p: nn.Parameter) -> torch.Tensor:
    """A view with a gradient function."""
    return p.view(-1)


def shallow_parameter(p: nn.Parameter) -> torch.Tensor:
    """Another parameter."""
    return nn.Parameter(p.data)


def through_dlpack(p: nn.Parameter) -> torch.Tensor:
    """A tensor over a storage object of its own, which shares no use count."""
    return from_dlpack(to_dlpack(p.detach()))


def through_numpy(p: nn.Parameter) -> torch.Tensor:
    """The same by way of numpy."""
    return torch.from_numpy(p.detach().numpy())


def through_storage(p: nn.Parameter) -> torch.Tensor:
    """A tensor made of the parameter's storage."""
    tensor = torch.empty(0, dtype=p.dtype)
    return tensor.set_(p.untyped_storage(), p.storage_offset(), p.shape, p.stride())


def aliases_made_before(run: Run, alias: Alias) -> Iterator[Any]:
    """Made before the loop; read, or clamped, after every step."""
    aliases = [alias(p) for p in run.model.parameters() if p.numel()]
    for index, loss in enumerate(plain_loop(run)):
        seen = snapshot(aliases) if index % 3 != 1 else None
        # A leaf's view that has a gradient function: plain torch, too, lets nobody write to it in place.
        if index % 3 != 2 and alias is not flat_view:
            with torch.no_grad():
                for each in aliases:
                    each.clamp_(-LIMIT, LIMIT)
        yield loss, seen


def aliases_made_after_attach(run: Run, alias: Alias) -> Iterator[Any]:
    """The same, made when the hook is there but nothing has been trained."""
    run.attach()
    yield from aliases_made_before(run, alias)


def alias_for_a_while(run: Run, alias: Alias) -> Iterator[Any]:
    """Made in mid-run right after a step, kept over some steps, dropped, and made once more."""
    parameters = [p for p in run.model.parameters() if p.numel()]
    aliases: list[torch.Tensor] = []
    for index, loss in enumerate(plain_loop(run)):
        if index in (4, 6):
            aliases = [alias(p) for p in parameters]
        elif index == 5:
            aliases = []
        with torch.no_grad():
            for each in aliases:
                each.clamp_(-LIMIT, LIMIT)
        yield loss, snapshot(aliases)


def alias_made_before_the_step(run: Run, alias: Alias) -> Iterator[Any]:
    """Made anew in each step, between backward and `step`, and read after it."""
    parameters = [p for p in run.model.parameters() if p.numel()]
    for x, y in run.batches():
        run.optimizer.zero_grad()
        loss = run.loss(run.model(x), y)
        loss.backward()
        aliases = [alias(p) for p in parameters]
        before = snapshot(aliases)
        run.optimizer.step()
        yield loss, before, snapshot(aliases)


def alias_made_in_forward(run: Run) -> Iterator[Any]:
    """A forward hook keeps what it sees, for whoever reads it after the step."""
    kept: dict[str, torch.Tensor] = {}

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        kept["weight"] = module.get_parameter("weight").data

    run.model.module.second.register_forward_hook(keep)
    for loss in plain_loop(run):
        yield loss, snapshot(kept)


def kept_state_dict(run: Run) -> Iterator[Any]:
    """One state dict, taken before the loop, which shows the current values ever after."""
    values = run.model.module.state_dict()
    for loss in plain_loop(run):
        seen = snapshot(values)
        for value in values.values():
            value.clamp_(-LIMIT, LIMIT)
        yield loss, seen


def kept_numpy(run: Run) -> Iterator[Any]:
    """numpy arrays over the same memory."""
    arrays = [p.detach().numpy() for p in run.model.parameters() if p.numel()]
    for loss in plain_loop(run):
        sums = [float(array.sum()) for array in arrays]
        for array in arrays:
            array *= 0.98
        yield loss, sums


def twin_for_evaluation(run: Run) -> Iterator[Any]:
    """A second model over the same memory, as actors share the learner's weights."""
    twin = run.case.model()
    twin.load_state_dict(run.model.module.state_dict(), assign=True)
    twin.eval()
    x_eval, _ = run.batch(10_000)
    for loss in plain_loop(run):
        with torch.no_grad():
            yield loss, twin(x_eval)


def shared_memory(run: Run) -> Iterator[Any]:
    """Parameters move to shared memory in mid-run, right after a step, from a list made before."""
    parameters = [p for p in run.model.parameters() if p.numel()]
    for index, loss in enumerate(plain_loop(run)):
        if index == 5:
            for p in parameters:
                p.share_memory_()
        yield loss, [p.is_shared() for p in parameters]


class FlatNet(nn.Module):
    """All parameters are slices of one buffer; with an `overlap` neighbours share some elements."""

    def __init__(self, overlap: int = 0, shared_memory: bool = False) -> None:
        super().__init__()
        shapes = [(HIDDEN, INPUTS), (HIDDEN,), (OUTPUTS, HIDDEN), (OUTPUTS,)]
        self.flat = torch.randn(sum(torch.Size(shape).numel() for shape in shapes)) * 0.3
        if shared_memory:
            self.flat.share_memory_()
        self.parts = nn.ParameterList()
        offset = 0
        for shape in shapes:
            numel = torch.Size(shape).numel()
            self.parts.append(nn.Parameter(self.flat[offset : offset + numel].view(shape)))
            offset += numel - overlap

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias, head, head_bias = self.parts
        hidden = torch.tanh(nn.functional.linear(x, weight, bias))
        return nn.functional.linear(hidden, head, head_bias)


def through_the_flat_buffer(run: Run) -> Iterator[Any]:
    """Reads and clamps all parameters through the buffer that they are slices of."""
    flat = run.model.module.flat
    for loss in plain_loop(run):
        seen = snapshot(flat)
        flat.clamp_(-LIMIT, LIMIT)
        yield loss, seen


def through_the_neighbour(run: Run) -> Iterator[Any]:
    """Reads and writes one slice only, whose elements belong to its neighbours as well if they overlap."""
    part = run.model.module.parts[1]
    for loss in plain_loop(run):
        seen = snapshot(part)
        part.data.mul_(0.9)
        yield loss, seen
