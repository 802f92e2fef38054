"""Checkpoints, rollbacks, exceptions that a script lives through, models that grow."""

from __future__ import annotations

import copy
import gc

import torch
from torch import nn
from torch.optim import SGD, Adam, lr_scheduler

from adversarial import ALIASED, Script, adversarial
from adversary.nets import mlp, mse, train_step


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
def test_rollback_between_backward_and_step(run: Script) -> None:
    model, optimizer = run.train(mlp(), Adam, lr=0.03)
    kept = copy.deepcopy(model.module.state_dict())
    for step, (x, y) in enumerate(run.batches(12)):
        optimizer.zero_grad()
        mse(model(x), y).backward()
        if step % 4 == 3:
            model.module.load_state_dict(kept)
        optimizer.step()
        if step == 5:
            kept = copy.deepcopy(model.module.state_dict())


@adversarial()
def test_parts_are_loaded_without_strictness_after_step(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, Adam, lr=0.03)
    first = {k: v.clone() for k, v in net[0].state_dict(prefix="0.").items()}
    for step, (x, y) in enumerate(run.batches(12)):
        run.log(train_step(model, optimizer, x, y))
        if step % 3 == 2:
            net.load_state_dict(first | {"unknown": torch.ones(1)}, strict=False)


@adversarial()
def test_exception_inside_of_no_sync(run: Script) -> None:
    model, optimizer = run.train(mlp(), SGD, lr=0.1, momentum=0.9)
    for step, (x, y) in enumerate(run.batches(14)):
        try:
            with model.no_sync():
                (mse(model(x), y) / 2).backward()
                if step % 4 == 3:
                    raise KeyError("bad sample")
        except KeyError:
            optimizer.zero_grad()
            continue
        (mse(model(x), y) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()


@adversarial()
def test_exception_between_backward_and_step(run: Script) -> None:
    """The gradients are there, the step never comes; the next iteration clears them."""
    model, optimizer = run.train(mlp(), Adam, lr=0.03)
    for step, (x, y) in enumerate(run.batches(14)):
        try:
            optimizer.zero_grad()
            mse(model(x), y).backward()
            if step % 4 == 3:
                raise ValueError("metric failed")
            optimizer.step()
        except ValueError:
            continue


@adversarial()
def test_exception_in_a_forward_hook_of_evaluation(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, Adam, lr=0.03)

    class Stop(Exception):
        pass

    def stop(*_: object) -> None:
        raise Stop

    for x, y in run.batches(10):
        train_step(model, optimizer, x, y)
        handle = net[2].register_forward_hook(stop)  # features are cut out by an exception
        try:
            with torch.no_grad():
                net(x)
        except Stop:
            pass
        handle.remove()


@adversarial()
def test_generator_function_trains_and_is_closed_early(run: Script) -> None:
    model, optimizer = run.train(mlp(), Adam, lr=0.03)

    def training() -> object:
        try:
            for x, y in run.batches(30):
                yield train_step(model, optimizer, x, y)
        finally:
            run.log("closed", [p.norm() for p in model.parameters()])

    steps = training()
    for _ in range(11):
        run.log(next(steps))
    steps.close()


@adversarial()
def test_collector_is_off_and_runs_by_hand(run: Script) -> None:
    model, optimizer = run.train(mlp(), Adam, lr=0.03)
    gc.disable()
    try:
        for x, y in run.batches(10):
            run.log(train_step(model, optimizer, x, y))
            gc.collect()
    finally:
        gc.enable()


# What the rollback was made from is kept.
@adversarial(fallback=ALIASED)
def test_state_of_everything_is_restored_with_generators(run: Script) -> None:
    net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 4))
    model, optimizer = run.train(net, SGD, lr=0.1, momentum=0.9)
    scheduler = lr_scheduler.StepLR(optimizer, 2, 0.8)
    kept = None
    for step, (x, y) in enumerate(run.batches(14)):
        run.log(train_step(model, optimizer, x, y))
        scheduler.step()
        if step == 5:
            parts = model.state_dict(), optimizer.state_dict(), scheduler.state_dict(), torch.get_rng_state()
            kept = copy.deepcopy(parts)
        if step == 9:
            model.load_state_dict(kept[0])
            optimizer.load_state_dict(kept[1])
            scheduler.load_state_dict(kept[2])
            torch.set_rng_state(kept[3])


@adversarial()
def test_diverged_weights_are_repaired(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, SGD, lr=0.1)
    good = copy.deepcopy(net.state_dict())
    for step, (x, y) in enumerate(run.batches(14)):
        optimizer.param_groups[0]["lr"] = float("inf") if step == 8 else 0.1
        train_step(model, optimizer, x, y)
        if all(p.isfinite().all() for p in net.parameters()):
            good = copy.deepcopy(net.state_dict())
        else:
            net.load_state_dict(good)
            run.log("repaired")


@adversarial()
def test_head_is_replaced_and_everything_built_again(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, Adam, lr=0.03)
    for x, y in run.batches(8):
        train_step(model, optimizer, x, y)
    run.detach()
    torch.manual_seed(77)
    net[4] = nn.Linear(16, 2)
    net[0].requires_grad_(False)
    model = run.ddp(net)
    optimizer = SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    run.attach(model, optimizer)
    for x, y in run.batches(10, outputs=2):
        run.log(train_step(model, optimizer, x, y))


@adversarial(deferred=3, fallback="")
def test_optimizer_is_made_anew_each_epoch_without_telling(run: Script) -> None:
    """The attached optimizer is forgotten; another one steps the same parameters."""
    model, optimizer = run.train(mlp(), Adam, lr=0.03)
    for epoch in range(3):
        for x, y in run.batches(6):
            run.log(train_step(model, optimizer, x, y))
        optimizer = SGD(model.parameters(), lr=0.05 / (epoch + 1), momentum=0.9)
