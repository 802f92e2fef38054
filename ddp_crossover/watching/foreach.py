"""Whether torch's optimizers may update many small parameters in one call, with the bits that the user's loop has.

By default torch loops over parameters on CPU. With ``foreach=True`` the same kernels are called from C++, in another
order for some optimizers (not for SGD, Adam and AdamW, as of torch 2.11 to 2.15): a trial tells. In 16 bits even the
same order gives other bits, because ``torch._foreach_mul_`` rounds a number that ``Tensor.mul_`` does not.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from ddp_crossover.torch_internals.optimizers import raw_step
from ddp_crossover.watching.clone import Clone
from ddp_crossover.watching.optimizer_snapshot import is_of_torch, optimizer_parameters
from ddp_crossover.watching.values import same

_STEPS = 6
_STEP_OF_ZEROS = 2
DTYPES_ALIKE = (torch.float32, torch.float64)
_OTHER_WAYS = ("fused", "capturable", "differentiable")


def may_use_foreach(optimizer: Optimizer) -> bool:
    """Whether ``foreach=True`` would be another way to the same bits: if the user has left it open, on CPU."""
    return (
        is_of_torch(optimizer)
        and all("foreach" in group and group["foreach"] is None for group in optimizer.param_groups)
        and not any(group.get(way) for group in optimizer.param_groups for way in _OTHER_WAYS)
        and not any(isinstance(value, Tensor) for group in optimizer.param_groups for value in group.values())  # `lr`
        and all(p.device.type == "cpu" and p.dtype in DTYPES_ALIKE for p in optimizer_parameters(optimizer))
    )


def is_alike_with_foreach(optimizer: Optimizer, with_state: bool) -> bool:
    """Try it on small clones: a question for ``separability.ask``."""
    looped, batched = (Clone(optimizer, with_state, shape_of=_shape) for _ in range(2))
    for group in batched.optimizer.param_groups:
        group["foreach"] = True
    for step in range(_STEPS):
        for clone in (looped, batched):
            clone.set_gradients(step)
            for parameter in clone.parameters:
                assert parameter.grad is not None
                if step == _STEP_OF_ZEROS:
                    parameter.grad.zero_()
                elif step == _STEPS - 1:
                    parameter.grad.view(-1)[-1:] = float("inf")
            raw_step(clone.optimizer)(clone.optimizer)
    for group in batched.optimizer.param_groups:
        group["foreach"] = None
    return same(looped.everything(), batched.everything())


def _shape(dim: int, number: int) -> list[int]:
    return [(33 if dim < 3 else 4) + number] * dim  # more than a vector register holds, and a rest
