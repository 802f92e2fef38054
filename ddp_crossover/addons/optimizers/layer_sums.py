"""What optimizers share that scale each layer's update by norms over the whole layer, also if ranks hold only slices.

A layer is one parameter tensor. In a sharded run each rank updates flat slices of some layers, so the norm of a layer
is a sum over slices on all ranks. As with parallel tensor operators (Shi et al., MLSys 2021, arXiv 2010.10458), each
rank sums up its own slices, and one exchange per step adds up the sums of all layers. The exchange is
:meth:`LayerSumOptimizer.layer_sums`, which a sharded run replaces. This module knows nothing of ranks.

It imports nothing but torch, because the rest of the package imports it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

# Parameters of one param group, of one device and dtype, and their gradients.
Batch: TypeAlias = tuple[dict[str, Any], list[Tensor], list[Tensor]]


class LayerSumOptimizer(Optimizer):
    """Base class of optimizers whose update of a layer depends on two norms over the layer, as LARS and LAMB.

    ``step()`` first computes what is local to each parameter, for all param groups, then calls :meth:`layer_sums` once,
    then updates all parameters. It never waits for the device, and decides nothing by a parameter's shape.

    In a sharded run, ``param_groups`` hold 1-D slices of layers, in any order, possibly several of a layer or none at
    all, and ``vars(optimizer)["layer_sums"] = function`` replaces the method. The slices of a layer have the same
    settings on all ranks, and all of them have a gradient, or none.

    Every element then gets the bits of the unsharded run, as long as the trust ratio of its layer does. The last bits
    of a sum depend on how the layer is cut. Sums and ratio are float64, so rounding the ratio to the parameter's dtype
    hides this nearly always: on the CPU, an fp32 ratio comes out one bit apart once in about 5 * 10^8 updates of a
    layer with 1,000 elements, and once in 5 * 10^6 with 2 million; in 16-bit dtypes more rarely. In float64 the last
    bits may differ at any update. Ranks agree whenever they get the same sums. Under plain DDP, where each rank
    computes them, they agree if their processors and numbers of threads are alike.
    """

    def layer_sums(self, parameters: list[Tensor], sums: Tensor) -> Tensor:
        """Return the sums over whole layers. Called once in each step, also without any parameter.

        Args:
            parameters: the parameters that have a gradient, those of groups with ``adapt=False`` included.
            sums: float64 of shape (len(parameters), 2), on the device of the first parameter, or on the CPU without
                any. Each row has the sum of squares of the parameter, and that of its gradient (LARS) or of its update
                (LAMB).

        Returns:
            For each parameter the sums over the layer that it is a slice of, in the shape, dtype and device of
            ``sums``. This method returns ``sums``, because its parameters are whole layers.
        """
        return sums

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient.

        Args:
            closure: computes the loss and the gradients anew, before anything else happens.

        Returns:
            What ``closure`` has returned, or None.

        Raises:
            TypeError: for a sparse or complex gradient.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        batches = [batch for group in self.param_groups for batch in self._batches(group)]
        directions = [self._directions(*batch) for batch in batches]
        parameters = [parameter for _, own, _ in batches for parameter in own]
        squares = [_squares(own, measured) for (_, own, _), measured in zip(batches, directions, strict=True)]
        sums = self.layer_sums(parameters, _on_one_device(squares))
        rows = sums.split([len(own) for _, own, _ in batches])
        for (group, own, _), measured, row in zip(batches, directions, rows, strict=True):
            self._update(group, own, measured, self._factors(group, row, own[0]) if group["adapt"] else None)
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, as for any optimizer; raises ValueError for a setting that cannot be."""
        self._check({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def _batches(self, group: dict[str, Any]) -> Iterator[Batch]:
        batches: dict[tuple[torch.device, torch.dtype], Batch] = {}
        for parameter in group["params"]:
            if (gradient := parameter.grad) is None:
                continue
            if gradient.is_sparse or gradient.is_complex():
                raise TypeError(
                    f"{type(self).__name__} takes dense real gradients, and one of shape {tuple(gradient.shape)} is "
                    f"{'sparse' if gradient.is_sparse else 'complex'}: give that parameter to another optimizer"
                )
            _, parameters, gradients = batches.setdefault((parameter.device, parameter.dtype), (group, [], []))
            parameters.append(parameter)
            gradients.append(gradient)
        yield from batches.values()

    def _factors(self, group: dict[str, Any], sums: Tensor, like: Tensor) -> list[Tensor]:
        """The trust ratio of each layer, as 0-dim tensors; 1 where a norm is 0."""
        of_parameters, measured = sums.sqrt().unbind(dim=1)
        ratios = self._trust_ratios(group, of_parameters, measured)
        ratios = ratios.masked_fill((of_parameters == 0) | (measured == 0), 1.0)
        return list(ratios.to(like.device, like.dtype).unbind())

    @abstractmethod
    def _check(self, settings: dict[str, Any]) -> None:
        """Raise ValueError for settings of a param group that cannot be."""

    @abstractmethod
    def _directions(self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
        """What is measured beside the parameters, and later given to :meth:`_update`."""

    @abstractmethod
    def _trust_ratios(self, group: dict[str, Any], of_parameters: Tensor, of_directions: Tensor) -> Tensor:
        """The ratios for norms of layers, float64 of shape (layers,). What is returned for norms of 0 is not used."""

    @abstractmethod
    def _update(
        self, group: dict[str, Any], parameters: list[Tensor], directions: list[Tensor], factors: list[Tensor] | None
    ) -> None:
        """Update the parameters; ``factors`` has a 0-dim tensor for each, or is None with ``adapt=False``."""


def plus(tensors: list[Tensor], others: list[Tensor], scale: float, *, in_place: bool = False) -> list[Tensor]:
    """``tensors + scale * others``, with the same bits for a slice as for the whole."""
    if scale != 1 and tensors[0].is_cpu and tensors[0].dtype.itemsize == 2:
        # In 16-bit dtypes, torch's kernel for the CPU rounds the last few elements of a tensor twice, and others once.
        others, scale = list(torch._foreach_mul(others, scale)), 1
    if in_place:
        torch._foreach_add_(tensors, others, alpha=scale)
        return tensors
    return list(torch._foreach_add(tensors, others, alpha=scale))


def descend(parameters: list[Tensor], directions: list[Tensor], lr: float | Tensor) -> None:
    """``parameters -= lr * directions``, in place."""
    if isinstance(lr, Tensor) and not lr.is_cpu:  # the host would wait for its value
        steps = torch._foreach_mul(directions, lr.to(parameters[0].device).reshape(()))
        torch._foreach_sub_(parameters, steps)
    else:
        plus(parameters, directions, -float(lr), in_place=True)


def require_not_negative(settings: dict[str, Any], *names: str) -> None:
    """Raise ValueError for a setting that is negative or NaN."""
    for name in names:
        if not settings[name] >= 0:
            raise ValueError(f"{name}={settings[name]}: give a number that is at least 0")


def require_learning_rate(lr: float | Tensor) -> None:
    """Raise ValueError for a learning rate that is negative, NaN, or several numbers."""
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"lr is a tensor of shape {tuple(lr.shape)}: give a number, or a tensor with one element")
    if not lr >= 0:
        raise ValueError(f"lr={lr}: give a learning rate that is at least 0")


def _squares(parameters: list[Tensor], directions: list[Tensor]) -> Tensor:
    norms = torch._foreach_norm([*parameters, *directions], 2, torch.float64)
    return torch.stack(norms).square_().view(2, -1)


def _on_one_device(squares: list[Tensor]) -> Tensor:
    if not squares:
        return torch.zeros(0, 2, dtype=torch.float64, device="cpu")
    return torch.cat([each.to(squares[0].device) for each in squares], dim=1).t().contiguous()
