"""Learning rates, momenta and other settings that a schedule changes."""

from __future__ import annotations

import torch
from torch.optim import SGD, Adam, AdamW, lr_scheduler

from adversary.nets import mlp, mse, train_step
from adversary.script import GRADIENTS_READ, Script, adversarial


@adversarial(three=True)
def test_warmup_by_lambda_then_cosine_in_sequence(run: Script) -> None:
    model, optimizer = run.train(mlp(), AdamW, lr=0.05)
    warmup = lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 5)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
    scheduler = lr_scheduler.SequentialLR(optimizer, [warmup, cosine], milestones=[5])
    for x, y in run.batches(12):
        train_step(model, optimizer, x, y)
        scheduler.step()
        run.log(scheduler.get_last_lr())


@adversarial()
def test_one_cycle_with_cycled_momentum(run: Script) -> None:
    model, optimizer = run.train(mlp(), SGD, lr=0.05, momentum=0.9)
    scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=12)
    for x, y in run.batches(12):
        train_step(model, optimizer, x, y)
        scheduler.step()


@adversarial()
def test_one_cycle_with_cycled_betas_of_adam(run: Script) -> None:
    model, optimizer = run.train(mlp(), Adam, lr=0.05)
    scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=12, three_phase=True)
    for x, y in run.batches(12):
        scheduler_first = train_step(model, optimizer, x, y)
        scheduler.step()
        run.log(scheduler_first, optimizer.param_groups[0]["betas"])


@adversarial()
def test_reduce_on_plateau_with_the_mean_loss_of_all_ranks(run: Script) -> None:
    import torch.distributed as dist

    model, optimizer = run.train(mlp(), SGD, lr=0.3, momentum=0.9)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.2)
    for x, y in run.batches(12):
        loss = train_step(model, optimizer, x, y).detach()
        dist.all_reduce(loss)
        scheduler.step(loss)
        run.log(scheduler.get_last_lr())


@adversarial()
def test_scheduler_steps_before_the_optimizer(run: Script) -> None:
    """The old order, of which torch warns."""
    model, optimizer = run.train(mlp(), SGD, lr=0.1)
    scheduler = lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.7)
    for x, y in run.batches():
        scheduler.step()
        train_step(model, optimizer, x, y)


@adversarial()
def test_layerwise_decay_of_rates_with_a_lambda_for_each_group(run: Script) -> None:
    net = mlp()
    model = run.ddp(net)
    groups = [{"params": net[i].parameters(), "lr": 0.05 * 0.7**i} for i in (0, 2, 4)]
    optimizer = AdamW(groups, lr=0.01)
    run.attach(model, optimizer)
    lambdas = [lambda step, i=i: 1.0 / (1 + i * step) for i in range(3)]
    scheduler = lr_scheduler.LambdaLR(optimizer, lambdas)
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        scheduler.step()


@adversarial()
def test_triangular_rates_and_momentum(run: Script) -> None:
    model, optimizer = run.train(mlp(), SGD, lr=0.01, momentum=0.9)
    scheduler = lr_scheduler.CyclicLR(optimizer, 0.01, 0.2, step_size_up=2, mode="triangular2")
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        scheduler.step()


@adversarial(fallback=GRADIENTS_READ)
def test_rate_from_the_norm_of_the_gradient(run: Script) -> None:
    model, optimizer = run.train(mlp(), SGD, lr=0.1)
    for x, y in run.batches():
        optimizer.zero_grad()
        mse(model(x), y).backward()
        norm = torch.norm(torch.stack([p.grad.norm() for p in model.parameters()]))
        optimizer.param_groups[0]["lr"] = 0.1 / (1.0 + norm.item())
        optimizer.step()


@adversarial()
def test_warmup_of_a_fresh_optimizer_after_each_cycle(run: Script) -> None:
    """Warm restarts that forget the state of the optimizer."""
    from collections import defaultdict

    model, optimizer = run.train(mlp(), Adam, lr=0.05)
    scheduler = lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=4)
    for step, (x, y) in enumerate(run.batches(13)):
        train_step(model, optimizer, x, y)
        scheduler.step()
        if step % 4 == 3:
            optimizer.state = defaultdict(dict)
