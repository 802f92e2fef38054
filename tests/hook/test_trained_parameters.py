"""Which parameters are trained may change at any time: DDP reduces what it was built with, and so do we."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam, Optimizer

import ddp_crossover as dx
from ddp_crossover.torch_internals.ddp import managed_parameters
from equivalence import ADAMW, SGD, Case, Run, assert_same, check_case, plain_loop, run_arm, train_step
from heard import heard
from models import INPUTS, OUTPUTS, DeepNet, OddNet
from plans import AS_BUILT, judged_plans

UNUSED_TOO = {"find_unused_parameters": True}
THAWED_AT = 8


def _freeze(run: Run, *, trained: bool = False) -> None:
    run.model.module.first.requires_grad_(trained)


@dataclass(frozen=True)
class Thawed:
    """A backbone that is frozen once DDP is built, and thawed later."""

    freezes_after_attach: bool = False
    thaws_at: int = THAWED_AT

    def __call__(self, run: Run) -> Iterator[Any]:
        if self.freezes_after_attach:
            run.attach()
        _freeze(run)
        for index, (x, y) in enumerate(run.batches()):
            if index == self.thaws_at:
                _freeze(run, trained=True)
            yield _step(run, x, y)


def _step(run: Run, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """That of every tutorial, in a `batch()` if there are weights."""
    run.optimizer.zero_grad()
    with _weights(run):
        loss = run.loss(run.model(x), y)
        loss.backward()
    run.optimizer.step()
    return loss


def _weights(run: Run) -> AbstractContextManager[None]:
    """The same on all ranks."""
    return run.state.batch(3) if run.state is not None and run.case.dear.get("weighted") else nullcontext()


def _between_micro_batches(run: Run) -> Iterator[Any]:
    """A micro-batch in which only some layers are trained, in steps of two."""
    for index, (x, y) in enumerate(run.batches(per_step=2)):
        _freeze(run, trained=index % 4 != 1)
        with run.model.no_sync() if index % 2 == 0 else nullcontext(), _weights(run):
            loss = run.loss(run.model(x), y)
            loss.backward()
        if index % 2:
            run.optimizer.step()
            run.optimizer.zero_grad(set_to_none=index % 3 == 0)
        yield loss


def _some_layers_at_a_time(run: Run) -> Iterator[Any]:
    """As in LISA: a few layers are trained for two steps each."""
    layers = [module for module in run.model.module if isinstance(module, nn.Linear)]
    for index, (x, y) in enumerate(run.batches()):
        if index % 2 == 0:
            for number, layer in enumerate(layers):
                layer.requires_grad_(number % 3 == index // 2 % 3)
        yield _step(run, x, y)


def _frozen_between_step_and_forward(run: Run) -> Iterator[Any]:
    """While updates are pending."""
    for index, (x, y) in enumerate(run.batches()):
        yield _step(run, x, y)
        _freeze(run, trained=index % 3 == 2)


class Gan(nn.Module):
    """Both nets in one DDP."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Linear(INPUTS, INPUTS)
        self.critic = nn.Sequential(nn.Linear(INPUTS, OUTPUTS), nn.Tanh(), nn.Linear(OUTPUTS, 1))

    def forward(self, x: torch.Tensor, turn: int) -> torch.Tensor:
        fake = self.generator(x)
        if turn == 0:
            return F.softplus(-self.critic(fake)).mean()
        return (F.softplus(-self.critic(x + 1)) + F.softplus(self.critic(fake.detach()))).mean()


def _one_for_each(model: DistributedDataParallel) -> list[Optimizer]:
    return [Adam(net.parameters(), lr=0.01) for net in (model.module.generator, model.module.critic)]


def _toggled(run: Run) -> Iterator[Any]:
    """As Lightning's `toggle_optimizer` does, before attach as well."""
    nets = [run.model.module.generator, run.model.module.critic]
    for index in range(run.case.steps):
        x, _ = run.batch(index)
        for turn, optimizer in enumerate(run.optimizers):
            for number, net in enumerate(nets):
                net.requires_grad_(number == turn)
            if not run.attached:
                run.attach()
            optimizer.zero_grad()
            with _weights(run):
                loss = run.model(x, turn)
                loss.backward()
            optimizer.step()
            yield loss


