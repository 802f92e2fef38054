"""`attach` takes what frameworks hand out, and says what to pass where it cannot. tests/recipes trains with them."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import ConstantLR

from ddp_crossover.hook.unwrapping import unwrapped_model, unwrapped_optimizer
from models import INPUTS, OddNet

pytestmark = pytest.mark.launches


def _sgd() -> SGD:
    return SGD(OddNet().parameters(), lr=0.1)


def _of_accelerate(inside: Optimizer, scaler: torch.amp.GradScaler | None = None) -> Any:
    pytest.importorskip("accelerate")
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer

    Accelerator(cpu=True)  # it has no optimizers without their global state
    return AcceleratedOptimizer(inside, scaler=scaler)


def _of_lightning(inside: Optimizer) -> Any:
    pytest.importorskip("lightning")
    from lightning.pytorch.core.optimizer import LightningOptimizer

    return LightningOptimizer(inside)


def _of_fabric(inside: Optimizer) -> Any:
    pytest.importorskip("lightning")
    from lightning.fabric.strategies import SingleDeviceStrategy
    from lightning.fabric.wrappers import _FabricOptimizer

    return _FabricOptimizer(inside, SingleDeviceStrategy())


@pytest.mark.parametrize("wrap", [lambda inside: inside, _of_accelerate, _of_lightning, _of_fabric])
def test_the_optimizer_inside(wrap: Callable[[Optimizer], Any]) -> None:
    optimizer = _sgd()
    assert unwrapped_optimizer(wrap(optimizer)) is optimizer


class Lookalike(Optimizer):
    """Wraps an optimizer and does something of its own: its step() is not that of the optimizer inside."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer.param_groups, {})
        self.optimizer = optimizer


def test_an_optimizer_that_does_more_than_the_one_inside_is_left_whole() -> None:
    lookalike = Lookalike(_sgd())
    assert unwrapped_optimizer(lookalike) is lookalike


class OptimWrapper:
    """As MMEngine has it: no Optimizer, but it holds one."""

    def __init__(self) -> None:
        self.optimizer = _sgd()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ConstantLR(_sgd()), r"a ConstantLR, not .* pass its \.optimizer, a SGD"),
        (OptimWrapper, r"an? OptimWrapper, not .* pass its \.optimizer, a SGD"),
        (lambda: {"optimizer": _sgd()}, "a dict, not a torch.optim.Optimizer: pass the optimizer"),
        (lambda: None, "a NoneType, not a torch.optim.Optimizer: pass the optimizer"),
    ],
)
def test_what_holds_no_optimizer_is_refused_by_name(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        unwrapped_optimizer(make())


def _compiled(ddp: DistributedDataParallel) -> Any:
    return torch.compile(ddp, backend="eager")


def _fabric_module(ddp: DistributedDataParallel) -> Any:
    from lightning.fabric.strategies import SingleDeviceStrategy
    from lightning.fabric.wrappers import _FabricModule

    return _FabricModule(ddp, SingleDeviceStrategy(), ddp.module)


def _compiled_fabric_module(ddp: DistributedDataParallel) -> Any:
    return _fabric_module(_compiled(ddp))


def _finds_ddp_inside(wrap: Callable[[DistributedDataParallel], Any]) -> bool:
    ddp = DistributedDataParallel(OddNet())
    return unwrapped_model(wrap(ddp)) is ddp


@pytest.mark.parametrize("wrap", [_compiled, _fabric_module, _compiled_fabric_module])
def test_the_ddp_object_inside(on_ranks, wrap: Callable[[DistributedDataParallel], Any]) -> None:
    if wrap is not _compiled:
        pytest.importorskip("lightning")
    assert on_ranks(_finds_ddp_inside, 1, wrap) == [True]


class Holder(nn.Module):
    """A user's own module around DDP."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net


class Trainer:
    """As Hugging Face's before `train()`: it has wrapped nothing yet."""

    model_wrapped = OddNet()


def _lightning_module() -> Any:
    from lightning import LightningModule

    return LightningModule()


def _refusal(make: Callable[[], Any]) -> str:
    try:
        unwrapped_model(make())
    except TypeError as error:
        return str(error)
    return "not refused"


def _holder_of_ddp() -> nn.Module:
    return Holder(DistributedDataParallel(OddNet()))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (OddNet, r"got OddNet: wrap the model first, .* rather than ddp\.module"),
        (_holder_of_ddp, r"got Holder: pass its \.net, which is one"),
        (Trainer, r"got Trainer: .*integrations\.transformers\.DearCallback"),
        (_lightning_module, r"got LightningModule: .*integrations\.lightning\.DearCallback"),
    ],
)
def test_what_holds_no_ddp_object_is_refused_by_name(on_ranks, make: Callable[[], Any], message: str) -> None:
    if make is _lightning_module:
        pytest.importorskip("lightning")
    (said,) = on_ranks(_refusal, 1, make)
    assert re.search(message, said), said


def _train(attached: bool) -> list[torch.Tensor]:
    import ddp_crossover as dx

    torch.manual_seed(3)
    model = torch.compile(DistributedDataParallel(OddNet()), backend="eager")
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = dx.attach(model, optimizer, fusion_mb=1e-4, strict=True) if attached else None
    for step in range(10):
        optimizer.zero_grad()
        model(torch.full((3, INPUTS), float(step + dist.get_rank()))).square().mean().backward()
        optimizer.step()
    if state is not None:
        assert state.stats().overlapped_steps > 0 or state.stats().pipelined_iterations > 0, state.stats()
    return copy.deepcopy(list(model.state_dict().values()))


def _train_with_accelerate(attached: bool) -> list[torch.Tensor]:
    """Accumulate, scale, and have one step skipped, in the way of an Accelerator with mixed_precision="fp16"."""
    import ddp_crossover as dx

    torch.manual_seed(3)
    ddp = DistributedDataParallel(OddNet())
    inside = SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    optimizer = _of_accelerate(inside, scaler)
    scheduler = ConstantLR(inside, factor=0.5, total_iters=6)
    state = dx.attach(ddp, optimizer, fusion_mb=1e-4, strict=True) if attached else None
    skipped = []
    for step in range(16):
        is_last = step % 2 == 1
        optimizer.gradient_state._set_sync_gradients(is_last)
        x = torch.full((3, INPUTS), float("inf") if step == 13 else 0.1 * step + dist.get_rank())
        with nullcontext() if is_last else ddp.no_sync():
            scaler.scale(ddp(x).square().mean()).backward()
        optimizer.step()
        if is_last:
            scheduler.step()
            skipped.append(optimizer.step_was_skipped)
        optimizer.zero_grad()
    assert skipped == [False] * 6 + [True, False]
    if state is not None:
        assert state.stats().pipelined_iterations > 0, state.stats()
    return copy.deepcopy([*ddp.state_dict().values(), *(inside.state[p]["momentum_buffer"] for p in ddp.parameters())])


def _same_as_plain(train: Callable[[bool], list[torch.Tensor]] = _train) -> bool:
    return all(torch.equal(ours, plain) for ours, plain in zip(train(True), train(False), strict=True))


@pytest.mark.quick
def test_attach_takes_a_compiled_ddp_object(on_ranks) -> None:
    assert on_ranks(_same_as_plain, 2) == [True, True]


def test_accelerates_optimizer_steps_and_skips_as_with_plain_ddp(on_ranks) -> None:
    pytest.importorskip("accelerate")
    assert on_ranks(_same_as_plain, 2, _train_with_accelerate) == [True, True]
