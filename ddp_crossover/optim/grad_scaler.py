"""A loss scaler that checks shards instead of waiting for gathered gradients."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from ddp_crossover.optim import sharded_norms as shards
from ddp_crossover.optim.deferred_updates import pipeline_of
from ddp_crossover.optim.optimizer_snapshot import optimizer_parameters
from ddp_crossover.optim.overflow import agreed


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
