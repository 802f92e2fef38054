"""What scripts do to gradients between backward and step: the second half."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import SGD, Adam, AdamW

from adversary.nets import mlp, mse, train_step
from adversary.script import GRADIENTS_READ, KEPT, Script, adversarial


@adversarial(fallback=GRADIENTS_READ)
def test_clip_per_layer_and_without_foreach(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, AdamW, lr=0.02)
    for x, y in run.batches():
        optimizer.zero_grad()
        mse(model(x), y).backward()
        for layer in net:
            if isinstance(layer, nn.Linear):
                run.log(clip_grad_norm_(layer.parameters(), 0.1, norm_type=float("inf"), foreach=False))
        optimizer.step()


@adversarial(fallback=GRADIENTS_READ, three=True)
def test_total_norm_first_then_scale_by_it(run: Script) -> None:
    from torch.nn.utils import clip_grads_with_norm_, get_total_norm

    net = mlp()
    model, optimizer = run.train(net, SGD, lr=0.1)
    for x, y in run.batches():
        optimizer.zero_grad()
        mse(model(x), y).backward()
        norm = get_total_norm([p.grad for p in net.parameters()])
        clip_grads_with_norm_(net.parameters(), 0.2, norm)
        optimizer.step()
        run.log(norm)


@adversarial(fallback="")
def test_only_the_head_is_clipped(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, SGD, lr=0.1, momentum=0.9)
    for x, y in run.batches():
        optimizer.zero_grad()
        mse(model(x), y).backward()
        clip_grad_norm_(net[4].parameters(), 0.05)
        optimizer.step()


@adversarial()
def test_own_grad_scaler_of_the_package(run: Script) -> None:
    """The way out that the README names, beside torch's scaler."""
    model, optimizer = run.train(mlp(), Adam, lr=0.02)
    if run.with_dear:
        import ddp_crossover

        scaler: Any = ddp_crossover.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
    else:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
    for step, (x, y) in enumerate(run.batches(14)):
        optimizer.zero_grad()
        loss = mse(model(x), y) * (float("inf") if step == 7 and run.rank == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        run.log(scaler.get_scale())


@adversarial(fallback="")
def test_scaler_without_unscale_over_two_optimizers(run: Script) -> None:
    net = mlp()
    model = run.ddp(net)
    one, two = Adam(net[0].parameters(), lr=0.02), SGD([*net[2].parameters(), *net[4].parameters()], lr=0.1)
    run.attach(model, one, two)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    for step, (x, y) in enumerate(run.batches(12)):
        model.zero_grad()
        scaler.scale(mse(model(x), y) * (float("inf") if step == 7 else 1.0)).backward()
        scaler.step(one)
        scaler.step(two)
        scaler.update()


@adversarial()
def test_accumulation_with_windows_that_grow(run: Script) -> None:
    from contextlib import nullcontext

    model, optimizer = run.train(mlp(), SGD, lr=0.1, momentum=0.9)
    window, filled = 1, 0
    for x, y in run.batches(40):
        filled += 1
        last = filled == window
        with nullcontext() if last else model.no_sync():
            (mse(model(x), y) / window).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
            window, filled = window % 4 + 1, 0


@adversarial(deferred=0, fallback="")
def test_accumulation_that_synchronizes_first_and_not_last(run: Script) -> None:
    """The wrong way round: what comes after the synchronized pass stays local."""
    model, optimizer = run.train(mlp(), SGD, lr=0.1)
    for index, (x, y) in enumerate(run.batches(20)):
        if index % 2 == 0:
            mse(model(x), y).backward()
        else:
            with model.no_sync():
                mse(model(x), y).backward()
            if index % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()


@adversarial()
def test_zero_grad_before_backward_but_after_forward(run: Script) -> None:
    model, optimizer = run.train(mlp(), Adam, lr=0.02)
    for x, y in run.batches():
        loss = mse(model(x), y)
        model.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss)


@adversarial(fallback="")
def test_gradients_of_the_last_step_are_kept_as_momentum_by_hand(run: Script) -> None:
    model, optimizer = run.train(mlp(), SGD, lr=0.05)
    before: list[torch.Tensor] | None = None
    for x, y in run.batches():
        optimizer.zero_grad()
        mse(model(x), y).backward()
        if before is not None:
            for p, b in zip(model.parameters(), before, strict=True):
                p.grad.add_(b, alpha=0.5)
        before = [p.grad for p in model.parameters()]
        optimizer.step()


def held_gradients(run: Script, view: bool) -> None:
    model = run.ddp(mlp(), gradient_as_bucket_view=view)
    optimizer = SGD(model.parameters(), lr=0.1)
    run.attach(model, optimizer)
    held: list[list[torch.Tensor]] = []
    for x, y in run.batches():
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()
        held.append([p.grad for p in model.parameters()])
        if len(held) > 2:
            run.log(held[-2])
    run.log(held)


@adversarial(fallback="")
def test_gradients_are_kept_by_reference_and_read_a_step_later(run: Script) -> None:
    held_gradients(run, view=False)


@adversarial(fallback=KEPT)
def test_gradients_that_are_views_are_kept_by_reference_and_read_a_step_later(run: Script) -> None:
    """Then the old ones show the gradients of the last step."""
    held_gradients(run, view=True)


