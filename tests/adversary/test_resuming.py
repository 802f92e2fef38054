"""Checkpoints, rollbacks, exceptions that a script lives through, models that grow."""

from __future__ import annotations

import copy
import io

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW

from adversary.nets import mlp, mse, train_step
from adversary.script import ALIASED, Script, adversarial


@adversarial(three=True)
def test_rollback_of_model_and_optimizer_in_mid_run(run: Script) -> None:
    model, optimizer = run.train(mlp(), Adam, lr=0.03)
    file = io.BytesIO()
    for step, (x, y) in enumerate(run.batches(14)):
        run.log(train_step(model, optimizer, x, y))
        if step == 5:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        if step == 10:
            file.seek(0)
            checkpoint = torch.load(file)
            model.load_state_dict(checkpoint["model"])
            optimizer.load_state_dict(checkpoint["optimizer"])


@adversarial()
def test_best_weights_are_restored_when_the_loss_grows(run: Script) -> None:
    import torch.distributed as dist

    model, optimizer = run.train(mlp(), SGD, lr=0.5, momentum=0.9)
    best, weights = float("inf"), copy.deepcopy(model.module.state_dict())
    for x, y in run.batches(14):
        loss = train_step(model, optimizer, x, y).detach()
        dist.all_reduce(loss)
        if loss < best:
            best, weights = loss.item(), copy.deepcopy(model.module.state_dict())
        else:
            model.module.load_state_dict(weights)
            optimizer.param_groups[0]["lr"] *= 0.5
        run.log(best)


class Fragile(nn.Module):
    """Its forward fails half way when the batch is marked."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = mlp(outputs=8), mlp()

    def forward(self, x: torch.Tensor, fail: bool = False) -> torch.Tensor:
        h = self.one(x)
        if fail:
            raise RuntimeError("CUDA out of memory, says the test")
        return self.two(h)


@adversarial(three=True)
def test_forward_that_fails_half_way_is_skipped(run: Script) -> None:
    model, optimizer = run.train(Fragile(), Adam, lr=0.02)
    for step, (x, y) in enumerate(run.batches(14)):
        try:
            optimizer.zero_grad()
            loss = mse(model(x, fail=step % 5 == 4), y)
            loss.backward()
            optimizer.step()
        except RuntimeError as error:
            assert "out of memory" in str(error)
            continue
        run.log(loss)


@adversarial()
def test_bad_batch_is_noticed_between_forward_and_backward(run: Script) -> None:
    model, optimizer = run.train(mlp(), Adam, lr=0.02)
    for step, (x, y) in enumerate(run.batches(14)):
        loss = mse(model(x), y)
        if step % 4 == 3:
            del loss
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@adversarial()
def test_exception_in_a_closure_of_step(run: Script) -> None:
    model, optimizer = run.train(mlp(), SGD, lr=0.1, momentum=0.9)
    for step, (x, y) in enumerate(run.batches(14)):

        def closure(x: torch.Tensor = x, y: torch.Tensor = y, step: int = step) -> torch.Tensor:
            if step % 4 == 3:
                raise ValueError("bad batch")
            optimizer.zero_grad()
            loss = mse(model(x), y)
            loss.backward()
            return loss

        try:
            run.log(optimizer.step(closure))
        except ValueError:
            run.log([p.norm() for p in model.parameters()])


@adversarial()
def test_exception_in_a_step_pre_hook(run: Script) -> None:
    model, optimizer = run.train(mlp(), Adam, lr=0.02)
    count = 0

    def check(*_: object) -> None:
        nonlocal count
        count += 1
        if count % 4 == 0:
            raise StopIteration("skip this step")

    optimizer.register_step_pre_hook(check)
    for x, y in run.batches(14):
        try:
            train_step(model, optimizer, x, y)
        except StopIteration:
            run.log(count)


@adversarial()
def test_exception_in_a_step_post_hook(run: Script) -> None:
    model, optimizer = run.train(mlp(), Adam, lr=0.02)
    count = 0

    def check(*_: object) -> None:
        nonlocal count
        count += 1
        if count % 4 == 0:
            raise StopIteration("tell somebody")

    optimizer.register_step_post_hook(check)
    for x, y in run.batches(14):
        try:
            train_step(model, optimizer, x, y)
        except StopIteration:
            run.log([p.sum() for p in model.parameters()])


@adversarial(fallback=ALIASED)
def test_model_grows_and_is_wrapped_again_without_a_detach(run: Script) -> None:
    """Progressive growing: the old DDP and the old optimizer are just dropped."""
    net = nn.Sequential(mlp(), nn.Linear(4, 4))
    model, optimizer = run.train(net, Adam, lr=0.02)
    for x, y in run.batches():
        run.log(train_step(model, optimizer, x, y))
    net.append(nn.Linear(4, 4))
    del model, optimizer
    model, optimizer = run.train(net, Adam, lr=0.02)
    for x, y in run.batches():
        run.log(train_step(model, optimizer, x, y))


@adversarial()
def test_state_dicts_of_torch_distributed_checkpoint(run: Script) -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, optimizer = run.train(mlp(), AdamW, lr=0.02)
    kept = None
    for step, (x, y) in enumerate(run.batches(14)):
        train_step(model, optimizer, x, y)
        if step % 4 == 3:
            optimizer.zero_grad()
            run.log(*get_state_dict(model, optimizer))
        if step == 5:
            optimizer.zero_grad()
            kept = copy.deepcopy(get_state_dict(model, optimizer))
        if step == 9:
            set_state_dict(model, optimizer, model_state_dict=kept[0], optim_state_dict=kept[1])


@adversarial()
def test_attach_after_five_plain_steps_with_state(run: Script) -> None:
    model = run.ddp(mlp())
    optimizer = Adam(model.parameters(), lr=0.02)
    for x, y in run.batches(5):
        train_step(model, optimizer, x, y)
    run.attach(model, optimizer)
    for x, y in run.batches(12):
        run.log(train_step(model, optimizer, x, y))


@adversarial()
def test_lottery_ticket_rewinds_and_masks_after_every_step(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, SGD, lr=0.1, momentum=0.9)
    initial = {n: p.detach().clone() for n, p in net.named_parameters()}
    masks = {n: torch.ones_like(p) for n, p in net.named_parameters()}
    for step, (x, y) in enumerate(run.batches(14)):
        train_step(model, optimizer, x, y)
        if step == 6:
            for n, p in net.named_parameters():
                masks[n] = (p.abs() > p.abs().median()).float()
                p.data = initial[n].clone()
        for n, p in net.named_parameters():
            p.data.mul_(masks[n])


@adversarial()
def test_pruning_of_torch_grows_and_is_made_permanent(run: Script) -> None:
    from torch.nn.utils import prune

    net = mlp()
    for layer in (net[0], net[2]):
        prune.identity(layer, "weight")
    model, optimizer = run.train(net, SGD, lr=0.1, momentum=0.9)
    for step, (x, y) in enumerate(run.batches(14)):
        train_step(model, optimizer, x, y)
        if step % 4 == 3:
            prune.l1_unstructured(net[0], "weight", amount=0.2)
            prune.ln_structured(net[2], "weight", amount=0.2, n=2, dim=0)
            run.log(float((net[0].weight == 0).float().mean()))
