"""`state.clip_grad_norm_` and `dx.GradScaler` stay right, and hang nowhere, when gradients have been looked at before.

Not only on all ranks: a logger on rank 0 reads gradients that are still on the wire everywhere else. `compare_arms`
holds every step against plain DDP and demands the same bytes on all ranks at the end. Such reads beside the norm 2 and
the scaler are drawn by the fuzzer (`clip`, `scaler`, `gradients_read`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradient_loops as loops
from equivalence import SGD, Case, Run, check_case
from models import INPUTS, OUTPUTS

INFINITY = float("inf")


class TransposedNet(nn.Module):
    """A weight, and so its gradient, whose order in memory is not that of its indices."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, 11)
        self.turned = nn.Parameter((torch.randn(OUTPUTS, 11) / 4).t())
        self.scalar = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.first(x)) @ self.turned * self.scalar


def same_on_all_ranks(norm: torch.Tensor) -> torch.Tensor:
    rows = [torch.empty_like(norm) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, norm)
    assert all(row.isnan() if norm.isnan() else row == norm for row in rows), f"norms differ: {rows}"
    return norm


def log(run: Run, index: int) -> None:
    """On rank 0 only: all gradients, one, or none."""
    if run.rank == 0:
        for parameter in list(run.model.parameters())[: (0, 1, None)[index % 3]]:
            if parameter.grad is not None:
                parameter.grad.norm()


def read_on_one_rank(run: Run, norm_type: float) -> Iterator[Any]:
    for index, loss in enumerate(loops._backward(run)):
        log(run, index)
        norm = run.clip_grad_norm_(loops.ACTIVE_NORM, norm_type)
        run.optimizer.step()
        yield loss, same_on_all_ranks(norm)


def turn_on_one_rank(run: Run) -> Iterator[Any]:
    """The same values in other strides, on rank 0 only: each rank must still answer for its own elements."""
    turned = run.model.module.turned
    for index, loss in enumerate(loops._backward(run)):
        if run.rank == 0 and index >= 4:  # before, the stock function does the work
            turned.grad = turned.grad.contiguous()
        norm = run.clip_grad_norm_(loops.ACTIVE_NORM)
        run.optimizer.step()
        # The stock function adds up in another order on rank 0 then.
        yield loss, same_on_all_ranks(norm) if run.with_dear else norm


def every_micro_batch(run: Run, zero: bool) -> Iterator[Any]:
    """Clips what no rank has shared yet, too: each rank by its own norm."""
    for index, (x, y) in enumerate(run.batches(per_step=3)):
        if index % 3 == 0:
            run.optimizer.zero_grad(set_to_none=not zero)
        with nullcontext() if index % 3 == 2 else run.model.no_sync():
            run.loss(run.model(x), y).backward()
        norm = run.clip_grad_norm_(loops.ACTIVE_NORM)
        if index % 3 == 2:
            run.optimizer.step()
        yield norm


def scaler_in_no_sync(run: Run) -> Iterator[Any]:
    """In every other backward each rank looks for infinities of its own."""
    for index, (x, y) in enumerate(run.batches(per_step=2)):
        scaler = run.grad_scaler(own=True, init_scale=8.0)
        run.optimizer.zero_grad()
        loss = run.loss(run.model(x), y)
        is_shared = index % 2 == 1
        overflows = not is_shared and index % 4 == 2 and run.rank == run.case.world_size - 1
        with nullcontext() if is_shared else run.model.no_sync():
            scaler.scale(loss * (INFINITY if overflows else 1)).backward()
        scaler.unscale_(run.optimizer)
        found = scaler._per_optimizer_states[id(run.optimizer)]["found_inf_per_device"]
        yield loss, {str(device): value.clone() for device, value in found.items()}
        if is_shared:
            scaler.step(run.optimizer)


def clip_after_step(run: Run) -> Iterator[Any]:
    """Too late for the update, which must stay what it is, clipped once before it; `.grad` is clipped all the same."""
    for index, loss in enumerate(loops._backward(run)):
        early = run.clip_grad_norm_(1.0)
        if index % 2:
            log(run, index)
        run.optimizer.step()
        late = run.clip_grad_norm_(loops.ACTIVE_NORM)
        yield loss, early, same_on_all_ranks(late), [p.grad.clone() for p in run.model.parameters()]


def clip_twice(run: Run) -> Iterator[Any]:
    """The second time after a look on rank 0, and first only a part of the parameters is scaled."""
    for index, loss in enumerate(loops._backward(run)):
        norms = [run.clip_grad_norm_(1.0)]
        log(run, index)
        norms.append(run.clip_grad_norm_(loops.ACTIVE_NORM, 1.0))
        run.optimizer.step()
        yield loss, [same_on_all_ranks(norm) for norm in norms]


def clip_between_forward_and_backward(run: Run) -> Iterator[Any]:
    """The gradients of the last step are still there when their updates have been applied."""
    for x, y in run.batches():
        loss = run.loss(run.model(x), y)
        late = run.clip_grad_norm_(loops.ACTIVE_NORM) if run.model.module.scalar.grad is not None else loss
        run.optimizer.zero_grad()
        loss.backward()
        run.clip_grad_norm_(1.0)
        run.optimizer.step()
        yield loss, late


def nan_at_last(run: Run) -> Iterator[Any]:
    """One rank's loss is NaN: so are all gradients, on all ranks, and the norm."""
    for index, (x, y) in enumerate(run.batches()):
        run.optimizer.zero_grad()
        loss = run.loss(run.model(x), y)
        if index == run.case.steps - 2 and run.rank == run.case.world_size - 1:
            loss = loss * float("nan")
        loss.backward()
        log(run, index)
        norm = run.clip_grad_norm_(loops.ACTIVE_NORM)
        run.optimizer.step()
        yield loss, same_on_all_ranks(norm)


LOOPS = {
    "read_on_one_rank_norm_1": partial(read_on_one_rank, norm_type=1.0),
    "read_on_one_rank_max": partial(read_on_one_rank, norm_type=INFINITY),
    "turn_on_one_rank": turn_on_one_rank,
    "every_micro_batch": partial(every_micro_batch, zero=False),
    "every_micro_batch_zero": partial(every_micro_batch, zero=True),
    "scaler_in_no_sync": scaler_in_no_sync,
    "clip_after_step": clip_after_step,
    "clip_twice": clip_twice,
    "clip_between_forward_and_backward": clip_between_forward_and_backward,
    "nan_at_last": nan_at_last,
}


@pytest.mark.parametrize(("world_size", "bucket_view"), [(2, False), (3, True)], ids=["2-copies", "3-bucket_view"])
@pytest.mark.parametrize("name", LOOPS)
def test_own_clipping_and_scaling_of_gradients_that_were_looked_at(on_ranks, name, world_size, bucket_view) -> None:
    case = Case(
        LOOPS[name],
        model=TransposedNet,
        optimizer=SGD,
        world_size=world_size,
        ddp={"gradient_as_bucket_view": bucket_view},
        exact=False,  # a norm adds up in another order than the stock function's
        pipelined=False,  # the reader gives up the overlap
    )
    check_case(case, on_ranks)
