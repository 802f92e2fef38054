"""What scripts do that keep gradients, or memory behind them, over a backward."""

from __future__ import annotations

import torch
from torch.optim import SGD, Adam

from adversarial import KEPT, STEPS, Script, adversarial
from adversary.nets import fit, mlp, mse


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters()]


def attached(run: Script, view: bool) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = run.ddp(mlp(), gradient_as_bucket_view=view)
    optimizer = SGD(model.parameters(), lr=0.1)
    run.attach(model, optimizer)
    return model, optimizer


def accumulate_and_keep(run: Script, view: bool) -> None:
    """The list is made in the first micro-batch, of local gradients, and read at the end of the window."""
    model, optimizer = attached(run, view)
    kept: list[torch.Tensor] = []
    for index, (x, y) in enumerate(run.batches(3 * STEPS)):
        if index % 3 == 2:
            mse(model(x), y).backward()
            optimizer.step()
            run.log(kept, [g.norm() for g in gradients(model)])
            optimizer.zero_grad()
        else:
            with model.no_sync():
                mse(model(x), y).backward()
            if index % 3 == 0:
                kept = gradients(model)


@adversarial(fallback=KEPT, deferred=0)
def test_gradients_of_the_first_micro_batch_are_kept(run: Script) -> None:
    accumulate_and_keep(run, view=False)


@adversarial()
def test_gradients_of_the_first_micro_batch_are_kept_and_then_views(run: Script) -> None:
    """The bucket is not in the memory that the script keeps: that one stays local."""
    accumulate_and_keep(run, view=True)


def read_late(run: Script, view: bool, set_to_none: bool) -> None:
    """After step, after zero_grad, after the next forward, and after its backward."""
    model = run.ddp(mlp(), gradient_as_bucket_view=view)
    optimizer = Adam(model.parameters(), lr=0.02)
    run.attach(model, optimizer)
    kept: list[torch.Tensor] = []
    for step, (x, y) in enumerate(run.batches()):
        optimizer.zero_grad(set_to_none=set_to_none)
        if step % 4 == 0:
            run.log(kept)
        loss = mse(model(x), y)
        if step % 4 == 1:
            run.log(kept)
        loss.backward()
        if step % 4 == 2:
            run.log(kept)
        kept = gradients(model)
        optimizer.step()
        if step % 4 == 3:
            run.log(kept)


@adversarial()
def test_kept_gradients_are_read_at_all_times(run: Script) -> None:
    read_late(run, view=False, set_to_none=True)


@adversarial(fallback="")
def test_kept_gradients_are_zeroed_and_read_at_all_times(run: Script) -> None:
    read_late(run, view=False, set_to_none=False)


@adversarial(cases={"dropped": True, "zeroed": False}, fallback=KEPT)
def test_kept_gradients_that_are_views_are_read_at_all_times(run: Script, case: bool) -> None:
    read_late(run, view=True, set_to_none=case)


def keep_a_view(run: Script, view: bool) -> None:
    model, optimizer = attached(run, view)
    rows = None
    for step, (x, y) in enumerate(run.batches()):
        optimizer.zero_grad(set_to_none=False)
        mse(model(x), y).backward()
        if step == 6:
            rows = model.module[2].weight.grad[1:3]
        optimizer.step()
        if rows is not None:
            run.log(rows)


@adversarial(fallback=KEPT, deferred=6)
def test_only_rows_of_one_gradient_are_kept(run: Script) -> None:
    keep_a_view(run, view=False)


@adversarial(fallback=KEPT)
def test_only_rows_of_one_gradient_that_is_a_view_are_kept(run: Script) -> None:
    """They might be of any gradient in the bucket."""
    keep_a_view(run, view=True)


def keep_over_one_step(run: Script, view: bool) -> None:
    """After it steps are deferred again."""
    model, optimizer = attached(run, view)
    kept = []
    for step, (x, y) in enumerate(run.batches(16)):
        optimizer.zero_grad(set_to_none=view)
        mse(model(x), y).backward()
        run.log(kept)
        kept = [g if view else g.numpy() for g in gradients(model)] if step == 8 else []
        optimizer.step()


@adversarial(fallback=KEPT, deferred=6)
def test_gradients_are_kept_over_one_step_as_a_numpy_array(run: Script) -> None:
    keep_over_one_step(run, view=False)


@adversarial(fallback=KEPT, deferred=8)
def test_gradients_that_are_views_are_kept_over_one_step(run: Script) -> None:
    keep_over_one_step(run, view=True)


class Joined(torch.nn.Module):
    """The gradients of what it concatenates are parts of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = torch.nn.ParameterList([torch.randn(2, 8) / 4 for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ torch.cat(list(self.parts)).t())


@adversarial()
def test_gradients_that_are_parts_of_one_tensor_are_deferred(run: Script) -> None:
    model = run.ddp(Joined(), gradient_as_bucket_view=False)
    optimizer = SGD(model.parameters(), lr=0.1)
    run.attach(model, optimizer)
    fit(run, model, optimizer)
