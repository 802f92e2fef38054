"""What scripts do to gradients between backward and step, and where they clear them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import SGD, Adam, AdamW

from adversary.nets import mlp, mse
from adversary.script import GRADIENTS_READ, KEPT, Script, adversarial


@adversarial(three=True, fallback=GRADIENTS_READ)
def test_clip_by_norm_then_by_value(run: Script) -> None:
    model, optimizer = run.train(mlp(), AdamW, lr=0.02)
    for x, y in run.batches():
        optimizer.zero_grad()
        mse(model(x), y).backward()
        run.log(clip_grad_norm_(model.parameters(), 0.3))
        clip_grad_value_(model.parameters(), 0.05)
        optimizer.step()


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
def test_gradient_noise_from_the_global_generator(run: Script) -> None:
    model, optimizer = run.train(mlp(), Adam, lr=0.02)
    torch.manual_seed(5)
    for step, (x, y) in enumerate(run.batches()):
        optimizer.zero_grad()
        mse(model(x), y).backward()
        for p in model.parameters():
            p.grad += torch.randn_like(p.grad) * (0.01 / (1 + step) ** 0.55)
        optimizer.step()


@adversarial(fallback=GRADIENTS_READ)
def test_gradient_centralization_replaces_grad(run: Script) -> None:
    model, optimizer = run.train(mlp(), SGD, lr=0.1, momentum=0.9, nesterov=True)
    for x, y in run.batches():
        optimizer.zero_grad()
        mse(model(x), y).backward()
        for p in model.parameters():
            if p.grad.dim() > 1:
                p.grad = p.grad - p.grad.mean(dim=1, keepdim=True)
        optimizer.step()


@adversarial(three=True)
def test_accumulation_with_no_sync_and_an_uneven_last_window(run: Script) -> None:
    model, optimizer = run.train(mlp(), Adam, lr=0.02)
    batches = list(run.batches(23))
    for index, (x, y) in enumerate(batches):
        last = index == len(batches) - 1
        if (index + 1) % 3 == 0 or last:
            (mse(model(x), y) / 3).backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            with model.no_sync():
                (mse(model(x), y) / 3).backward()


@adversarial(deferred=3)
def test_accumulation_without_no_sync(run: Script) -> None:
    model, optimizer = run.train(mlp(), Adam, lr=0.02)
    for index, (x, y) in enumerate(run.batches(16)):
        (mse(model(x), y) / 2).backward()
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()


@adversarial()
def test_zero_grad_keeps_zeros(run: Script) -> None:
    model, optimizer = run.train(mlp(), SGD, lr=0.1, momentum=0.9)
    for x, y in run.batches():
        optimizer.zero_grad(set_to_none=False)
        mse(model(x), y).backward()
        optimizer.step()
        run.log([p.grad.sum() for p in model.parameters()])


@adversarial()
def test_gradients_are_never_cleared(run: Script) -> None:
    model, optimizer = run.train(mlp(), SGD, lr=0.01)
    for x, y in run.batches():
        mse(model(x), y).backward()
        optimizer.step()


@adversarial(fallback=GRADIENTS_READ)
def test_gradients_are_cleared_between_backward_and_step_by_mistake(run: Script) -> None:
    model, optimizer = run.train(mlp(), AdamW, lr=0.02)
    for step, (x, y) in enumerate(run.batches()):
        mse(model(x), y).backward()
        if step % 4 == 3:
            optimizer.zero_grad(set_to_none=step % 8 == 3)
        optimizer.step()
        optimizer.zero_grad()


@adversarial()
def test_gradients_are_read_after_step_and_set_to_none_by_hand(run: Script) -> None:
    model, optimizer = run.train(mlp(), Adam, lr=0.02)
    for x, y in run.batches():
        mse(model(x), y).backward()
        optimizer.step()
        run.log({n: p.grad.norm() for n, p in model.named_parameters()})
        for p in model.parameters():
            p.grad = None


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
def test_grad_scaler_of_torch_with_unscale_and_an_overflow(run: Script) -> None:
    model, optimizer = run.train(mlp(), Adam, lr=0.02)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    for step, (x, y) in enumerate(run.batches(12)):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = mse(model(x), y)
        if step == 6:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        run.log(clip_grad_norm_(model.parameters(), 1.0))
        scaler.step(optimizer)
        scaler.update()
        run.log(scaler.get_scale())


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
    for x, y in run.batches():
        optimizer.zero_grad(set_to_none=False)
        mse(model(x), y).backward()
        if watched is None:
            watched = net[2].weight.grad
        optimizer.step()
        run.log(watched.norm())
