"""Habits of optimizers, each in its smallest form: what makes an update of one parameter depend on more than its own
gradient, now, later, or for some shapes only.

All are plain SGD otherwise. One whose settings change in the middle of training has a method `change`, which the script
calls.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, optim
from torch.optim import Optimizer

from own_optimizers import (
    BeginsForAll,
    CountsInAttribute,
    CountsInObject,
    CountsInState,
    HasObject,
    LooksUp,
    OwnOptimizer,
    SetsLate,
)

MAX_NORM = 0.1
# The least edge of a large matrix: the models of programs have some, a trial on small samples may have none.
LARGE = 12
EACH = 3


def _is_large(p: Tensor) -> bool:
    return p.dim() == 2 and min(p.shape) >= LARGE


def _mean(values: Tensor) -> Tensor:
    dist.all_reduce(values)
    return values.div_(dist.get_world_size())


class _OneByOne(OwnOptimizer):
    """Updates one parameter after another, by a direction of each."""

    def update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        for p in parameters:
            p.add_(self.direction(p, p.grad, self.state[p]), alpha=-group["lr"])

    def direction(self, p: Tensor, gradient: Any, state: dict[str, Any]) -> Tensor:
        raise NotImplementedError


# Sizes, draws, shapes.


class FactorsLarge(_OneByOne):
    """Keeps moments of rows and columns for large matrices, as Adafactor does."""

    def direction(self, p: Tensor, gradient: Any, state: dict[str, Any]) -> Tensor:
        if not _is_large(p):
            return gradient
        for dim in (0, 1):
            mean = gradient.square().mean(dim, keepdim=True)
            state[f"mean_{dim}"] = mean if f"mean_{dim}" not in state else state[f"mean_{dim}"].lerp(mean, 0.1)
        return gradient / (state["mean_0"] + state["mean_1"] + 1e-3).sqrt()


class Draws(_OneByOne):
    """Adds noise to every gradient."""

    def direction(self, p: Tensor, gradient: Any, state: dict[str, Any]) -> Tensor:
        return gradient + 0.1 * torch.randn(p.shape, dtype=p.dtype, device="cpu")


class DrawsForLarge(Draws):
    """To those of large matrices only."""

    def direction(self, p: Tensor, gradient: Any, state: dict[str, Any]) -> Tensor:
        return super().direction(p, gradient, state) if _is_large(p) else gradient


class DrawsSometimes(Draws):
    """In some steps only, not in the first ones."""

    def direction(self, p: Tensor, gradient: Any, state: dict[str, Any]) -> Tensor:
        state["step"] = state.get("step", 0) + 1
        is_time = state["step"] > 2 * EACH and state["step"] % EACH
        return super().direction(p, gradient, state) if is_time else gradient


class Stacks(OwnOptimizer):
    """Computes on all gradients of one shape together, and divides by a norm of each, or of all of them."""

    jointly = False

    def update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        by_shape: dict[Any, list[Tensor]] = defaultdict(list)
        for p in parameters:
            if p.numel():
                by_shape[p.shape].append(p)
        for alike in by_shape.values():
            stacked = torch.stack([p.grad for p in alike])
            norms = stacked.norm() if self.jointly else stacked.reshape(len(alike), -1).norm(dim=1)
            directions = stacked / (norms.view(-1, *[1] * (stacked.dim() - 1)) + 0.1)
            for p, direction in zip(alike, directions, strict=True):
                p.add_(direction, alpha=-group["lr"])


class StacksJointly(Stacks):
    """Parameters of one shape share a norm."""

    jointly = True


class SkipsNonFinite(OwnOptimizer):
    """Skips a step as a whole if any gradient is not finite."""

    def update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        if all(bool(p.grad.isfinite().all()) for p in parameters):
            super().update(group, parameters)


# Settings.


class _Clips(OwnOptimizer):
    """Clips by the norm of all gradients if a setting says so."""

    def limit(self, group: dict[str, Any]) -> float:
        raise NotImplementedError

    def update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        factor: Any = 1.0
        if (limit := self.limit(group)) > 0 and parameters:
            norm = torch.stack([p.grad.double().norm() for p in parameters]).norm()
            factor = float((limit / (norm + 1e-6)).clamp(max=1.0))
        for p in parameters:
            p.add_(p.grad * factor, alpha=-group["lr"])


class LateNumber(_Clips):
    """A number in the group is set."""

    before = 0.0

    def __init__(self, params: Any) -> None:
        super().__init__(params, max_norm=self.before)

    def limit(self, group: dict[str, Any]) -> float:
        return group["max_norm"]

    def change(self) -> None:
        for group in self.param_groups:
            group["max_norm"] = MAX_NORM


class LateSmallNumber(LateNumber):
    """A number so large that it never counted becomes small."""

    before = 1e9


class LateString(_Clips):
    """A word in the group is set."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, clip="none")

    def limit(self, group: dict[str, Any]) -> float:
        return MAX_NORM if group["clip"] == "norm" else 0.0

    def change(self) -> None:
        for group in self.param_groups:
            group["clip"] = "norm"


