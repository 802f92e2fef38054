"""`if rank == 0:` and other things that ranks do differently."""

from __future__ import annotations

import copy
import io
import threading
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam

from adversarial import GRADIENTS_READ, Script, adversarial
from adversary.nets import mlp, mse, train_step


@adversarial(three=True)
def test_rank_zero_evaluates_and_saves(run: Script) -> None:
    model, optimizer = run.train(mlp(), Adam, lr=0.03)
    for step, (x, y) in enumerate(run.batches()):
        train_step(model, optimizer, x, y)
        if run.rank == 0 and step % 2:
            with torch.no_grad():
                run.log(model.module(x))
            run.log(copy.deepcopy(model.module.state_dict()), copy.deepcopy(optimizer.state_dict()))


@adversarial(three=True, fallback="")
def test_rank_zero_logs_norms_of_gradients_before_step(run: Script) -> None:
    model, optimizer = run.train(mlp(), Adam, lr=0.03)
    for x, y in run.batches():
        optimizer.zero_grad()
        mse(model(x), y).backward()
        if run.rank == 0:
            run.log([p.grad.norm() for p in model.parameters()])
        optimizer.step()


@adversarial()
def test_last_rank_keeps_the_average(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, SGD, lr=0.1)
    shadow = [p.detach().clone() for p in net.parameters()]
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        if run.rank == run.world_size - 1:
            with torch.no_grad():
                for s, p in zip(shadow, net.parameters(), strict=True):
                    s.lerp_(p, 0.1)
    run.log(shadow)


@adversarial(fallback=GRADIENTS_READ)
def test_every_rank_adds_noise_of_its_own_and_weights_drift_apart(run: Script) -> None:
    model, optimizer = run.train(mlp(), SGD, lr=0.1)
    for x, y in run.batches():
        optimizer.zero_grad()
        mse(model(x), y).backward()
        for p in model.parameters():
            p.grad.add_(torch.randn_like(p.grad), alpha=0.01)
        optimizer.step()