LOOPS = {
    "frozen before attach": Case(Thawed(), OddNet, ADAMW, ddp=UNUSED_TOO),
    "frozen before the first forward": Case(Thawed(freezes_after_attach=True), OddNet, SGD, ddp=UNUSED_TOO),
    "between micro-batches": Case(
        _between_micro_batches, OddNet, SGD, ddp=UNUSED_TOO | {"gradient_as_bucket_view": True}
    ),
    "some layers at a time": Case(_some_layers_at_a_time, DeepNet, ADAMW, ddp=UNUSED_TOO),
    "after step()": Case(_frozen_between_step_and_forward, OddNet, ADAMW, ddp=UNUSED_TOO),
    "toggled by optimizer": Case(_toggled, Gan, _one_for_each, ddp=UNUSED_TOO),
    "static graph": Case(Thawed(thaws_at=99), OddNet, ADAMW, ddp={"static_graph": True}),
}
ARMS = {
    "default": {},
    "dear": {"schedule": "dear"},
    "allreduce": {"schedule": "allreduce"},
    "sharded": {"shard_optimizer": True},
    "weighted": {"weighted": True},
    "bf16": {"wire_dtype": torch.bfloat16},
    "large buckets": {"fusion_mb": 1.0},
}


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("loop", LOOPS)
def test_what_is_trained_may_change(on_ranks, loop, arm) -> None:
    check_case(replace(LOOPS[loop], dear=ARMS[arm], pipelined=False), on_ranks)


@pytest.mark.parametrize("loop", ["frozen before attach", "toggled by optimizer"])
def test_so_it_may_on_three_ranks(on_ranks, loop) -> None:
    check_case(replace(LOOPS[loop], world_size=3, pipelined=False), on_ranks)


def test_updates_are_deferred_all_the_same(on_ranks) -> None:
    check_case(LOOPS["frozen before attach"], on_ranks)


def _tuned(run: Run) -> Iterator[Any]:
    with judged_plans(AS_BUILT):
        yield from Thawed(thaws_at=100)(run)
    if run.with_dear:
        assert run.state.detached, "DDP was not left alone"


def test_ddp_that_is_left_alone_reduces_what_thaws(on_ranks) -> None:
    dear = {"fusion_mb": None}
    case = Case(_tuned, OddNet, ADAMW, steps=110, dear=dear, ddp=UNUSED_TOO, strict=False, pipelined=False)
    check_case(case, on_ranks)


def _detached_while_frozen(run: Run) -> Iterator[Any]:
    for index, loss in enumerate(Thawed()(run)):
        if index == THAWED_AT - 2:
            run.detach()
        yield loss


def test_what_thaws_after_detach_is_reduced_by_ddp(on_ranks) -> None:
    check_case(replace(LOOPS["frozen before attach"], loop=_detached_while_frozen, pipelined=False), on_ranks)


def _coded(case: Case) -> list[bytes]:
    """Parameters at the end, alike on all ranks."""
    _, seen, _ = run_arm(case, with_dear=True)
    return [value.numpy().tobytes() for value in seen["model"].values()]


@pytest.mark.parametrize("dear", [{"wire_dtype": torch.int8}, {"compress": dx.TopK(0.3)}], ids=["int8", "top-k"])
@pytest.mark.parametrize("loop", ["frozen before attach", "some layers at a time", "toggled by optimizer"])
def test_codes_keep_ranks_together(on_ranks, loop, dear) -> None:
    one, other = on_ranks(_coded, 2, replace(LOOPS[loop], dear=dear, strict=False))
    assert one == other


# Frozen when DDP was built: never reduced, by DDP or by us.


class _Late(OddNet):
    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)


def _thaws(run: Run) -> Iterator[Any]:
    for index, (x, y) in enumerate(run.batches()):
        if index == THAWED_AT:
            _freeze(run, trained=True)
        yield train_step(run, x, y)