class LateAttribute(_Clips):
    """An attribute is set."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.max_norm = 0.0

    def limit(self, group: dict[str, Any]) -> float:
        return self.max_norm

    def change(self) -> None:
        self.max_norm = MAX_NORM


class LateDefault(_Clips):
    """A default is set, which `step` reads."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, max_norm=0.0)

    def limit(self, group: dict[str, Any]) -> float:
        return self.defaults["max_norm"]

    def change(self) -> None:
        self.defaults["max_norm"] = MAX_NORM


class CallsAttribute(OwnOptimizer):
    """Keeps a function in an attribute, as lion-pytorch does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.update_one: Callable[..., None] = _descend

    def update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        for p in parameters:
            self.update_one(p, p.grad, group["lr"])


def _descend(p: Tensor, gradient: Tensor, lr: float) -> None:
    p.add_(gradient, alpha=-lr)


class NoneSetting(OwnOptimizer):
    """A setting that is None is computed from a count."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, decay=None)

    def update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        for p in parameters:
            self.state[p]["step"] = step = self.state[p].get("step", 0) + 1
            decay = 0.1 / step if group["decay"] is None else group["decay"]
            p.mul_(1 - decay * group["lr"]).add_(p.grad, alpha=-group["lr"])


class CountsInGroup(OwnOptimizer):
    """Counts steps in a tensor of the group."""

    def update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        count = group.setdefault("count", torch.zeros((), device="cpu"))
        count += 1
        for p in parameters:
            p.add_(p.grad * (group["lr"] / count.sqrt()).to(p.dtype), alpha=-1.0)


# Gradients.


