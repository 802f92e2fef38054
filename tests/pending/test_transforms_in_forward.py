"""Forwards that use `torch.func`, `torch.autograd.functional` and forward-mode AD on their own parameters.

In each the transform is the first to see the parameters of `core` in a forward, while their update is pending.
"""

from __future__ import annotations

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import (
    functional_call,
    functionalize,
    grad,
    grad_and_value,
    jacfwd,
    jacrev,
    jvp,
    vjp,
    vmap,
)

from equivalence import Case, check_case
from models import HIDDEN, INPUTS, OUTPUTS


class Core(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, HIDDEN)
        self.second = nn.Linear(HIDDEN, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class TransformedNet(nn.Module):
    """A core between two layers; each subclass calls it in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(INPUTS, INPUTS)
        self.core = Core()
        self.after = nn.Linear(OUTPUTS, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.middle(torch.tanh(self.before(x))))

    def middle(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def hidden_mean(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.tanh(x @ weight.t()).square().mean()

    def called_with(self, parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(self.core, parameters, (x,))


class GradOfInput(TransformedNet):
    """`grad` with respect to the input closes over parameters."""

    def middle(self, x: Tensor) -> Tensor:
        slope = grad(lambda z: self.core(z).square().sum())(x)
        return self.core(x) + slope.sum(1, keepdim=True)


class InnerStep(TransformedNet):
    """MAML: steps of SGD inside of forward, through which backward goes."""

    def middle(self, x: Tensor) -> Tensor:
        parameters: dict[str, Tensor] = dict(self.core.named_parameters())
        for _ in range(2):
            slopes, value = grad_and_value(lambda p: self.called_with(p, x).square().mean())(parameters)
            parameters = {name: p - 0.1 * slopes[name] for name, p in parameters.items()}
        return self.called_with(parameters, x) + value


class GradOfGrad(TransformedNet):
    """Nested transforms of one parameter."""

    def middle(self, x: Tensor) -> Tensor:
        def steepness(weight: Tensor) -> Tensor:
            return grad(lambda w: self.hidden_mean(x, w))(weight).square().sum()

        return self.core(x) + grad(steepness)(self.core.first.weight).square().sum()


class Vjp(TransformedNet):
    """`vjp` with respect to parameters, with a parameter as the cotangent."""

    def middle(self, x: Tensor) -> Tensor:
        y, pull_back = vjp(lambda p: self.called_with(p, x).sum(0), dict(self.core.named_parameters()))
        return self.core(x) + y + sum(g.square().sum() for g in pull_back(self.after.bias)[0].values())


class Jvp(TransformedNet):
    """`jvp` with respect to parameters, with a parameter as the tangent."""

    def middle(self, x: Tensor) -> Tensor:
        weight = self.core.first.weight
        _, along = jvp(lambda w: self.hidden_mean(x, w), (torch.ones_like(weight),), (weight,))
        _, slope = jvp(lambda w: self.hidden_mean(x, w), (weight,), (torch.ones_like(weight),))
        return self.core(x) + along + slope


class MappedOverBatch(TransformedNet):
    """`vmap` of the module, with dropout."""

    def middle(self, x: Tensor) -> Tensor:
        return vmap(lambda row: F.dropout(self.core(row), 0.3), randomness="different")(x)


class MappedOverParameter(TransformedNet):
    """`vmap` over the rows of a parameter."""

    def middle(self, x: Tensor) -> Tensor:
        rows = vmap(lambda row, b: row.square().sum() * b, chunk_size=4)(self.core.first.weight, self.core.first.bias)
        return self.core(x) + rows.sum()


class PerSampleGradients(TransformedNet):
    """Outputs divided by the norm of each sample's gradient."""

    def middle(self, x: Tensor) -> Tensor:
        def loss(parameters: dict[str, Tensor], row: Tensor) -> Tensor:
            return self.called_with(parameters, row.unsqueeze(0)).square().sum()

        slopes = vmap(grad(loss), (None, 0))(dict(self.core.named_parameters()), x)
        norms = sum(slope.flatten(1).square().sum(1) for slope in slopes.values())
        return self.core(x) / (1 + norms.unsqueeze(1))


class Jacobians(TransformedNet):
    """In both modes, of the input and of a parameter."""

    def middle(self, x: Tensor) -> Tensor:
        weight = self.core.first.weight
        of_input = vmap(jacrev(self.core))(x).square().sum((1, 2)) + vmap(jacfwd(self.core))(x).square().sum((1, 2))
        of_weight = jacrev(lambda w: torch.tanh(x @ w.t()).mean(0))(weight).square().sum()
        return self.core(x) + of_input.unsqueeze(1) + of_weight + jacfwd(lambda w: self.hidden_mean(x, w))(weight).sum()


class AutogradFunctional(TransformedNet):
    """The older functions, `torch.autograd.functional.*`."""

    def middle(self, x: Tensor) -> Tensor:
        weight, bias, f = self.core.first.weight, self.core.first.bias, torch.autograd.functional

        def of_bias(b: Tensor) -> Tensor:
            return F.linear(x, self.core.first.weight, b).tanh().square().mean()

        with torch.no_grad():
            constant = f.jacobian(of_bias, bias, vectorize=True, strategy="forward-mode").sum()
        jacobian = f.jacobian(lambda w: torch.tanh(x @ w.t()).sum(0), weight, create_graph=True)
        return (
            self.core(x)
            + constant
            + jacobian.square().sum()
            + f.hessian(of_bias, bias, create_graph=True).square().sum()
            + f.vjp(of_bias, bias, create_graph=True)[1].sum()
            + f.jvp(of_bias, bias, torch.ones_like(bias), create_graph=True)[1]
            + f.hvp(of_bias, bias, torch.ones_like(bias), create_graph=True)[1].sum()
        )


class ForwardMode(TransformedNet):
    """Dual numbers made of parameters, and of tangents that are parameters."""

    def middle(self, x: Tensor) -> Tensor:
        weight = self.core.first.weight
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(weight, torch.ones_like(weight))
            hidden, slope = forward_ad.unpack_dual(F.linear(x, dual, self.core.first.bias).tanh())
            dual = forward_ad.make_dual(torch.ones_like(self.after.bias), self.after.bias)
            along = forward_ad.unpack_dual(dual.square()).tangent
        return self.core.second(hidden + slope) + along


class Functionalized(TransformedNet):
    """`functionalize` of a parameter, as a constant and with a gradient."""

    def middle(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = functionalize(lambda w: w.square().sum())(self.core.first.weight)
        return self.core(x) * torch.sigmoid(scale) + functionalize(lambda w: w.square().sum())(self.core.second.weight)


TRANSFORMED = {kind.__name__: kind for kind in TransformedNet.__subclasses__()}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_a_forward_that_transforms_functions_of_its_parameters_is_exact(on_ranks, name: str) -> None:
    check_case(Case(model=TRANSFORMED[name], steps=12), on_ranks)