def _compare_each_rank(case: Case) -> list[str]:
    expected, expected_state, _ = run_arm(case, with_dear=False)
    with heard() as said:
        seen, seen_state, _ = run_arm(case, with_dear=True)
    assert_same(list(seen.values()), list(expected.values()), "losses")
    assert_same(seen_state, expected_state, "at the end")
    return [line for line in said if "when DistributedDataParallel was built" in line]


@pytest.mark.parametrize("dear", [{}, {"schedule": "allreduce"}], ids=str)
def test_what_was_frozen_when_ddp_was_built_is_not_reduced_and_said(on_ranks, dear) -> None:
    [said], other = on_ranks(_compare_each_rank, 2, Case(_thaws, _Late, SGD, dear=dear, pipelined=False))
    assert "first.weight and 1 more required no gradient" in said and "find_unused_parameters=True" in said
    assert not other


def _weighted() -> str:
    run = Run(Case(model=_Late, dear={"weighted": True}), with_dear=True)
    run.attach()
    try:
        for index in range(10):
            if index == THAWED_AT:
                _freeze(run, trained=True)
            with run.state.batch(3):
                run.loss(run.model(torch.ones(3, INPUTS)), torch.zeros(3, OUTPUTS)).backward()
            run.optimizer.step()
    except RuntimeError as error:
        return str(error)
    finally:
        run.detach()
    return "nothing was noticed"


def test_with_weights_it_is_an_error(on_ranks) -> None:
    for message in on_ranks(_weighted, 2):
        assert "first.weight and 1 more" in message and "are not weighted" in message, message


# What DDP itself says that it reduces.


class _WithParts(OddNet):
    """DDP ignores a parameter of a layer, and does not ignore that of the outermost module, though it is told to."""

    _ddp_params_and_buffers_to_ignore = ("single", "norm.bias")


def _names(model: type[nn.Module], is_attached: bool) -> list[str]:
    module = model()
    module.second.requires_grad_(False)
    ddp = DistributedDataParallel(module, find_unused_parameters=True)
    module.second.requires_grad_(True)
    module.first.requires_grad_(False)
    if is_attached:  # and so with another reducer
        dx.attach(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), fusion_mb=1.0).detach()
    assert not module.first.weight.requires_grad
    return [name for name, _ in managed_parameters(ddp)]


@pytest.mark.parametrize("is_attached", [False, True])
def test_it_is_what_ddp_was_built_with(on_ranks, is_attached) -> None:
    [names] = on_ranks(_names, 1, OddNet, is_attached)
    assert names == ["scalar", "single", "empty", "first.weight", "first.bias", "norm.weight", "norm.bias"]
    [names] = on_ranks(_names, 1, _WithParts, is_attached)
    assert names == ["scalar", "empty", "first.weight", "first.bias", "norm.weight", "single"]


def _refused_for_sparse_gradients() -> str:
    net = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 4), nn.Linear(4, 4))
    net[2].requires_grad_(False)
    ddp = DistributedDataParallel(net)
    try:
        dx.attach(ddp, torch.optim.SGD(net.parameters(), lr=0.1))
    except ValueError as error:
        return str(error)
    return f"not refused: {managed_parameters(ddp)}"


def test_sparse_gradients_beside_what_is_frozen_are_refused_by_name(on_ranks) -> None:
    """Torch cannot show the buckets of these."""
    [message] = on_ranks(_refused_for_sparse_gradients, 1)
    assert "0.weight has sparse gradients" in message


def test_the_invariant_of_all_tests_finds_what_is_lost(on_ranks) -> None:
    """As attach did once: with a reducer for what requires a gradient just then."""
    with pytest.raises(Exception, match=r"DDP was built to reduce \['first.weight', 'first.bias'\], and no bucket had"):
        on_ranks(_loses_what_is_frozen, 2)


def _loses_what_is_frozen() -> None:
    run = Run(LOOPS["frozen before attach"], with_dear=True)
    _freeze(run)
    run.model._remove_autograd_hooks()
    parameters, is_sparse = run.model._build_params_for_reducer()
    names = run.model._build_debug_param_to_name_mapping(parameters)
    run.model._ddp_init_helper(parameters, is_sparse, names, False)
    run.attach()
    list(plain_loop(run))
