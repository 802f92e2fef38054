"""What scripts do to gradients between backward and step, and where they clear them."""

from __future__ import annotations

import torch
from torch.nn.utils import clip_grad_value_
from torch.optim import SGD, Adam

from adversarial import GRADIENTS_READ, KEPT, Script, adversarial
from adversary.nets import mlp, mse


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
def test_gradients_are_listed_and_clipped_through_the_list(run: Script) -> None:
    for view in (False, True):
        for when in (0, 6):  # before the pipeline begins, or in it
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
        optimizer.step()
