"""LAMB: Adam, and a learning rate of each layer's own."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ddp_crossover.addons.optimizers.layer_sums import (
    LayerSumOptimizer,
    descend,
    plus,
    require_learning_rate,
    require_not_negative,
)


class LAMB(LayerSumOptimizer):
    """AdamW whose learning rate is scaled for each layer, for training with large batches.

    With Adam's moments ``m`` and ``v``, the update of a layer is ``u = m / (sqrt(v) + eps) + weight_decay * w``. It is
    multiplied by ``lr`` and by the trust ratio ``|w| / |u|``, so that it is in proportion to the layer's weights ``w``.
    The ratio is 1 where ``|w|`` or ``|u|`` is 0.

    Source: You et al., "Large batch optimization for deep learning: training BERT in 76 minutes", arXiv 1904.00962.

    Tuning: put biases and the parameters of normalization layers into a group with ``adapt=False`` and
    ``weight_decay=0``. Scale ``lr`` with the square root of the batch (the paper has 0.005 for BERT and batches of
    32k), and warm up longer with larger batches. Many recipes clip the norm of all gradients to 1 before ``step()``.
    If single layers diverge, try ``max_trust=10``.

    On a CPU, ``step()`` takes twice as long as AdamW's. While it runs, all updates together take as much memory
    as their gradients, and for a moment twice as much. State, as of ``torch.optim.Adam``: ``exp_avg`` and
    ``exp_avg_sq``, shaped as the parameter and of its dtype, and ``step``, 0-dim, float32, on the CPU. The norms are
    sums over slices on all ranks if parameters are sharded, see
    :class:`~ddp_crossover.optim.LayerSumOptimizer`, which also says how exact that is.

    Args:
        params: parameters, or param groups; each group may have settings of its own. Dense and real.
        lr: learning rate, at least 0; a number or a tensor with one element. A tensor on a device is never read by the
            host.
        betas: factors for the past first and second moments, each at least 0 and below 1.
        eps: added to the root of the second moment, above 0.
        weight_decay: factor of the weights that is added to the update, at least 0. It is decoupled as in AdamW: the
            moments do not contain it, but the trust ratio scales it.
        bias_correction: divide the moments by what they lack in the first steps, as Adam does. Some recipes for BERT
            leave it out.
        max_trust: largest trust ratio, above 0. Default: no limit.
        adapt: False: a ratio of 1, which makes it AdamW, but for rounding.

    Raises:
        ValueError: for a setting that cannot be; the message says what can.

    Example::

        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4))
        weights = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() <= 1]
        groups = [{"params": weights}, {"params": others, "adapt": False, "weight_decay": 0.0}]
        optimizer = dx.optim.LAMB(groups, lr=2e-3, weight_decay=0.01)
        model(torch.randn(2, 8)).sum().backward()
        optimizer.step()
    """

    updates_each_by_itself = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        bias_correction: bool = True,
        max_trust: float | None = None,
        adapt: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "max_trust": max_trust,
            "adapt": adapt,
        }
        super().__init__(params, defaults)

    def _check(self, settings: dict[str, Any]) -> None:
        require_learning_rate(settings["lr"])
        require_not_negative(settings, "weight_decay")
        if len(settings["betas"]) != 2 or not all(0 <= beta < 1 for beta in settings["betas"]):
            raise ValueError(f"betas={settings['betas']}: give two numbers that are at least 0 and below 1")
        if not settings["eps"] > 0:
            raise ValueError(
                f"eps={settings['eps']}: give a number above 0, as 1e-6, because elements whose gradients were all 0 "
                "are divided by it"
            )
        if settings["max_trust"] is not None and not settings["max_trust"] > 0:
            raise ValueError(f"max_trust={settings['max_trust']}: give a number above 0, as 10, or None for no limit")

    def _directions(self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
        beta1, beta2 = group["betas"]
        states = [self._state_of(parameter) for parameter in parameters]
        first = [state["exp_avg"] for state in states]
        second = [state["exp_avg_sq"] for state in states]
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, 1)
        torch._foreach_lerp_(first, gradients, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, gradients, gradients, value=1 - beta2)
        divisors = torch._foreach_sqrt(second)
        if group["bias_correction"]:
            torch._foreach_div_(divisors, [math.sqrt(1 - beta2 ** float(step)) for step in steps])
        torch._foreach_add_(divisors, group["eps"])
        directions = list(torch._foreach_div(first, divisors))
        if group["bias_correction"]:
            torch._foreach_div_(directions, [1 - beta1 ** float(step) for step in steps])
        if group["weight_decay"] != 0:
            plus(directions, parameters, group["weight_decay"], in_place=True)
        return directions

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state

    def _trust_ratios(self, group: dict[str, Any], of_parameters: Tensor, of_directions: Tensor) -> Tensor:
        ratios = of_parameters / of_directions
        return ratios if group["max_trust"] is None else ratios.clamp(max=group["max_trust"])

    def _update(
        self, group: dict[str, Any], parameters: list[Tensor], directions: list[Tensor], factors: list[Tensor] | None
    ) -> None:
        if factors is not None:
            torch._foreach_mul_(directions, factors)
        descend(parameters, directions, group["lr"])
