"""Learning rates, momenta and other settings that a schedule changes: the second half."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, lr_scheduler

from adversary.nets import mlp, mse, train_step
from adversary.script import Script, adversarial


@adversarial(needs=("timm",))
def test_cosine_of_timm_with_noise_by_step_updates(run: Script) -> None:
    from timm.scheduler import CosineLRScheduler

    model, optimizer = run.train(mlp(), AdamW, lr=0.05)
    scheduler = CosineLRScheduler(
        optimizer, t_initial=6, warmup_t=2, warmup_lr_init=1e-3, noise_range_t=4, t_in_epochs=False
    )
    for step, (x, y) in enumerate(run.batches()):
        train_step(model, optimizer, x, y)
        scheduler.step_update(step)
        run.log(optimizer.param_groups[0]["lr"])


@adversarial(three=True)
def test_polynomial_chained_with_constant_and_multiplicative(run: Script) -> None:
    model, optimizer = run.train(mlp(), SGD, lr=0.2, momentum=0.9)
    scheduler = lr_scheduler.ChainedScheduler(
        [
            lr_scheduler.ConstantLR(optimizer, factor=0.3, total_iters=4),
            lr_scheduler.PolynomialLR(optimizer, total_iters=12, power=0.9),
            lr_scheduler.MultiplicativeLR(optimizer, lambda step: 0.95),
        ]
    )
    for x, y in run.batches(12):
        train_step(model, optimizer, x, y)
        scheduler.step()


@adversarial()
def test_schedulers_over_a_tensor_rate(run: Script) -> None:
    model, optimizer = run.train(mlp(), Adam, lr=torch.tensor(0.05))
    scheduler = lr_scheduler.ExponentialLR(optimizer, gamma=0.8)
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        scheduler.step()
        run.log(optimizer.param_groups[0]["lr"])


@adversarial()
def test_rate_is_written_before_backward_and_restored_after_step(run: Script) -> None:
    model, optimizer = run.train(mlp(), SGD, lr=0.1)
    for step, (x, y) in enumerate(run.batches()):
        for group in optimizer.param_groups:
            group["lr"] = 0.2 / (step + 1)
        train_step(model, optimizer, x, y)
        for group in optimizer.param_groups:
            group["lr"] = 1e6


@adversarial()
def test_batch_size_dependent_rate_in_a_step_pre_hook(run: Script) -> None:
    model, optimizer = run.train(mlp(), SGD, lr=0.1)
    size = [1]
    optimizer.register_step_pre_hook(lambda o, *_: o.param_groups[0].update(lr=0.01 * size[0]))
    optimizer.register_step_post_hook(lambda o, *_: o.param_groups[0].update(lr=123.0))
    for step, (x, y) in enumerate(run.batches()):
        size[0] = step + 1
        train_step(model, optimizer, x, y)


@adversarial()
def test_weight_decay_follows_the_rate(run: Script) -> None:
    model, optimizer = run.train(mlp(), AdamW, lr=0.05)
    scheduler = lr_scheduler.LinearLR(optimizer, start_factor=0.2, total_iters=5)
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        scheduler.step()
        for group in optimizer.param_groups:
            group["weight_decay"] = 3 * group["lr"]


@adversarial()
def test_warmup_restarts_when_the_scheduler_is_loaded(run: Script) -> None:
    model, optimizer = run.train(mlp(), SGD, lr=0.1, momentum=0.9)
    scheduler = lr_scheduler.MultiStepLR(optimizer, milestones=[3, 6], gamma=0.3)
    kept = None
    for step, (x, y) in enumerate(run.batches(12)):
        train_step(model, optimizer, x, y)
        scheduler.step()
        if step == 4:
            kept = scheduler.state_dict()
        if step == 8:
            scheduler.load_state_dict(kept)
            optimizer.param_groups[0]["lr"] = scheduler.get_last_lr()[0]


@adversarial()
def test_groups_are_frozen_by_a_rate_of_zero(run: Script) -> None:
    net = mlp()
    model = run.ddp(net)
    optimizer = AdamW([{"params": layer.parameters()} for layer in net if isinstance(layer, nn.Linear)], lr=0.05)
    run.attach(model, optimizer)
    for step, (x, y) in enumerate(run.batches(12)):
        for index, group in enumerate(optimizer.param_groups):
            group["lr"] = 0.05 if step // 4 == index else 0.0
        train_step(model, optimizer, x, y)


@adversarial(needs=("pytorch_warmup",))
def test_pytorch_warmup_dampens_around_the_scheduler(run: Script) -> None:
    import pytorch_warmup

    model, optimizer = run.train(mlp(), AdamW, lr=0.05)
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)
    warmup = pytorch_warmup.UntunedLinearWarmup(optimizer)
    for x, y in run.batches(12):
        train_step(model, optimizer, x, y)
        with warmup.dampening():
            scheduler.step()


@adversarial()
def test_rate_search_on_growing_rates_then_rewind(run: Script) -> None:
    """The rate finder of fastai: grow the rate, then load what was there before."""
    model, optimizer = run.train(mlp(), SGD, lr=1e-3)
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    losses = []
    for step, (x, y) in enumerate(run.batches(12)):
        optimizer.param_groups[0]["lr"] = 1e-3 * math.exp(step / 2)
        losses.append(train_step(model, optimizer, x, y).item())
    model.load_state_dict(weights)
    run.log(losses)
    for x, y in run.batches(4):
        loss = mse(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
