"""Training loops that read, clip, scale or edit gradients between backward and step, or after it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_

from equivalence import Run, until_step

# The tests' losses have gradients of norm 0.3 to 3, so one of these always clips and one never.
ACTIVE_NORM = 0.1
INACTIVE_NORM = 1e4
_backward = until_step  # as it is called in several tests


def clip_norm(run: Run, norm_type: float = 2.0) -> Iterator[Any]:
    """The stock function."""
    for loss in _backward(run):
        norm = clip_grad_norm_(run.model.parameters(), ACTIVE_NORM, norm_type)
        run.optimizer.step()
        yield loss, norm


def clip_norm_on_shards(run: Run, max_norm: float = ACTIVE_NORM, norm_type: float = 2.0) -> Iterator[Any]:
    """Our own, which adds up the norm in another order than the stock one."""
    for loss in _backward(run):
        norm = run.clip_grad_norm_(max_norm, norm_type)
        run.optimizer.step()
        yield loss, norm


def clip_norm_on_shards_inactive(run: Run) -> Iterator[Any]:
    """Our own, with nothing to clip: the coefficient is exactly 1, so no parameter may change."""
    for loss in _backward(run):
        run.clip_grad_norm_(INACTIVE_NORM)
        run.optimizer.step()
        yield loss


def spoil_gradients_after_step(run: Run) -> Iterator[Any]:
    """The step has been asked for: what happens to `.grad` now is too late to matter."""
    for index, loss in enumerate(_backward(run)):
        run.optimizer.step()
        parameters: list[Any] = list(run.model.parameters())
        for p in parameters:
            if index % 2:
                p.grad.fill_(float("nan"))
            else:
                p.grad = None
        yield loss


def inject_inf(run: Run, index: int, loss: torch.Tensor) -> torch.Tensor:
    """Spoil two steps' losses, each on one rank only: all ranks have to skip them."""
    steps = run.case.steps
    spoiled = index in (steps // 2, steps - 2) and run.rank == run.case.world_size - 1
    return loss * float("inf") if spoiled else loss


def scaler(run: Run, own: bool = False, clip: bool = False) -> Iterator[Any]:
    """A GradScaler, stock or ours, over steps of which some overflow and are skipped."""
    grad_scaler = run.grad_scaler(own, init_scale=2.0**10, growth_interval=2)
    for index, (x, y) in enumerate(run.batches()):
        for each in run.optimizers:
            each.zero_grad()
        loss = inject_inf(run, index, run.loss(run.model(x), y))
        grad_scaler.scale(loss).backward()
        if clip:
            for each in run.optimizers:
                grad_scaler.unscale_(each)
            if own:
                run.clip_grad_norm_(INACTIVE_NORM)
            else:
                clip_grad_norm_(run.model.parameters(), ACTIVE_NORM)
        for each in run.optimizers:
            grad_scaler.step(each)
        grad_scaler.update()
        yield loss, grad_scaler.get_scale()


def scaler_with_autocast(run: Run, own: bool = False) -> Iterator[Any]:
    """The recipe of PyTorch's documentation for fp16."""
    grad_scaler = run.grad_scaler(own, init_scale=2.0**6, growth_interval=5)
    for x, y in run.batches():
        run.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = run.loss(run.model(x).float(), y)
        grad_scaler.scale(loss).backward()
        grad_scaler.step(run.optimizer)
        grad_scaler.update()
        yield loss, grad_scaler.get_scale()


def nan_in_one_rank(run: Run) -> Iterator[Any]:
    """Without a scaler NaN and inf go where plain DDP sends them: everywhere."""
    for index, (x, y) in enumerate(run.batches()):
        run.optimizer.zero_grad()
        loss = run.loss(run.model(x), y)
        if index == run.case.steps - 3 and run.rank == run.case.world_size - 1:
            loss = loss * float("nan")
        loss.backward()
        run.optimizer.step()
        yield loss


def inf_in_one_parameter(run: Run) -> Iterator[Any]:
    """An infinite gradient of one parameter on one rank, of which only that parameter suffers."""
    weight = run.model.module.second.weight
    steps_seen: list[int] = []

    def overflow_once(gradient: torch.Tensor) -> torch.Tensor:
        steps_seen.append(0)
        late = len(steps_seen) == run.case.steps
        return gradient * float("inf") if late and run.rank == 0 else gradient

    weight.register_hook(overflow_once)
    for loss in _backward(run):
        run.optimizer.step()
        yield loss
