"""Parameters frozen, thawed, left out or used now and then around the time of `attach`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_crossover as dx
from equivalence import SGD, Case, Run, check_case, plain_loop, snapshot, train_step
from loops import accumulate_without_no_sync, zero_grad_keeping_memory
from models import DeepNet, OddNet
from wirings import SkippingNet


@pytest.mark.parametrize("loop", [zero_grad_keeping_memory, accumulate_without_no_sync])
@pytest.mark.parametrize("model", [DeepNet, SkippingNet])
@pytest.mark.parametrize("view", [True, False])
def test_kept_gradients_with_find_unused_parameters_are_reduced(on_ranks, loop, model, view) -> None:
    ddp = {"find_unused_parameters": True, "gradient_as_bucket_view": view}
    check_case(Case(loop, model=model, optimizer=SGD, ddp=ddp, pipelined=False), on_ranks)


def _read_a_submodule(run: Run) -> Iterator[Any]:
    part = next(m for m in run.model.module.children() if list(m.parameters()))
    for loss in plain_loop(run):
        yield loss, [snapshot(p) for p in part.parameters()], snapshot(dict(part.named_parameters()))


def _clamp_by_apply(run: Run) -> Iterator[Any]:
    for loss in plain_loop(run):
        run.model.module.apply(_clamp)
        yield loss


@torch.no_grad()
def _clamp(module: nn.Module) -> None:
    for p in module.parameters(recurse=False):
        p.clamp_(-0.3, 0.3)


@pytest.mark.parametrize("loop", [_read_a_submodule, _clamp_by_apply])
def test_methods_that_hand_out_parameters_are_right_on_every_module(on_ranks, loop) -> None:
    check_case(Case(loop, model=DeepNet, pipelined=False), on_ranks)


def _freeze_late(thaw: bool) -> str:
    model = OddNet()
    last = list(model.parameters())[-1]
    last.requires_grad_(not thaw)
    # Buckets so small that attach leaves DDP's reducer alone: a new one would see what attach sees.
    ddp = DistributedDataParallel(model, find_unused_parameters=True, bucket_cap_mb=0.5)
    last.requires_grad_(thaw)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    state = dx.attach(ddp, optimizer, fusion_mb=1.0)
    run = Run(Case(), with_dear=False)
    try:
        for index in range(4):
            x, y = run.batch(index)
            run.loss(ddp(x), y).backward()
    except RuntimeError as error:
        return str(error)
    finally:
        state.detach()
    return "nothing was noticed"


@pytest.mark.parametrize("thaw", [True, False])
def test_what_ddp_and_attach_saw_differently_is_named(on_ranks, thaw) -> None:
    [message] = on_ranks(_freeze_late, 1, thaw)
    assert "before building DistributedDataParallel" in message


def _skip_a_frozen_head(run: Run) -> Iterator[Any]:
    run.attach()
    for index in range(run.case.steps):
        if index == 5:
            for p in run.model.module.layers[0].parameters():
                p.requires_grad_(False)
        x, y = run.batch(index)
        loss = train_step(run, x, y)
        yield loss


def test_freezing_what_is_skipped_is_exact(on_ranks) -> None:
    ddp = {"find_unused_parameters": True}
    check_case(Case(_skip_a_frozen_head, model=SkippingNet, optimizer=SGD, ddp=ddp, pipelined=False), on_ranks)


@pytest.mark.parametrize("words", ["TorchScript", "weight is complex"])
def test_modules_without_a_way_through_are_refused(on_ranks, words) -> None:
    [message] = on_ranks(_refusal_of, 1, words)
    assert words in message


def _refusal_of(words: str) -> str:
    model = _Complex() if "complex" in words else nn.Sequential(torch.jit.script(nn.Linear(3, 3)))
    ddp = DistributedDataParallel(model)
    try:
        dx.attach(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1))
    except ValueError as error:
        return str(error)
    return "not refused"


class _Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.complex64))
