"""The part of a rank without data in a step: DDP's forward and backward with a gradient of zeros, and without the
model.

Other ranks' DDP expects this rank's buckets, whatever is in them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_crossover.torch_internals.private import replaced


class _ZeroGradients(nn.Module):
    """Stands for the model in one forward. Its backward brings every parameter a gradient of zeros.

    Args:
        model: the model, whose buffers DDP broadcasts in a forward.
        parameters: the parameters, in the order in which the model's forward uses them.
    """

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        # In tuples, so that they do not belong to this module, too.
        self._model = (model,)
        self._of_model = tuple(parameters)

    def named_buffers(self, *args: Any, **options: Any) -> Iterator[tuple[str, Tensor]]:
        """Those of the model."""
        return self._model[0].named_buffers(*args, **options)

    def forward(self) -> list[Tensor]:
        """A number made of each parameter."""
        # Of a single element the sum hands on the gradient itself, which would look like one that a script keeps.
        return [(parameter * 1 if parameter.numel() == 1 else parameter).sum() for parameter in self._of_model]


def why_not_without_data(ddp: DistributedDataParallel) -> str | None:
    """The setting of DDP for which each rank needs a forward of the model; None if there is none."""
    return next((name for name in ("find_unused_parameters", "static_graph") if getattr(ddp, name)), None)


def take_part_without_data(ddp: DistributedDataParallel, parameters: Sequence[nn.Parameter]) -> None:
    """Do what a step's forward and backward do with other ranks; the gradients of this rank are zeros.

    Args:
        ddp: the model.
        parameters: those that DDP manages, in the order in which the model's forward uses them.

    Raises:
        RuntimeError: if DDP wants to see which parameters a real forward uses.
    """
    if (setting := why_not_without_data(ddp)) is not None:
        raise RuntimeError(
            f"batch(0) without a forward cannot tell DDP with {setting}=True which parameters the other ranks use: "
            "run forward and backward with any sample in batch(0), whose gradients count for nothing"
        )
    with replaced(ddp, "module", _ZeroGradients(ddp.module, parameters)), torch.enable_grad():
        numbers = ddp.forward()
    torch.autograd.backward(numbers, [torch.zeros_like(number) for number in numbers])
