"""What scripts do to gradients between backward and step, and where they clear them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_value_
from torch.optim import SGD, Adam

from adversarial import GRADIENTS_READ, KEPT, Script, adversarial
from adversary.nets import mlp, mse, train_step


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