@adversarial()
def test_every_rank_has_a_rate_of_its_own(run: Script) -> None:
    model = run.ddp(mlp())
    optimizer = SGD(model.parameters(), lr=0.1)
    run.attach(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.1 * (run.rank + 1)
    for x, y in run.batches():
        run.log(train_step(model, optimizer, x, y))


@adversarial()
def test_weights_are_perturbed_on_one_rank_only(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, Adam, lr=0.03)
    for step, (x, y) in enumerate(run.batches()):
        run.log(train_step(model, optimizer, x, y))
        if run.rank == 1 and step % 3 == 2:
            with torch.no_grad():
                net[2].weight.add_(0.01)


@adversarial(three=True)
def test_slow_rank_and_a_rank_that_reads_at_once(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, Adam, lr=0.03)
    for step, (x, y) in enumerate(run.batches()):
        if run.rank == step % run.world_size:
            time.sleep(0.02)
        train_step(model, optimizer, x, y)
        if run.rank == (step + 1) % run.world_size:
            run.log(net[0].weight.sum(), net[4].bias)


@adversarial(fallback="")
def test_one_rank_keeps_views_of_its_weights(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, Adam, lr=0.03)
    views = [p.data for p in net.parameters()] if run.rank == 0 else []
    for x, y in run.batches():
        run.log(train_step(model, optimizer, x, y))
        run.log([v.sum() for v in views])


@adversarial(refused="DisagreementError: .*differs from rank 0 in its setup")
def test_optimizer_has_its_parameters_in_another_order_on_each_rank(run: Script) -> None:
    model = run.ddp(mlp())
    params = list(model.parameters())
    optimizer = SGD(params if run.rank == 0 else params[::-1], lr=0.1)
    run.attach(model, optimizer)
    for x, y in run.batches():
        train_step(model, optimizer, x, y)


@adversarial(three=True)
def test_batches_of_very_different_size(run: Script) -> None:
    model, optimizer = run.train(nn.Sequential(mlp(), nn.LayerNorm(4)), Adam, lr=0.03)
    for x, y in run.batches():
        x, y = x.repeat(1 + 40 * run.rank, 1), y.repeat(1 + 40 * run.rank, 1)
        run.log(train_step(model, optimizer, x, y))


@adversarial(three=True)
def test_rank_zero_reads_gradients_after_step(run: Script) -> None:
    model, optimizer = run.train(mlp(), Adam, lr=0.03)
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        if run.rank == 0:
            run.log({n: p.grad.norm() for n, p in model.named_parameters()})


@adversarial(three=True, fallback="")
def test_one_rank_clips_by_accident(run: Script) -> None:
    """A bug of the script: only rank 1 clips, so the weights drift apart."""
    model, optimizer = run.train(mlp(), SGD, lr=0.1)
    for x, y in run.batches():
        optimizer.zero_grad()
        mse(model(x), y).backward()
        if run.rank == 1:
            clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()


@adversarial(fallback="")
def test_one_rank_skips_its_step(run: Script) -> None:
    model, optimizer = run.train(mlp(), SGD, lr=0.1, momentum=0.9)
    for step, (x, y) in enumerate(run.batches()):
        optimizer.zero_grad()
        mse(model(x), y).backward()
        if run.rank == 0 or step % 3:
            optimizer.step()


@adversarial(fallback="")
def test_one_rank_steps_twice(run: Script) -> None:
    model, optimizer = run.train(mlp(), SGD, lr=0.1, momentum=0.9)
    for step, (x, y) in enumerate(run.batches()):
        train_step(model, optimizer, x, y)
        if run.rank == 1 and step % 3 == 2:
            optimizer.step()


@adversarial(fallback="")
def test_one_rank_clears_its_gradients_before_step(run: Script) -> None:
    model, optimizer = run.train(mlp(), SGD, lr=0.1, momentum=0.9)
    for step, (x, y) in enumerate(run.batches()):
        mse(model(x), y).backward()
        if run.rank == 1 and step % 4 == 3:
            optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()


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


@adversarial(three=True)
def test_rank_zero_saves_in_a_thread_while_the_others_go_on(run: Script) -> None:
    model, optimizer = run.train(mlp(), Adam, lr=0.03)
    sizes: list[int] = []

    def save() -> None:
        file = io.BytesIO()
        torch.save((model.module.state_dict(), optimizer.state_dict()), file)
        sizes.append(len(file.getvalue()))

    for x, y in run.batches():
        run.log(train_step(model, optimizer, x, y))
        if run.rank == 0:
            thread = threading.Thread(target=save)
            thread.start()
            thread.join()
    run.log(len(sizes))


@adversarial()
def test_rank_zero_decides_when_to_stop(run: Script) -> None:
    model, optimizer = run.train(mlp(), Adam, lr=0.05)
    best = float("inf")
    for step, (x, y) in enumerate(run.batches(30)):
        run.log(train_step(model, optimizer, x, y))
        stop = torch.zeros(1)
        if run.rank == 0 and step >= 8:
            with torch.no_grad():
                loss = mse(model.module(torch.ones(4, 8)), torch.zeros(4, 4)).item()
            stop.fill_(loss > best * 1.2)
            best = min(best, loss)
        dist.broadcast(stop, 0)
        if stop:
            break


@adversarial()
def test_ranks_evaluate_different_numbers_of_batches(run: Script) -> None:
    model, optimizer = run.train(nn.Sequential(mlp(), nn.LayerNorm(4)), Adam, lr=0.03)
    for step, (x, y) in enumerate(run.batches()):
        train_step(model, optimizer, x, y)
        with torch.inference_mode():
            for _ in range((step + run.rank) % 3):
                run.log(model.module(x))


@adversarial()
def test_ranks_run_different_branches_of_one_layer(run: Script) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor, swap: bool) -> torch.Tensor:
            first, second = (self.two, self.one) if swap else (self.one, self.two)
            return self.head(second(first(x).tanh()).tanh())

    model, optimizer = run.train(Net(), Adam, lr=0.03)
    for step, (x, y) in enumerate(run.batches()):
        optimizer.zero_grad()
        loss = mse(model(x, (step + run.rank) % 2 == 0), y)
        loss.backward()
        optimizer.step()
        run.log(loss)