class CountsLate(_OneByOne):
    """Counts in the group what happens to large matrices, in some steps only, not in the first ones."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, late=0)

    def update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        for p in parameters:
            self.state[p]["step"] = step = self.state[p].get("step", 0) + 1
            if _is_large(p) and step > 2 * EACH and step % EACH:
                group["late"] += 1
        super().update(group, parameters)

    def direction(self, p: Tensor, gradient: Any, state: dict[str, Any]) -> Tensor:
        return gradient


class DecaysGradient(OwnOptimizer):
    """Adds weight decay to the gradient, in place."""

    def update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        for p in parameters:
            p.grad.add_(p, alpha=0.1)
        super().update(group, parameters)


class ReplacesGradient(OwnOptimizer):
    """Puts another tensor into `.grad`."""

    def update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        for p in parameters:
            p.grad = p.grad.add(p, alpha=0.1)
        super().update(group, parameters)


class DropsGradient(OwnOptimizer):
    """Leaves no gradient."""

    def update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        super().update(group, parameters)
        for p in parameters:
            p.grad = None


# Communication in `step()`.


class Votes(_OneByOne):
    """A majority of ranks decides on each sign."""

    def direction(self, p: Tensor, gradient: Any, state: dict[str, Any]) -> Tensor:
        vote = gradient.sign()
        dist.all_reduce(vote)
        return vote.sign() * 0.1


class AllReducesAll(OwnOptimizer):
    """One all-reduce for the updates of all."""

    def update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        if not parameters:
            return
        flat = _mean(torch.cat([p.grad.flatten().float() for p in parameters]))
        for p, direction in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            p.add_(direction.view(p.shape).to(p.dtype), alpha=-group["lr"])


class AllReducesNumbers(_OneByOne):
    """One number for each parameter."""

    def direction(self, p: Tensor, gradient: Any, state: dict[str, Any]) -> Tensor:
        return gradient / (1.0 + _mean(gradient.double().norm().view(1)).squeeze()).to(p.dtype)


class Broadcasts(OwnOptimizer):
    """Each parameter is updated by one rank, which sends it to the others, as in distributed Muon."""

    def update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        for index, p in enumerate(parameters):
            owner = index % dist.get_world_size()
            if owner == dist.get_rank():
                p.add_(p.grad, alpha=-group["lr"])
            dist.broadcast(p.detach(), owner)


class AveragesSometimes(OwnOptimizer):
    """Averages parameters, in some steps only, not in the first ones."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.steps = 0

    def update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        super().update(group, parameters)
        if group is not self.param_groups[0]:
            return
        self.steps += 1
        if self.steps % EACH == 0:
            for p in parameters:
                p.copy_(_mean(p.detach().clone()))


def averages_in_hook(params: Iterable[Tensor]) -> Optimizer:
    """Averages parameters in a hook after each step."""
    optimizer = optim.SGD(params, lr=0.05)
    optimizer.register_step_post_hook(_average_after)
    return optimizer


@torch.no_grad()
def _average_after(optimizer: Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                p.copy_(_mean(p.detach().clone()))


# Wrappers and closures.


class _Wrapper(Optimizer):
    inner: Optimizer

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return self.inner.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)
        self.param_groups = self.inner.param_groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if "inner" in vars(self):
            self.inner.add_param_group(param_group)
        else:
            super().add_param_group(param_group)


class Wraps(_Wrapper):
    """An optimizer around another, which begins as one of its own."""

    def __init__(self, params: Any) -> None:
        inner = optim.SGD(params, lr=0.05, momentum=0.9)
        super().__init__(inner.param_groups, inner.defaults)
        self.inner = inner
        self.param_groups, self.state = inner.param_groups, inner.state


class WrapsWithoutInit(_Wrapper):
    """One that skips `Optimizer.__init__`, as look-aheads do."""

    def __init__(self, params: Any) -> None:
        self.inner = optim.SGD(params, lr=0.05, momentum=0.9)
        self.param_groups, self.state, self.defaults = self.inner.param_groups, self.inner.state, self.inner.defaults


class WrapsAndForwards(_Wrapper):
    """One that has what it has not from the optimizer inside, hooks too, as fairscale's AdaScale does."""

    def __init__(self, params: Any) -> None:
        self.inner = optim.SGD(params, lr=0.05, momentum=0.9)

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)


class KeepsGradients(_OneByOne):
    """Steps along the difference from the last gradient, too, which it keeps as it is."""

    def direction(self, p: Tensor, gradient: Any, state: dict[str, Any]) -> Tensor:
        before = state.get("before", gradient)
        state["before"] = p.grad
        return gradient + 0.1 * (gradient - before)


