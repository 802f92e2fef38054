"""Learning rates, momenta and other settings that a schedule changes."""

from __future__ import annotations

import math

import torch
from torch.optim import SGD, Adam, AdamW, lr_scheduler

from adversarial import GRADIENTS_READ, Script, adversarial
from adversary.nets import mlp, mse, train_step


@adversarial(three=True)
def test_warmup_by_lambda_then_cosine_in_sequence(run: Script) -> None:
    model, optimizer = run.train(mlp(), AdamW, lr=0.05)
    warmup = lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 5)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
    scheduler = lr_scheduler.SequentialLR(optimizer, [warmup, cosine], milestones=[5])
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        scheduler.step()
        run.log(scheduler.get_last_lr())


@adversarial()
def test_reduce_on_plateau_with_the_mean_loss_of_all_ranks(run: Script) -> None:
    import torch.distributed as dist

    model, optimizer = run.train(mlp(), SGD, lr=0.3, momentum=0.9)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.2)
    for x, y in run.batches():
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
    for step, (x, y) in enumerate(run.batches()):
        train_step(model, optimizer, x, y)
        scheduler.step()
        if step % 4 == 3:
            optimizer.state = defaultdict(dict)


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


@adversarial(needs=("pytorch_warmup",))
def test_pytorch_warmup_dampens_around_the_scheduler(run: Script) -> None:
    import pytorch_warmup

    model, optimizer = run.train(mlp(), AdamW, lr=0.05)
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)
    warmup = pytorch_warmup.UntunedLinearWarmup(optimizer)
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        with warmup.dampening():
            scheduler.step()


@adversarial()
def test_rate_search_on_growing_rates_then_rewind(run: Script) -> None:
    """The rate finder of fastai: grow the rate, then load what was there before."""
    model, optimizer = run.train(mlp(), SGD, lr=1e-3)
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    losses = []
    for step, (x, y) in enumerate(run.batches()):
        optimizer.param_groups[0]["lr"] = 1e-3 * math.exp(step / 2)
        losses.append(train_step(model, optimizer, x, y).item())
    model.load_state_dict(weights)
    run.log(losses)
    for x, y in run.batches(4):
        loss = mse(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
