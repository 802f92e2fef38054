"""What cannot be sharded is refused, at attach or in the step that asks for it, and the message names the way out."""

from __future__ import annotations

import copy
import functools
import logging
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

import ddp_crossover as dx
from ddp_crossover.addons.shards.by_element import why_not_by_element, why_not_shared
from harness import run_faulty_ranks, run_ranks
from models import INPUTS, OddNet
from own_optimizers import BeginsForAll, CountsInAttribute, OwnOptimizer

pytestmark = pytest.mark.launches


class Twisted(OwnOptimizer):
    """An optimizer of one function, which gets it, a parameter, its gradient and its group."""

    twist: Callable[..., None]

    def update(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        for p in parameters:
            self.twist(p, p.grad, group)


def twisted(function: Callable[..., None]) -> type[Twisted]:
    return type("Twisted", (Twisted,), {"twist": function})


def plain(self, p, grad, group) -> None:
    p.add_(grad, alpha=-group["lr"])


def every_ten_steps(self, p, grad, group) -> None:
    state = self.state[p]
    state["n"] = state.get("n", 0) + 1
    p.add_(grad / grad.norm() if state["n"] % 10 == 0 else grad, alpha=-group["lr"])


def skips_zeros(self, p, grad, group) -> None:
    if grad.any():
        p.mul_(0.99).add_(grad, alpha=-group["lr"])


def skips_nans(self, p, grad, group) -> None:
    if grad.isfinite().all():
        p.add_(grad, alpha=-group["lr"])


def decays_matrices(self, p, grad, group) -> None:
    if group["wd"] and p.dim() > 1:
        p.mul_(1 - group["wd"])
    p.add_(grad, alpha=-group["lr"])


def counts(self, p, grad, group) -> None:
    self.state["all"] = {"steps": 1}
    plain(self, p, grad, group)


def keeps_a_dict(self, p, grad, group) -> None:
    self.state[p]["more"] = {"a": 1}
    plain(self, p, grad, group)


def votes(self, p, grad, group) -> None:
    dist.all_reduce(grad.sign())
    raise AssertionError("a collective has run in a trial")


def decays_gradients(self, p, grad, group) -> None:
    p.add_(grad.add_(p, alpha=0.1), alpha=-group["lr"])


@pytest.mark.parametrize("function", [every_ten_steps, skips_zeros, skips_nans])
def test_what_looks_at_whole_tensors_gets_whole_tensors(function) -> None:
    assert why_not_by_element(twisted(function)(OddNet().parameters())) is not None
    assert why_not_by_element(twisted(plain)(OddNet().parameters())) is None


def test_state_that_cannot_travel() -> None:
    assert "under 'all'" in (why_not_shared(twisted(counts)(OddNet().parameters())) or "")
    assert "dict in 'more'" in (why_not_shared(twisted(keeps_a_dict)(OddNet().parameters())) or "")
    optimizer = AdamW(OddNet().parameters())
    assert why_not_shared(optimizer) is None
    optimizer.state[optimizer.param_groups[0]["params"][0]]["more"] = [1.0]
    assert "list in 'more'" in (why_not_shared(optimizer) or "")


class _CountsAbsences(OwnOptimizer):
    """Counts for each parameter that has been updated how often it had no gradient."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for p in self.param_groups[0]["params"]:
            if p.grad is None and self.state[p]:
                self.state[p]["absences"] += 1
        return super().step(closure)

    def update(self, group: dict[str, Any], parameters: list[Any]) -> None:
        for p in parameters:
            p.add_(p.grad, alpha=-group["lr"] / (1 + self.state[p].setdefault("absences", 0)))


@pytest.mark.parametrize("kind", [BeginsForAll, _CountsAbsences])
def test_state_of_parameters_without_gradients_is_not_shared(kind: type[OwnOptimizer]) -> None:
    assert "that have no gradient" in (why_not_shared(kind(OddNet().parameters())) or "")
    assert why_not_shared(CountsInAttribute(OddNet().parameters())) is None


def _model() -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(OddNet())


def _refusals() -> None:
    def refused(match: str, make: Callable[[DistributedDataParallel], Any], **options: Any) -> None:
        ddp = _model()
        with pytest.raises((ValueError, TypeError), match=match):
            dx.attach(ddp, make(ddp), shard_optimizer=True, **options)

    parameters = OddNet.parameters
    refused("leave out one of them", lambda ddp: SGD(ddp.parameters(), 0.1), schedule="allreduce")
    refused("has two optimizers", lambda ddp: [SGD(ddp.parameters(), 0.1), SGD(ddp.parameters(), 0.1)])
    refused("does not reduce", lambda ddp: SGD([*ddp.parameters(), nn.Parameter(torch.zeros(2))], 0.1))
    refused("under 'all'", lambda ddp: twisted(counts)(ddp.parameters()))
    refused("communicates with the other ranks", lambda ddp: twisted(votes)(ddp.parameters()))
    refused("changes gradients", lambda ddp: twisted(decays_gradients)(ddp.parameters()))
    refused("LBFGS", lambda ddp: optim.LBFGS(ddp.parameters()))
    refused("whole layers", lambda ddp: type("Own", (dx.optim.LARS,), {})(ddp.parameters(), lr=0.1))
    ddp = _model()
    next(parameters(ddp)).scale = 2.0
    with pytest.raises(ValueError, match="attributes"):
        dx.attach(ddp, twisted(plain)(ddp.parameters()), shard_optimizer=True)


def test_refused_at_attach() -> None:
    run_ranks(_refusals, 2)


def _settings_of_later() -> None:
    ddp = _model()
    optimizer = twisted(decays_matrices)(ddp.parameters(), wd=0.0)
    dx.attach(ddp, optimizer, shard_optimizer=True)

    def step() -> None:
        optimizer.zero_grad()
        ddp(torch.randn(3, INPUTS)).sum().backward()
        optimizer.step()

    for _ in range(5):
        step()
    optimizer.param_groups[0]["wd"] = 0.1
    with pytest.raises(RuntimeError, match="with the settings that it has now"):
        step()
    optimizer.param_groups[0]["wd"] = 0.0
    step()
    next(ddp.module.parameters()).scale = 2.0
    with pytest.raises(RuntimeError, match="attributes"):
        step()


class _GoesUpFirst(OwnOptimizer):
    """Computes gradients where a first update has led, as SAM does."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if closure is not None:
            with torch.enable_grad():
                closure()
            super().step()
        return super().step(closure)


def _closure_called_twice() -> None:
    ddp = _model()
    optimizer = _GoesUpFirst(ddp.parameters())
    dx.attach(ddp, optimizer, shard_optimizer=True)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = ddp(torch.randn(3, INPUTS)).sum()
        loss.backward()
        return loss

    for _ in range(4):
        closure()
        optimizer.step()
    before = [p.detach().clone() for p in ddp.parameters()]
    with pytest.raises(RuntimeError, match="does not call exactly once"):
        optimizer.step(closure)
    assert all(torch.equal(p, then) for p, then in zip(ddp.parameters(), before, strict=True))


def test_a_step_that_calls_its_closure_twice_is_refused_before_it_trains() -> None:
    run_ranks(_closure_called_twice, 2)


def _memory_of_two_parameters() -> None:
    net = nn.Sequential(nn.Linear(INPUTS, INPUTS), nn.Linear(INPUTS, INPUTS))
    own = net[1].weight.data
    net[1].weight.data = net[0].weight.data
    ddp = DistributedDataParallel(net)
    optimizer = optim.AdamW(ddp.parameters())
    with pytest.raises(ValueError, match="overlap in memory"):
        dx.attach(ddp, optimizer, shard_optimizer=True)
    net[1].weight.data = own
    state = dx.attach(ddp, optimizer, shard_optimizer=True)
    for step in range(6):
        optimizer.zero_grad()
        ddp(torch.randn(3, INPUTS)).sum().backward()
        if step != 3:
            optimizer.step()
            continue
        net[1].weight.data = net[0].weight.data
        with pytest.raises(RuntimeError, match="overlap in memory"):
            optimizer.step()
        net[1].weight.data = own
    state.detach()


def test_parameters_that_share_memory_are_refused_for_as_long_as_they_do() -> None:
    run_ranks(_memory_of_two_parameters, 2)


def _state_that_a_script_adds_to() -> None:
    ddp = _model()
    optimizer = AdamW(ddp.parameters(), lr=0.1)
    state = dx.attach(ddp, optimizer, shard_optimizer=True)

    def step() -> None:
        optimizer.zero_grad()
        ddp(torch.randn(3, INPUTS)).sum().backward()
        optimizer.step()

    step()
    state.consolidate()
    deep: Any = functools.reduce(lambda inner, _: [inner], range(2000), 1.0)
    optimizer.state[next(ddp.parameters())]["more"] = deep
    with pytest.raises(RuntimeError, match="cannot update shards, because its state holds a list in 'more'"):
        step()


def test_state_that_a_script_adds_to_is_refused_before_it_has_to_travel() -> None:
    run_ranks(_state_that_a_script_adds_to, 2)


def _state_of_another_optimizer() -> None:
    """Shards would be copies of what plain DDP's optimizers share."""
    models = [_model(), _model()]
    optimizers = [AdamW(ddp.parameters(), lr=0.1) for ddp in models]
    states = [
        dx.attach(ddp, optimizer, shard_optimizer=True) for ddp, optimizer in zip(models, optimizers, strict=True)
    ]

    def step() -> None:
        for ddp, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            ddp(torch.randn(3, INPUTS)).sum().backward()
            optimizer.step()

    step()
    for state in states:
        state.consolidate()
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    with pytest.raises(RuntimeError, match="another optimizer has a part of its state"):
        step()
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    step()
    for state in states:
        state.detach()


def test_two_optimizers_that_share_their_state_are_refused() -> None:
    run_ranks(_state_of_another_optimizer, 2)


def test_refused_in_a_step() -> None:
    run_ranks(_settings_of_later, 2)


class _NotesLate(OwnOptimizer):
    """Sets a flag, each update to the same, in no step that a trial would see."""

    noted = False

    def update(self, group: dict[str, Any], parameters: list[Any]) -> None:
        super().update(group, parameters)
        for p in parameters:
            self.state[p]["steps"] = steps = self.state[p].get("steps", 0) + 1
            if steps == 16:
                self.noted = True


def _notes_late() -> tuple[str, int]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ddp_crossover").addHandler(handler)
    ddp = _model()
    optimizer = _NotesLate(ddp.parameters())
    state = dx.attach(ddp, optimizer, shard_optimizer=True, fusion_mb=1e-4)
    for _ in range(15):
        optimizer.zero_grad()
        ddp(torch.randn(3, INPUTS)).sum().backward()
        optimizer.step()
    assert state.plan is not None and len(state.plan.groups) > 1
    with pytest.raises(RuntimeError) as error:
        for _ in range(2):
            optimizer.zero_grad()
            ddp(torch.randn(3, INPUTS)).sum().backward()
            optimizer.step()
    return str(error.value), sum("All ranks raise an error" in line for line in said)


def test_a_flag_that_shards_cannot_note_is_an_error_and_one_line_in_the_log() -> None:
    for message, lines in run_ranks(_notes_late, 2):
        assert "change '.noted', which belongs to no parameter, and shards" in message
        assert lines == 1


def _one_rank_reads() -> str:
    ddp = _model()
    optimizer = AdamW(ddp.parameters())
    dx.attach(ddp, optimizer, shard_optimizer=True, fusion_mb=1e-3)
    try:
        for index in range(8):
            optimizer.zero_grad()
            ddp(torch.randn(3, INPUTS)).sum().backward()
            optimizer.step()
            if index == 6 and dist.get_rank() == 0:
                next(ddp.parameters()).grad.norm()
    except dx.LegError as error:
        return str(error)
    return ""


def test_one_rank_that_reads_gradients_after_the_step_gets_an_error() -> None:
    reader, _ = run_faulty_ranks(_one_rank_reads, 2, group_timeout_s=5)
    assert reader.error is not None or "gradients" in reader.result


def _one_rank_forks() -> str:
    ddp = _model()
    optimizer = AdamW(ddp.parameters())
    dx.attach(ddp, optimizer, shard_optimizer=True, fusion_mb=1e-3)
    for index in range(8):
        ddp(torch.randn(3, INPUTS)).sum().backward()
        optimizer.step()
        if index == 6 and dist.get_rank() == 0 and not (child := os.fork()):
            try:
                next(ddp.parameters()).grad.norm()
            except RuntimeError as error:
                os._exit(7 if "shard_optimizer=True" in str(error) else 1)
            os._exit(0)
        optimizer.zero_grad()
    return str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])) if dist.get_rank() == 0 else ""


def test_one_rank_may_fork_after_the_step() -> None:
    # As a DataLoader does. The child cannot ask the other ranks for gradients, and must not wait for them.
    assert run_ranks(_one_rank_forks, 2, have_children=True) == ["7", ""]
