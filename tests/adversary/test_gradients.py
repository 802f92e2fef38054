"""What scripts do to gradients between backward and step, and where they clear them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_value_
from torch.optim import SGD, Adam, AdamW

from adversarial import GRADIENTS_READ, KEPT, Script, adversarial
from adversary.nets import mlp, mse, train_step


@adversarial(fallback=GRADIENTS_READ)
def test_adaptive_gradient_clipping(run: Script) -> None:
    """AGC of NFNets: unit-wise norms of weights and gradients."""

    def unitwise(t: torch.Tensor) -> torch.Tensor:
        return t.norm() if t.ndim <= 1 else t.norm(dim=tuple(range(1, t.ndim)), keepdim=True)

    model, optimizer = run.train(mlp(), SGD, lr=0.1, momentum=0.9)
    for x, y in run.batches():
        optimizer.zero_grad()
        mse(model(x), y).backward()
        for p in model.parameters():
            bound = unitwise(p.detach()).clamp_(min=1e-3) * 0.02
            norm = unitwise(p.grad.detach())
            clipped = p.grad * (bound / norm.clamp(min=1e-6))
            p.grad.detach().copy_(torch.where(norm < bound, p.grad, clipped))
        optimizer.step()


@adversarial(fallback=GRADIENTS_READ)
def test_gradients_are_cleared_between_backward_and_step_by_mistake(run: Script) -> None:
    model, optimizer = run.train(mlp(), AdamW, lr=0.02)
    for step, (x, y) in enumerate(run.batches(10)):
        mse(model(x), y).backward()
        if step % 4 == 3:
            optimizer.zero_grad(set_to_none=step % 8 == 3)
        optimizer.step()
        optimizer.zero_grad()


@adversarial(three=True, fallback=GRADIENTS_READ)
def test_gradients_are_averaged_by_hand_once_more(run: Script) -> None:
    model, optimizer = run.train(mlp(), SGD, lr=0.1)
    for x, y in run.batches():
        optimizer.zero_grad()
        mse(model(x), y).backward()
        for p in model.parameters():
            gathered = [torch.empty_like(p.grad) for _ in range(run.world_size)]
            dist.all_gather(gathered, p.grad)
            p.grad.copy_(torch.stack(gathered).mean(0))
        optimizer.step()


@adversarial(fallback=GRADIENTS_READ)
def test_pcgrad_from_two_backward_passes(run: Script) -> None:
    model, optimizer = run.train(mlp(), SGD, lr=0.1)
    for x, y in run.batches():
        flat = []
        output = model(x)
        losses = [mse(output[:, :2], y[:, :2]), mse(output[:, 2:], y[:, 2:])]
        for number, loss in enumerate(losses):
            optimizer.zero_grad()
            with model.no_sync():
                loss.backward(retain_graph=number == 0)
            flat.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        one, two = flat
        if (inner := torch.dot(one, two)) < 0:
            one = one - inner / two.dot(two) * two
        merged = one + two
        dist.all_reduce(merged)
        offset = 0
        for p in model.parameters():
            p.grad = merged[offset : offset + p.numel()].view_as(p) / run.world_size
            offset += p.numel()
        optimizer.step()
        run.log(inner)


@adversarial(fallback=GRADIENTS_READ)
def test_a_batch_whose_loss_is_nan_is_skipped_after_backward(run: Script) -> None:
    model, optimizer = run.train(mlp(), Adam, lr=0.02)
    for step, (x, y) in enumerate(run.batches(12)):
        optimizer.zero_grad()
        loss = mse(model(x * (float("nan") if step in (5, 8) else 1.0)), y)
        loss.backward()
        if not all(p.grad.isfinite().all() for p in model.parameters()):
            continue
        optimizer.step()


@adversarial()
def test_hooks_on_parameters_scale_and_count(run: Script) -> None:
    net = mlp()
    norms = []
    net[0].weight.register_hook(lambda g: g * 0.5)
    net[2].weight.register_post_accumulate_grad_hook(lambda p: norms.append(p.numel()))
    model, optimizer = run.train(net, SGD, lr=0.1, momentum=0.9)
    for x, y in run.batches():
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()
    run.log(norms)


@adversarial(fallback=KEPT, three=True)
def test_gradients_live_in_one_flat_buffer_of_the_script(run: Script) -> None:
    """As fairseq and apex did it: DDP averages in place, the norm is taken of the buffer."""
    net = mlp()
    model = run.ddp(net, gradient_as_bucket_view=False)
    flat, offset = torch.zeros(sum(p.numel() for p in net.parameters())), 0
    for p in net.parameters():
        p.grad = flat[offset : offset + p.numel()].view_as(p)
        offset += p.numel()
    optimizer = SGD(model.parameters(), lr=0.1)
    run.attach(model, optimizer)
    for x, y in run.batches():
        flat.zero_()
        mse(model(x), y).backward()
        norm = flat.norm()
        flat.mul_(0.2 / norm)
        optimizer.step()
        run.log(norm)


@adversarial(fallback=KEPT)
def test_flat_gradient_buffer_is_set_again_in_each_step(run: Script) -> None:
    net = mlp()
    model = run.ddp(net, gradient_as_bucket_view=False)
    flat = torch.zeros(sum(p.numel() for p in net.parameters()))
    optimizer = SGD(model.parameters(), lr=0.1)
    run.attach(model, optimizer)
    for x, y in run.batches():
        offset = 0
        flat.zero_()
        for p in net.parameters():
            p.grad = flat[offset : offset + p.numel()].view_as(p)
            offset += p.numel()
        mse(model(x), y).backward()
        optimizer.step()
        run.log(flat)


@adversarial(fallback=KEPT, deferred=5)
def test_gradient_of_one_layer_is_watched_through_a_kept_tensor(run: Script) -> None:
    """The script never clears by None and reads the same tensor each step, for a log only."""
    net = mlp()
    model = run.ddp(net, gradient_as_bucket_view=False)
    optimizer = SGD(model.parameters(), lr=0.1)
    run.attach(model, optimizer)
    watched = None
    for x, y in run.batches(10):
        optimizer.zero_grad(set_to_none=False)
        mse(model(x), y).backward()
        if watched is None:
            watched = net[2].weight.grad
        optimizer.step()
        run.log(watched.norm())


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
    for step, (x, y) in enumerate(run.batches()):
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


@adversarial(fallback="")
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
