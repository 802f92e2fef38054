"""Training loops as people write them: each yields, step by step, what its author would look at."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch

from equivalence import Run, plain_loop, train_step, until_step


def zero_grad_keeping_memory(run: Run) -> Iterator[Any]:
    """`set_to_none=False`: zeroes in place what DDP's buckets may alias."""
    for x, y in run.batches():
        run.optimizer.zero_grad(set_to_none=False)
        loss = run.loss(run.model(x), y)
        loss.backward()
        run.optimizer.step()
        yield loss


def accumulate_with_no_sync(run: Run, first: int = 0, in_place: bool = False) -> Iterator[Any]:
    """Three micro-batches a step, of which only the last communicates, and all before the micro-batch `first`."""
    for index, (x, y) in enumerate(run.batches(per_step=3)):
        last = index % 3 == 2
        with nullcontext() if last or index < first else run.model.no_sync():
            loss = run.loss(run.model(x), y) / 3
            loss.backward()
        if last:
            run.optimizer.step()
            run.optimizer.zero_grad(set_to_none=not (in_place and index % 2))
        yield loss


def accumulate_once_the_graph_is_known(run: Run) -> Iterator[Any]:
    """A static graph is learned in the first backward, which must communicate; later ones need not."""
    return accumulate_with_no_sync(run, first=3, in_place=True)


def every_optimizer_steps(run: Run) -> Iterator[Any]:
    """The plain loop with several optimizers."""
    for loss in until_step(run):
        for each in run.optimizers:
            each.step()
        yield loss


def optimizers_take_turns(run: Run) -> Iterator[Any]:
    """Only one of several optimizers steps; the others' gradients are thrown away."""
    for index, loss in enumerate(until_step(run)):
        run.optimizers[index % len(run.optimizers)].step()
        yield loss


def backward_inside_closure(run: Run) -> Iterator[Any]:
    """As Lightning does it: `step` calls the closure, which calls backward, and returns the loss."""
    for x, y in run.batches():

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            run.optimizer.zero_grad()
            loss = run.loss(run.model(x), y)
            loss.backward()
            return loss

        yield run.optimizer.step(closure)  # type: ignore[arg-type]  # torch says float, and takes tensors


def state_moves_around_closures(run: Run) -> Iterator[Any]:
    """A closure runs forward and backward; the optimizer's state is saved or loaded before it, and inside of it."""
    saved: dict[str, Any] = {}
    for index, (x, y) in enumerate(run.batches()):

        def closure(index: int = index, x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            run.optimizer.zero_grad()
            loss = run.loss(run.model(x), y)
            loss.backward()
            if index == 9:
                torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
            if index in (9, 12):
                run.optimizer.load_state_dict(copy.deepcopy(saved))
            if index == 11:
                run.consolidate()
            return loss

        if index in (5, 6):
            saved.update(copy.deepcopy(run.optimizer_state()))
        if index == 7:
            run.optimizer.load_state_dict(copy.deepcopy(saved))
        if index == 13 and run.state is not None:
            run.state.consolidate(to=0)  # the others go on with what they have
        yield run.optimizer.step(closure)  # type: ignore[arg-type]  # torch says float, and takes tensors


def add_a_param_group(run: Run) -> Iterator[Any]:
    """Gradual unfreezing: parameters get an optimizer in the middle of the run."""
    known = {id(p) for group in run.optimizer.param_groups for p in group["params"]}
    rest = [p for p in run.model.parameters() if id(p) not in known]
    for index, (x, y) in enumerate(run.batches()):
        if index == run.case.steps // 2:
            run.optimizer.add_param_group({"params": rest, "lr": 0.02})
        yield train_step(run, x, y)


def detach_halfway(run: Run) -> Iterator[Any]:
    """The script goes on as plain DDP, right after a step whose update is pending."""
    for index, loss in enumerate(plain_loop(run)):
        if index == run.case.steps // 2:
            run.detach()
        yield loss
