"""LARS: SGD with momentum, and a learning rate of each layer's own."""

from __future__ import annotations

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


class LARS(LayerSumOptimizer):
    """SGD with momentum whose learning rate is scaled for each layer, for training with large batches.

    Each layer's gradient ``g``, with its weight decay, is multiplied by the trust ratio
    ``trust_coefficient * |w| / (|g| + weight_decay * |w| + eps)``, so that an update is in proportion to the layer's
    weights ``w``. The ratio is 1 where ``|w|`` or ``|g|`` is 0. All else is as in ``torch.optim.SGD``: ``lr`` is
    outside of the momentum buffer (in the paper it is inside), so a new ``lr`` holds at once for all past gradients.

    Source: You, Gitman and Ginsburg, "Large batch training of convolutional networks", arXiv 1708.03888.

    Tuning: put biases and the parameters of normalization layers into a group with ``adapt=False`` and
    ``weight_decay=0``; their small norms would hold them back. Learning rates are larger than those of SGD: SimCLR
    (arXiv 2002.05709) trains ResNet-50 with 0.3 for each 256 images of a batch, so 4.8 for 4,096. Warm up over some
    epochs, then let ``lr`` decay. Groups with ``adapt=False`` may need an ``lr`` as for SGD. Clipping gradients changes
    little, because the ratio divides by their norms.

    On a CPU, ``step()`` takes three times as long as SGD's, mostly for the norms, which are taken in float64. State:
    ``momentum_buffer``, shaped as its parameter and of its dtype, from the first step on, if ``momentum`` is not 0. The
    norms are sums over slices on all ranks if parameters are sharded, see
    :class:`~ddp_crossover.optim.LayerSumOptimizer`, which also says how exact that is.

    Args:
        params: parameters, or param groups; each group may have settings of its own. Dense and real.
        lr: learning rate, at least 0; a number or a tensor with one element. A tensor on a device is never read by the
            host.
        momentum: factor for past gradients, at least 0.
        dampening: 1 minus the factor for the present gradient, except in the first step of a parameter.
        weight_decay: factor of the weights that is added to the gradient, at least 0.
        nesterov: Nesterov momentum; needs ``momentum`` and no ``dampening``.
        trust_coefficient: the size of an update in proportion to the weights, with ``lr=1`` and without momentum; above
            0.
        eps: added to the divisor of the ratio, at least 0; it matters where gradients are about as small.
        maximize: ascend.
        adapt: False: a ratio of 1, which makes it SGD, bit for bit. Only in 16-bit dtypes on the CPU the last bits may
            differ, because SGD's depend on where in its tensor an element is.

    Raises:
        ValueError: for a setting that cannot be; the message says what can.

    Example::

        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4))
        weights = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() <= 1]
        groups = [{"params": weights}, {"params": others, "adapt": False, "weight_decay": 0.0, "lr": 0.1}]
        optimizer = dx.optim.LARS(groups, lr=10.0, momentum=0.9, weight_decay=5e-5)
        model(torch.randn(2, 8)).sum().backward()
        optimizer.step()
    """

    updates_each_by_itself = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        momentum: float = 0.9,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        trust_coefficient: float = 0.001,
        eps: float = 1e-8,
        maximize: bool = False,
        adapt: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "trust_coefficient": trust_coefficient,
            "eps": eps,
            "maximize": maximize,
            "adapt": adapt,
        }
        super().__init__(params, defaults)

    def _check(self, settings: dict[str, Any]) -> None:
        require_learning_rate(settings["lr"])
        require_not_negative(settings, "momentum", "weight_decay", "eps")
        if not settings["trust_coefficient"] > 0:
            raise ValueError(
                f"trust_coefficient={settings['trust_coefficient']}: give a number above 0, as 0.001. For plain SGD "
                "use adapt=False"
            )
        if settings["nesterov"] and (settings["momentum"] == 0 or settings["dampening"] != 0):
            raise ValueError(
                f"nesterov=True with momentum={settings['momentum']} and dampening={settings['dampening']}: give a "
                "momentum above 0, and dampening=0"
            )

    def _directions(self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
        return gradients

    def _trust_ratios(self, group: dict[str, Any], of_parameters: Tensor, of_directions: Tensor) -> Tensor:
        trust_coefficient, weight_decay, eps = group["trust_coefficient"], group["weight_decay"], group["eps"]
        ratios: Tensor = trust_coefficient * of_parameters / (of_directions + weight_decay * of_parameters + eps)
        return ratios

    def _update(
        self, group: dict[str, Any], parameters: list[Tensor], directions: list[Tensor], factors: list[Tensor] | None
    ) -> None:
        gradients = directions
        if group["maximize"]:
            directions = list(torch._foreach_neg(gradients))
        if group["weight_decay"] != 0:
            directions = plus(directions, parameters, group["weight_decay"])
        if factors is not None and directions is gradients:
            directions = list(torch._foreach_mul(directions, factors))
        elif factors is not None:
            torch._foreach_mul_(directions, factors)
        if group["momentum"] != 0:
            buffers = self._momentum_buffers(group, parameters, directions)
            directions = plus(directions, buffers, group["momentum"]) if group["nesterov"] else buffers
        descend(parameters, directions, group["lr"])

    def _momentum_buffers(
        self, group: dict[str, Any], parameters: list[Tensor], directions: list[Tensor]
    ) -> list[Tensor]:
        """The buffers after they have taken up the directions."""
        buffers: list[Tensor] = []
        known: list[tuple[Tensor, Tensor]] = []
        for parameter, direction in zip(parameters, directions, strict=True):
            state = self.state[parameter]
            if (buffer := state.get("momentum_buffer")) is None:
                buffer = torch.zeros_like(parameter, memory_format=torch.preserve_format).copy_(direction)
                state["momentum_buffer"] = buffer
            else:
                known.append((buffer, direction))
            buffers.append(buffer)
        if known:
            old, taken_up = map(list, zip(*known, strict=True))
            torch._foreach_mul_(old, group["momentum"])
            plus(old, taken_up, 1 - group["dampening"], in_place=True)
        return buffers
