"""Training loops with more, fewer or other forwards than one per step, and readers of parameters."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from equivalence import Run, plain_loop, snapshot, train_step


def several_forwards_per_step(run: Run) -> Iterator[Any]:
    """Three forwards, one backward."""
    for x, y in run.batches():
        run.optimizer.zero_grad()
        loss = sum(run.loss(run.model(x * scale), y) for scale in (1.0, 0.5, 2.0))
        loss.backward()
        run.optimizer.step()
        yield loss


def evaluate_between_steps(run: Run) -> Iterator[Any]:
    """After every step, through DDP and around it: both must see the updated weights."""
    x_eval, _ = run.batch(10_000)
    for x, y in run.batches():
        loss = train_step(run, x, y)
        run.model.eval()
        with torch.no_grad():
            through_ddp = run.model(x_eval)
            around_ddp = run.model.module(x_eval)
        run.model.train()
        yield loss, through_ddp, around_ddp


def evaluate_before_step(run: Run) -> Iterator[Any]:
    """Between backward and step: must see the weights as they were, and disturb nothing in flight."""
    x_eval, _ = run.batch(10_000)
    for x, y in run.batches():
        run.optimizer.zero_grad()
        loss = run.loss(run.model(x), y)
        loss.backward()
        with torch.no_grad():
            output = run.model(x_eval)
        run.optimizer.step()
        yield loss, output


def inference_mode_between_steps(run: Run) -> Iterator[Any]:
    """The pending update is applied inside `inference_mode`, yet must leave normal tensors behind."""
    x_eval, _ = run.batch(10_000)
    for x, y in run.batches():
        loss = train_step(run, x, y)
        with torch.inference_mode():
            output = run.model(x_eval)
        yield loss, output.clone()


def training_forward_without_backward(run: Run) -> Iterator[Any]:
    """With gradients enabled, between two steps, its graph thrown away."""
    for x, y in run.batches():
        loss = train_step(run, x, y)
        yield loss, run.model(x)


def one_layer_alone(run: Run) -> Iterator[Any]:
    """After the step somebody calls one submodule, not the model."""
    for x, y in run.batches():
        loss = train_step(run, x, y)
        with torch.no_grad():
            yield loss, run.model.module.first(x)


def state_dict_after_every_step(run: Run) -> Iterator[Any]:
    """Without `synchronize()`: a state dict is right by itself."""
    for _ in plain_loop(run):
        yield snapshot(run.model.state_dict()), snapshot(run.optimizer_state())


def module_state_dict_after_every_step(run: Run) -> Iterator[Any]:
    """Of the bare module, as most scripts save it, optimizer first."""
    for _ in plain_loop(run):
        optimizer_state = snapshot(run.optimizer_state())
        yield optimizer_state, snapshot(run.model.module.state_dict())


def submodule_state_dict_after_every_step(run: Run) -> Iterator[Any]:
    """Of one layer only."""
    for _ in plain_loop(run):
        yield snapshot(run.model.module.first.state_dict())


def synchronize_and_read(run: Run) -> Iterator[Any]:
    """Raw parameters, read in the way that nothing can intercept, after `synchronize()`."""
    for loss in plain_loop(run):
        run.synchronize()
        yield loss, [p.data.clone() for p in run.model.parameters()]


def read_in_synchronized(run: Run) -> Iterator[Any]:
    """The context manager leaves nothing pending behind: the way to read parameters around a step."""
    for x, y in run.batches():
        run.optimizer.zero_grad()
        loss = run.loss(run.model(x), y)
        loss.backward()
        with run.synchronized():
            run.optimizer.step()
        yield loss, [p.data.clone() for p in run.model.parameters()]


def average_weights(run: Run) -> Iterator[Any]:
    """An exponential moving average of the weights."""
    averaged = AveragedModel(run.model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for loss in plain_loop(run):
        run.synchronize()
        averaged.update_parameters(run.model.module)
        yield loss, snapshot(averaged.state_dict())


def copy_the_module(run: Run) -> Iterator[Any]:
    """`deepcopy(ddp.module)`, as snapshots and averages do it: a model of its own from then on."""
    x_eval, _ = run.batch(10_000)
    copied = None
    for index, loss in enumerate(plain_loop(run)):
        if index % 5 == 3:
            run.synchronize()
            copied = copy.deepcopy(run.model.module)
        # One step later, when the original has an update pending and the copy must not care.
        with torch.no_grad():
            yield loss, None if copied is None else copied(x_eval)


def restore_best_weights(run: Run) -> Iterator[Any]:
    """`load_state_dict` right after `step`: the pending update must not land on the loaded weights."""
    best = copy.deepcopy(run.model.module.state_dict())
    for index, loss in enumerate(plain_loop(run)):
        if index % 7 == 6:
            run.model.module.load_state_dict(best)
        yield loss


def restore_optimizer_state(run: Run) -> Iterator[Any]:
    """The same with the optimizer's state and hyperparameters."""
    saved = None
    for index, loss in enumerate(plain_loop(run)):
        if index == 4:
            saved = copy.deepcopy(run.optimizer_state())
        elif index > 4 and index % 5 == 0:
            run.optimizer.load_state_dict(saved)
        yield loss


def detach_halfway(run: Run) -> Iterator[Any]:
    """The script goes on as plain DDP, right after a step whose update is pending."""
    for index, loss in enumerate(plain_loop(run)):
        if index == run.case.steps // 2:
            run.detach()
        yield loss


def forward_called_by_name(run: Run) -> Iterator[Any]:
    """`ddp.forward(x)` runs none of the hooks that `ddp(x)` runs."""
    for x, y in run.batches():
        run.optimizer.zero_grad()
        loss = run.loss(run.model.forward(x), y)
        loss.backward()
        run.optimizer.step()
        yield loss


def gradients_logged_by_hooks(run: Run) -> Iterator[Any]:
    """Hooks made before attach that look at each rank's own gradient inside backward."""
    seen: list[torch.Tensor] = []
    for p in run.model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    for loss in plain_loop(run):
        yield loss, seen
        seen.clear()


def parameters_written_by_hooks(run: Run) -> Iterator[Any]:
    """Weight decay inside backward."""
    for p in run.model.parameters():
        p.register_post_accumulate_grad_hook(_decay)
    yield from plain_loop(run)


def _decay(p: torch.Tensor) -> None:
    p.data.mul_(0.99)


def two_models_in_turn(run: Run) -> Iterator[Any]:
    """As a GAN: two models, each with its own optimizer and state, the second fed by the first."""
    other = Run(run.case, run.with_dear)
    other.attach()
    for x, y in run.batches():
        other.optimizer.zero_grad()
        other_loss = other.loss(other.model(x), run.model(x).detach())
        other_loss.backward()
        other.optimizer.step()
        loss = train_step(run, x, y)
        yield loss, other_loss
    yield snapshot(other.visible_state())
    other.detach()


def two_models_at_once(run: Run) -> Iterator[Any]:
    """One backward through two models: both have gradients in flight at the same time."""
    other = Run(run.case, run.with_dear)
    other.attach()
    for x, y in run.batches():
        for each in (run, other):
            each.optimizer.zero_grad()
        loss = run.loss(run.model(x), y) + run.loss(other.model(x), -y)
        loss.backward()
        for each in (other, run):
            each.optimizer.step()
        yield loss
    yield snapshot(other.visible_state())
    other.detach()
