"""A loss scaler that checks shards instead of waiting for gathered gradients.

Ranks whose gradients differ agree on whether any of them has overflowed, so that all skip the same steps.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from ddp_crossover.addons.norms import sharded_norms as shards
from ddp_crossover.comm.link import Link
from ddp_crossover.step.deferred_updates import pipeline_of
from ddp_crossover.watching.optimizer_snapshot import optimizer_parameters

# Nothing here keeps the object alive to which `steps` belongs: it has the optimizer, which would then never be dropped.
_links: weakref.WeakKeyDictionary[Optimizer, tuple[weakref.ref[Link], weakref.WeakMethod[Callable[[], int]]]] = (
    weakref.WeakKeyDictionary()
)


def agree_on_overflow(optimizers: Sequence[Optimizer], link: Link, steps: Callable[[], int]) -> None:
    """From now on :func:`agreed` asks all ranks of this link, which must have made as many ``steps()``, a method."""
    for optimizer in optimizers:
        _links[optimizer] = weakref.ref(link), weakref.WeakMethod(steps)


def agreed(optimizer: Optimizer, found_inf: dict[torch.device, Tensor]) -> dict[torch.device, Tensor]:
    """What `found_inf` is if ranks agree: 1 where any rank has found an overflow. A collective if ranks have to.

    Raises:
        RuntimeError: on all ranks, if they are in different steps.
    """
    link_of, steps_of = _links.get(optimizer, (lambda: None, lambda: None))
    link, steps = link_of(), steps_of()
    if link is None or link.is_closed or steps is None:
        return found_inf
    together = {}
    for device, found in found_inf.items():
        rows = link.all_gather_small(torch.stack([found.flatten()[0], found.new_tensor(steps())]))
        if (rows[:, 1] != rows[0, 1]).any():
            raise RuntimeError(
                "ranks unscale gradients of different steps, because some have left out scaler.step() in one: call it "
                "on all ranks in each step; it skips the step by itself on all of them if one has an overflow"
            )
        together[device] = rows[:, 0].amax().view_as(found)
    return together


class GradScaler(torch.amp.GradScaler):
    """Drop-in ``torch.amp.GradScaler`` that keeps the overlap of ``dear_hook``.

    Each rank checks its own shards, all ranks get the same ``found_inf``, and gradients that are still on the wire are
    unscaled when they are used, after they have been gathered. All else is inherited from torch. The stock scaler
    results in the same parameters, but waits for all gradients first.

    Example::

        scaler = dx.GradScaler("cuda")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    """

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        pipeline = pipeline_of(optimizer)
        gradients = shards.shared_gradients(pipeline, optimizer_parameters(optimizer))
        if pipeline is None or gradients is None:
            return agreed(optimizer, super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16))
        slots = [*gradients.on_the_wire, *gradients.in_memory]
        if not allow_fp16 and any(slot.parameter.dtype is torch.float16 for slot in slots):
            raise ValueError("Attempting to unscale FP16 gradients: keep the parameters in fp32 and use torch.autocast")
        found = shards.found_inf(pipeline, gradients)
        shards.scale(gradients, inv_scale.to(found.device).reshape(()))
        return {found.device: found}