class Differentiates(Optimizer):
    """Has autograd differentiate a penalty in a `step()` that is not in `no_grad()`."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    [of_penalty] = torch.autograd.grad(p.pow(3).sum(), p)
                    with torch.no_grad():
                        p.sub_(p.grad + 1e-3 * of_penalty, alpha=group["lr"])
        return loss


class ReadsVersions(_OneByOne):
    """Steps further with a parameter that has been written to often."""

    def direction(self, p: Tensor, gradient: Any, state: dict[str, Any]) -> Tensor:
        return gradient * (1 + p._version % 3)


class Multiplies(_OneByOne):
    """Multiplies gradients as matrices, which autocast rounds."""

    def direction(self, p: Tensor, gradient: Any, state: dict[str, Any]) -> Tensor:
        return (gradient @ gradient.t() @ gradient).to(p.dtype) if gradient.dim() == 2 else gradient


class UsesDefaultDtype(_OneByOne):
    """Computes with a number in the dtype of new tensors."""

    def direction(self, p: Tensor, gradient: Any, state: dict[str, Any]) -> Tensor:
        third = torch.full(p.shape, 1 / 3, dtype=torch.get_default_dtype(), device=p.device)
        return (gradient * third).to(p.dtype)


class CallsClosureTwice(OwnOptimizer):
    """Goes up, computes gradients there, and comes back, as SAM does; without a closure it is plain SGD."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if closure is None:
            return super().step()
        with torch.enable_grad():
            loss = closure()
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        before = [p.clone() for p in parameters]
        for p in parameters:
            p.add_(p.grad, alpha=0.05)
        with torch.enable_grad():
            closure()
        for p, value in zip(parameters, before, strict=True):
            p.copy_(value)
        super().step()
        return loss


class TakesNoClosure(OwnOptimizer):
    """`step()` has no argument."""

    def step(self) -> None:  # type: ignore[override]
        super().step()


class GoesByLoss(OwnOptimizer):
    """Steps half as far if its closure returns a loss that is a number, as some skip a step without one."""

    def update_all(self, loss: Any) -> None:
        for group in self.param_groups:
            lr = group["lr"] if loss is None or loss.isnan() else group["lr"] / 2
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-lr)


HABITS: dict[str, Callable[[Sequence[Tensor]], Optimizer]] = {
    "factors_large": FactorsLarge,
    "draws": Draws,
    "draws_for_large": DrawsForLarge,
    "draws_sometimes": DrawsSometimes,
    "stacks": Stacks,
    "stacks_jointly": StacksJointly,
    "skips_non_finite": SkipsNonFinite,
    "late_number": LateNumber,
    "late_small_number": LateSmallNumber,
    "late_string": LateString,
    "late_attribute": LateAttribute,
    "late_default": LateDefault,
    "calls_attribute": CallsAttribute,
    "none_setting": NoneSetting,
    "counts_in_group": CountsInGroup,
    "counts_in_state": CountsInState,
    "counts_in_attribute": CountsInAttribute,
    "begins_for_all": BeginsForAll,
    "counts_in_object": CountsInObject,
    "counts_late": CountsLate,
    "sets_late": SetsLate,
    "looks_up": LooksUp,
    "has_object": HasObject,
    "decays_gradient": DecaysGradient,
    "replaces_gradient": ReplacesGradient,
    "drops_gradient": DropsGradient,
    "votes": Votes,
    "all_reduces_all": AllReducesAll,
    "all_reduces_numbers": AllReducesNumbers,
    "broadcasts": Broadcasts,
    "averages_sometimes": AveragesSometimes,
    "averages_in_hook": averages_in_hook,
    "wraps": Wraps,
    "wraps_without_init": WrapsWithoutInit,
    "wraps_and_forwards": WrapsAndForwards,
    "keeps_gradients": KeepsGradients,
    "differentiates": Differentiates,
    "reads_versions": ReadsVersions,
    "multiplies": Multiplies,
    "uses_default_dtype": UsesDefaultDtype,
    "calls_closure_twice": CallsClosureTwice,
    "takes_no_closure": TakesNoClosure,
    "goes_by_loss": GoesByLoss,
}
WITHOUT_HOOKS = ("wraps_without_init", "wraps_and_forwards")
WRAPPERS = ("wraps", *WITHOUT_HOOKS)
COMMUNICATING = ("votes", "all_reduces_all", "all_reduces_numbers", "broadcasts", "averages_sometimes",
                 "averages_in_hook")  # fmt: skip
