"""Optimizers as other packages write them: without `Optimizer.__init__`, around another optimizer, with settings of
their own and with lists that their param groups share.
"""

from __future__ import annotations

import contextlib
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import ddp_crossover as dx
import gradient_loops
from ddp_crossover.watching.separability import why_not_separable
from equivalence import SGD, Case, Run, check_case, optimizer, plain_loop, train_step, until_step
from models import DeepNet
from own_optimizers import OwnOptimizer

Factory = Callable[[nn.Module], Optimizer]


class Lookahead(Optimizer):
    """Slow weights around a fast optimizer; its class calls no `super().__init__()`, on purpose."""

    def __init__(self, base: Optimizer, every: int = 3) -> None:
        self.base = base
        self.every = every
        self.param_groups = base.param_groups
        self.state: Any = defaultdict(dict)
        self.steps = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {"base": self.base.state_dict(), "slow": list(self.state.values())}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = self.base.step(closure)
        self.steps += 1
        if self.steps % self.every == 0:
            for group in self.param_groups:
                for parameter in group["params"]:
                    slow = self.state[parameter].setdefault("slow", parameter.detach().clone())
                    slow.add_(parameter.data - slow, alpha=0.5)
                    parameter.data.copy_(slow)
        return loss


class Orthogonal(Lookahead):
    """Edits gradients before the optimizer that it wraps sees them."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.numel():
                    share = torch.dot(parameter.flatten(), parameter.grad.flatten()) / parameter.square().sum()
                    parameter.grad.sub_(parameter, alpha=float(share))
        return self.base.step(closure)


class Scaled(OwnOptimizer):
    """Keeps a learning rate of its own, which users set between steps."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=1.0)
        self.lr = lr

    def update(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        for parameter in parameters:
            parameter.sub_(parameter.grad, alpha=self.lr)


class Buffered(OwnOptimizer):
    """Like early RAdams: what depends on the step count is kept in a list that all param groups share by accident, and
    the learning rate of whichever group came first is in it.
    """

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr, buffer=[[None, None] for _ in range(10)])

    def update(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        for parameter in parameters:
            state = self.state[parameter]
            state["step"] = state.get("step", 0) + 1
            kept = group["buffer"][state["step"] % 10]
            if kept[0] != state["step"]:
                kept[:] = [state["step"], group["lr"] / (1 - 0.9 ** state["step"])]
            parameter.sub_(parameter.grad, alpha=kept[1])


def _in_two_groups(model: nn.Module) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    half = len(parameters) // 2
    return [{"params": parameters[:half], "lr": 0.1}, {"params": parameters[half:], "lr": 0.02}]


def _lookahead(model: nn.Module) -> Optimizer:
    return Lookahead(SGD(model))


def _timm_lookahead(model: nn.Module) -> Optimizer:
    optim = pytest.importorskip("timm.optim")
    return optim.Lookahead(SGD(model), k=3)


def _orthogonal(model: nn.Module) -> Optimizer:
    return Orthogonal(SGD(model))


def _buffered(model: nn.Module) -> Optimizer:
    return Buffered(_in_two_groups(model))


def _step_another(run: Run) -> Iterator[Any]:
    """The loop of the wrapper, with the wrapped optimizer attached."""
    wrapper = Lookahead(run.optimizer)
    for loss in gradient_loops._backward(run):
        wrapper.step()
        yield loss


def _set_attribute(run: Run) -> Iterator[Any]:
    for loss in plain_loop(run):
        run.optimizer.lr *= 0.9  # after step(), as a schedule by hand does
        yield loss


@pytest.mark.parametrize("make", [_lookahead, _timm_lookahead, _orthogonal, _buffered])
def test_optimizers_that_cannot_be_split_are_exact(on_ranks, make: Factory) -> None:
    check_case(Case(model=DeepNet, optimizer=make, pipelined=False), on_ranks)


def test_a_wrapper_around_the_attached_optimizer_is_exact_and_overlaps(on_ranks) -> None:
    check_case(Case(_step_another, model=DeepNet, optimizer=SGD), on_ranks)


def _scaled(model: nn.Module) -> Optimizer:
    return Scaled(model.parameters(), lr=0.1)


def test_settings_kept_as_attributes_are_those_at_step(on_ranks) -> None:
    check_case(Case(_set_attribute, model=DeepNet, optimizer=_scaled), on_ranks)


def _why_it_waits(make: Factory) -> str:
    run = Run(Case(model=DeepNet, optimizer=make), with_dear=True)
    list(plain_loop(run))
    run.detach()
    return " ".join(run.state.stats().fallbacks)


def test_the_reason_names_the_optimizer_to_attach_instead(on_ranks) -> None:
    [reason] = on_ranks(_why_it_waits, 1, _lookahead)
    assert "Attach that one, its .base (SGD)" in reason


def _trace() -> None:
    run = Run(Case(model=DeepNet, optimizer=_lookahead), with_dear=False)
    timer = dx.DdpTimer(run.model, run.optimizer)
    with pytest.raises(TypeError, match="pass the optimizer that it wraps"), timer.trace():
        pass


def test_a_trace_that_would_not_see_its_steps_is_refused(on_ranks) -> None:
    on_ranks(_trace, 1)


class Noisy(OwnOptimizer):
    """Draws from all global generators in `step()`."""

    def update(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        for parameter in parameters:
            parameter.sub_(random.random() * np.random.rand() * torch.rand(()))


def test_the_trial_of_an_optimizer_leaves_global_generators_as_they_are() -> None:
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert "draws random numbers" in str(why_not_separable(Noisy([torch.zeros(2, 2)])))
    assert states == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())


class Multiplying(OwnOptimizer):
    """Multiplies gradients as matrices, as Shampoo does; notes where in memory they begin."""

    def update(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        for p in parameters:
            p.add_(p.grad @ p.grad.t() @ p.grad if p.grad.dim() == 2 else p.grad, alpha=-group["lr"])
            if p.grad.dim() == 2:
                with torch._C.DisableTorchFunction():  # who reads an address must not be deferred, except this test
                    self.state[p]["begins_at"] = torch.tensor(p.grad.data_ptr() % 64)


def multiplying(model: nn.Module) -> Optimizer:
    return Multiplying(model.parameters(), lr=0.01)


def _autocast(run: Run) -> Iterator[Any]:
    """Only forwards, in which updates are applied."""
    for x, y in run.batches():
        run.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = run.loss(run.model(x).float(), y)
        loss.backward()
        run.optimizer.step()
        yield loss


def test_an_update_inside_of_autocast_is_computed_outside_of_it(on_ranks) -> None:
    check_case(Case(_autocast, DeepNet, multiplying), on_ranks)


class InDefaultDtype(OwnOptimizer):
    """Computes in the dtype that torch gives new tensors."""

    def update(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        for p in parameters:
            p.sub_(p.grad * torch.full_like(p, 1 / 3, dtype=torch.get_default_dtype()), alpha=group["lr"])


class OnDefaultDevice(OwnOptimizer):
    """Goes by the device that torch gives new tensors."""

    def update(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        for p in parameters:
            p.sub_(p.grad, alpha=group["lr"] * (2 if torch.get_default_device().type == "meta" else 1))


class EntersAutocast(OwnOptimizer):
    """Multiplies under an autocast of its own, which casts to what is set around it."""

    def update(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        for p in parameters:
            with torch.autocast("cpu"):
                direction = p.grad @ p.grad.t() @ p.grad if p.grad.dim() == 2 else p.grad
            p.add_(direction.float(), alpha=-group["lr"])


class ClosureOutside(Multiplying):
    """Calls its closure outside of autocast."""

    def step(self, closure: Any = None) -> Any:
        with torch.autocast("cpu", enabled=False), torch.enable_grad():
            loss = None if closure is None else closure()
        super().step()
        return loss


class Halving(TorchFunctionMode):
    """Halves what a step adds."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.add_:
            kwargs["alpha"] = kwargs.get("alpha", 1) / 2
        return func(*args, **kwargs)


class Rounding(TorchDispatchMode):
    """Rounds what a step adds to."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out.mul_(64).round_().div_(64) if func.overloadpacket is torch.ops.aten.add_ else out


@contextlib.contextmanager
def _in_fp64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def _steps_inside(context: Callable[[], Any], run: Run) -> Iterator[Any]:
    for loss in until_step(run):
        with context():
            run.optimizer.step()
        yield loss


@contextlib.contextmanager
def _on_meta() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


def _forward_inside(context: Callable[[], Any], run: Run) -> Iterator[Any]:
    for x, y in run.batches():
        run.optimizer.zero_grad()
        with context():
            output = run.model(x)
        loss = run.loss(output.float(), y)
        loss.backward()
        run.optimizer.step()
        yield loss


def _closure_inside(context: Callable[[], Any], run: Run) -> Iterator[Any]:
    for x, y in run.batches():

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            run.optimizer.zero_grad()
            loss = run.loss(run.model(x), y)
            loss.backward()
            return loss

        with context():
            loss = run.optimizer.step(closure)
        yield loss


def _all_in_autocast(run: Run) -> Iterator[Any]:
    for x, y in run.batches():
        with torch.autocast("cpu", torch.bfloat16):
            yield train_step(run, x, y)


# Exact, and deferred if what is set around step() can be set around an update as well.
SURROUNDINGS = {
    "autocast": Case(partial(_steps_inside, partial(torch.autocast, "cpu", torch.bfloat16)), DeepNet, multiplying),
    "autocast everywhere": Case(_all_in_autocast, DeepNet, multiplying),
    "default dtype": Case(partial(_steps_inside, _in_fp64), DeepNet, optimizer(InDefaultDtype)),
    "device": Case(partial(_steps_inside, partial(torch.device, "meta")), DeepNet, optimizer(OnDefaultDevice)),
    "device on shards": Case(
        partial(_steps_inside, partial(torch.device, "meta")),
        DeepNet,
        optimizer(OnDefaultDevice),
        dear={"shard_optimizer": True},
    ),
    "device of forward": Case(partial(_forward_inside, _on_meta), DeepNet, optimizer(OnDefaultDevice)),
    "autocast of forward": Case(
        partial(_forward_inside, partial(torch.autocast, "cpu", torch.float16)), DeepNet, optimizer(EntersAutocast)
    ),
    "autocast, not of the closure": Case(
        partial(_closure_inside, partial(torch.autocast, "cpu", torch.bfloat16)),
        DeepNet,
        optimizer(ClosureOutside, lr=0.01),
    ),
    "inference mode": Case(partial(_steps_inside, torch.inference_mode), DeepNet, pipelined=False),
    "function mode": Case(partial(_steps_inside, Halving), DeepNet, optimizer(OwnOptimizer), pipelined=False),
    "dispatch mode": Case(partial(_steps_inside, Rounding), DeepNet, optimizer(OwnOptimizer), pipelined=False),
}


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_an_update_computes_what_the_surroundings_of_step_make_of_it(name: str, on_ranks) -> None:
    check_case(SURROUNDINGS[name], on_ranks)


class Differentiating(Optimizer):
    """Has autograd differentiate a penalty: its step() is no part of a no_grad() block."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                [of_penalty] = torch.autograd.grad(p.pow(3).sum(), p)
                with torch.no_grad():
                    p.sub_(p.grad + 1e-3 * of_penalty, alpha=group["lr"])


def test_a_step_that_differentiates_is_deferred_exactly(on_ranks) -> None:
    check_case(Case(_begins, DeepNet, optimizer(Differentiating)), on_ranks)


class Checkpointed(nn.Module):
    """Computes some of its activations again in backward, and checks that it saves what it saved in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = DeepNet()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


class Coarse(Checkpointed):
    """Keeps activations in 16 bits."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (t.dtype, t.half()), lambda kept: kept[1].to(kept[0])):
            return self.inner(x)


@pytest.mark.parametrize("model", [Checkpointed, Coarse])
def test_hooks_on_what_forward_saves_see_no_update(model: Callable[[], nn.Module], on_ranks) -> None:
    check_case(Case(_begins, model, optimizer(Differentiating)), on_ranks)


class Slower(OwnOptimizer):
    """Steps half as far."""

    def update(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        for p in parameters:
            p.add_(p.grad, alpha=-group["lr"] / 2)


def _changes_class(run: Run) -> Iterator[Any]:
    for step, (x, y) in enumerate(run.batches()):
        loss = train_step(run, x, y)
        if step == 4:
            run.optimizer.__class__ = Slower
        yield loss


def _half_a_step(self: Optimizer, closure: Any = None) -> None:
    with torch.no_grad():
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] / 2)


def _replaces_step(run: Run) -> Iterator[Any]:
    for step, (x, y) in enumerate(run.batches()):
        loss = train_step(run, x, y)
        if step == 4:
            type(run.optimizer).step = _half_a_step  # type: ignore[method-assign]
        yield loss


def of_a_class_of_its_own(model: nn.Module) -> Optimizer:
    own: type[OwnOptimizer] = type("Own", (OwnOptimizer,), {})
    return own(model.parameters())


@pytest.mark.parametrize(
    "case",
    [
        Case(_changes_class, DeepNet, optimizer(OwnOptimizer), pipelined=False),
        Case(_replaces_step, DeepNet, of_a_class_of_its_own, pipelined=False),
    ],
    ids=["class", "step"],
)
def test_updates_that_are_pending_run_the_code_that_the_optimizer_had(case: Case, on_ranks) -> None:
    check_case(case, on_ranks)


class ByVersion(OwnOptimizer):
    """Steps further with a parameter that has been written to often."""

    def update(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        for p in parameters:
            p.add_(p.grad, alpha=-group["lr"] * (1 + p._version % 3))


def test_an_optimizer_that_reads_versions_of_parameters_waits(on_ranks) -> None:
    check_case(Case(plain_loop, DeepNet, optimizer(ByVersion), pipelined=False), on_ranks)


def _begins(run: Run) -> Iterator[Any]:
    yield from plain_loop(run)
    if run.with_dear:
        assert run.state.stats().deferred_steps > 3


def test_an_optimizer_that_multiplies_gradients_finds_them_where_autograd_puts_them(on_ranks) -> None:
    """BLAS adds up in another order, on some processors, if a matrix begins elsewhere; see the states compared."""
    for world_size in (2, 3):
        case = Case(_begins, DeepNet, multiplying, world_size, pipelined=False)
        check_case(case, on_ranks)
