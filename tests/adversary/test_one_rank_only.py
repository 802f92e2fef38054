"""`if rank == 0:` and other things that ranks do differently."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam

from adversarial import GRADIENTS_READ, Script, adversarial
from adversary.nets import mlp, mse, train_step


@adversarial(fallback=GRADIENTS_READ, three=True)
def test_ranks_edit_their_gradients_differently_and_drift_apart(run: Script) -> None:
    model, optimizer = run.train(mlp(), SGD, lr=0.1)
    for x, y in run.batches():
        optimizer.zero_grad()
        mse(model(x), y).backward()
        if run.rank == 1:
            clip_grad_norm_(model.parameters(), 0.05)
        else:
            for p in model.parameters():
                p.grad.add_(torch.randn_like(p.grad), alpha=0.01)
        optimizer.step()


@adversarial()
def test_ranks_have_rates_of_their_own_and_one_perturbs_its_weights(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, SGD, lr=0.1)
    optimizer.param_groups[0]["lr"] = 0.1 * (run.rank + 1)
    for step, (x, y) in enumerate(run.batches()):
        run.log(train_step(model, optimizer, x, y))
        if run.rank == 1 and step % 3 == 2:
            with torch.no_grad():
                net[2].weight.add_(0.01)


@adversarial(cases={what: what for what in ("skips", "steps_twice", "clears")}, fallback="")
def test_one_rank_steps_otherwise(run: Script, case: str) -> None:
    model, optimizer = run.train(mlp(), SGD, lr=0.1, momentum=0.9)
    for step, (x, y) in enumerate(run.batches()):
        optimizer.zero_grad()
        mse(model(x), y).backward()
        is_odd = run.rank == 1 and step % 3 == 2
        if is_odd and case == "clears":
            optimizer.zero_grad()
        if not (is_odd and case == "skips"):
            optimizer.step()
        if is_odd and case == "steps_twice":
            optimizer.step()


@adversarial(fallback="")
def test_optimizer_has_its_parameters_in_another_order_on_each_rank(run: Script) -> None:
    model = run.ddp(mlp())
    params = list(model.parameters())
    optimizer = SGD(params if run.rank == 0 else params[::-1], lr=0.1, momentum=0.9)
    run.attach(model, optimizer)
    for x, y in run.batches():
        run.log(train_step(model, optimizer, x, y))


@adversarial(fallback="")
def test_ranks_freeze_different_layers_in_mid_run(run: Script) -> None:
    net = mlp()
    model = run.ddp(net, find_unused_parameters=True)
    optimizer = Adam(model.parameters(), lr=0.03)
    run.attach(model, optimizer)
    for step, (x, y) in enumerate(run.batches()):
        net[0].requires_grad_(step < 6 or run.rank == 0)
        net[2].requires_grad_(step < 6 or run.rank == 1)
        run.log(train_step(model, optimizer, x, y))


class EitherOrder(nn.Module):
    """Calls its layers in an order that is given."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, swap: bool) -> torch.Tensor:
        first, second = (self.two, self.one) if swap else (self.one, self.two)
        return self.head(second(first(x).tanh()).tanh())


@adversarial()
def test_ranks_use_layers_in_different_orders(run: Script) -> None:
    model, optimizer = run.train(EitherOrder(), Adam, lr=0.03)
    for step, (x, y) in enumerate(run.batches()):
        optimizer.zero_grad()
        loss = mse(model(x, (step + run.rank) % 2 == 0), y)
        loss.backward()
        optimizer.step()
        run.log(loss)