def listed_gradients(run: Script, view: bool, when: int) -> None:
    model = run.ddp(mlp(), gradient_as_bucket_view=view)
    optimizer = SGD(model.parameters(), lr=0.1)
    run.attach(model, optimizer)
    listed: list[torch.Tensor] = []
    for step, (x, y) in enumerate(run.batches(12)):
        optimizer.zero_grad(set_to_none=False)
        mse(model(x), y).backward()
        if step == when:
            listed = [p.grad for p in model.parameters()]
        for g in listed:
            g.clamp_(-0.05, 0.05)
        optimizer.step()
        run.log([g.norm() for g in listed])


@adversarial(fallback=KEPT)
def test_gradients_are_listed_once_and_clipped_through_the_list(run: Script) -> None:
    listed_gradients(run, view=False, when=0)


@adversarial(fallback="")
def test_gradients_that_are_views_are_listed_once_and_clipped_through_the_list(run: Script) -> None:
    listed_gradients(run, view=True, when=0)


@adversarial(fallback="")
def test_gradients_are_listed_late_and_clipped_through_the_list(run: Script) -> None:
    listed_gradients(run, view=False, when=6)


@adversarial(fallback=KEPT)
def test_gradients_that_are_views_are_listed_late_and_clipped_through_the_list(run: Script) -> None:
    listed_gradients(run, view=True, when=6)


@adversarial(fallback=GRADIENTS_READ)
def test_gradients_are_swapped_between_two_layers(run: Script) -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    model, optimizer = run.train(net, SGD, lr=0.1)
    for x, y in run.batches():
        optimizer.zero_grad()
        mse(model(x), y).backward()
        net[0].weight.grad, net[2].weight.grad = net[2].weight.grad, net[0].weight.grad
        optimizer.step()


@adversarial(fallback=GRADIENTS_READ, three=True)
def test_top_k_sparsification_with_error_feedback(run: Script) -> None:
    model, optimizer = run.train(mlp(), SGD, lr=0.1)
    residual = [torch.zeros_like(p) for p in model.parameters()]
    for x, y in run.batches():
        optimizer.zero_grad()
        mse(model(x), y).backward()
        for p, r in zip(model.parameters(), residual, strict=True):
            total = p.grad + r
            bound = total.abs().flatten().kthvalue(max(1, total.numel() * 3 // 4)).values
            p.grad = torch.where(total.abs() >= bound, total, 0.0)
            r.copy_(total - p.grad)
        optimizer.step()


@adversarial(fallback="")
def test_gradnorm_weights_of_tasks_from_gradients_of_the_trunk(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, Adam, lr=0.02)
    weights = torch.ones(2)
    for x, y in run.batches():
        optimizer.zero_grad()
        out = model(x)
        losses = [mse(out[:, :2], y[:, :2]), mse(out[:, 2:], y[:, 2:])]
        norms = [torch.autograd.grad(loss, net[4].weight, retain_graph=True)[0].norm() for loss in losses]
        ratio = torch.stack(norms)
        dist.all_reduce(ratio)
        weights = 2 * (1 / ratio) / (1 / ratio).sum()
        sum(w * loss for w, loss in zip(weights, losses, strict=True)).backward()
        optimizer.step()
        run.log(weights)


@adversarial()
def test_only_some_gradients_are_dropped_before_step(run: Script) -> None:
    """Those parameters are skipped, without decay and momentum."""
    net = mlp()
    model, optimizer = run.train(net, AdamW, lr=0.03, weight_decay=0.1)
    for step, (x, y) in enumerate(run.batches(12)):
        optimizer.zero_grad()
        mse(model(x), y).backward()
        if step % 3 == 2:
            for p in net[2].parameters():
                p.grad = None
        optimizer.step()


@adversarial()
def test_is_the_gradient_there(run: Script) -> None:
    """Looks that need no value: None or not, shape, dtype."""
    model, optimizer = run.train(mlp(), Adam, lr=0.03)
    for x, y in run.batches():
        run.log([p.grad is None for p in model.parameters()])
        mse(model(x), y).backward()
        run.log([(p.grad is not None, p.grad.shape, p.grad.dtype, p.grad.numel()) for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()


@adversarial(fallback="")
def test_detach_and_zero_in_place_the_old_way(run: Script) -> None:
    model = run.ddp(mlp(), gradient_as_bucket_view=False)
    optimizer = Adam(model.parameters(), lr=0.03)
    run.attach(model, optimizer)
    for x, y in run.batches():
        for p in model.parameters():
            if p.grad is not None:
                p.grad.detach_()
                p.grad.zero_()
        mse(model(x), y).backward()
        optimizer.step()


@adversarial(fallback=f"{GRADIENTS_READ}|{KEPT}")
def test_sign_of_the_majority_by_hand(run: Script) -> None:
    model, optimizer = run.train(mlp(), SGD, lr=0.01)
    for x, y in run.batches():
        optimizer.zero_grad()
        mse(model(x), y).backward()
        clip_grad_value_(model.parameters(), 1.0)
        for p in model.parameters():
            p.grad.data = p.grad.data.sign()
        run.log(train_step.__name__)
        optimizer.step()
