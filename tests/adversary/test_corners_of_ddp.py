"""Settings and uses of DDP itself: no_sync in odd places, the bare module, buffers, what is refused."""

from __future__ import annotations

import copy
import pickle

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import LBFGS, SGD, Adam

from adversarial import GRADIENTS_READ, Script, adversarial
from adversary.nets import mlp, mse, train_step


@adversarial(three=True, fallback="", deferred=0)
def test_local_sgd_with_periodic_averages(run: Script) -> None:
    """Steps with local gradients inside of no_sync, then the weights are averaged."""
    model, optimizer = run.train(mlp(), SGD, lr=0.1)
    for step, (x, y) in enumerate(run.batches(16)):
        optimizer.zero_grad()
        if step < 6:
            mse(model(x), y).backward()
            optimizer.step()
            continue
        with model.no_sync():
            mse(model(x), y).backward()
        optimizer.step()
        if step % 3 == 2:
            for p in model.parameters():
                gathered = [torch.empty_like(p.data) for _ in range(run.world_size)]
                dist.all_gather(gathered, p.data)
                p.data.copy_(torch.stack(gathered).mean(0))


@adversarial(fallback="")
def test_forward_inside_of_no_sync_and_backward_outside(run: Script) -> None:
    model, optimizer = run.train(mlp(), SGD, lr=0.1)
    for step, (x, y) in enumerate(run.batches()):
        optimizer.zero_grad()
        if step % 3 == 2:
            with model.no_sync():
                loss = mse(model(x), y)
            loss.backward()
        else:
            mse(model(x), y).backward()
        optimizer.step()


@adversarial()
def test_accelerate_sets_require_backward_grad_sync(run: Script) -> None:
    model, optimizer = run.train(mlp(), Adam, lr=0.02)
    for index, (x, y) in enumerate(run.batches(20)):
        model.require_backward_grad_sync = index % 2 == 1
        (mse(model(x), y) / 2).backward()
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()


@adversarial()
def test_backward_through_the_bare_module_whose_gradients_are_thrown_away(run: Script) -> None:
    model, optimizer = run.train(mlp(), SGD, lr=0.1, momentum=0.9)
    for x, y in run.batches():
        x.requires_grad_()
        mse(model.module(x), y).backward()
        run.log(x.grad)
        run.log(train_step(model, optimizer, x.detach(), y))


@adversarial()
def test_training_in_eval_mode_with_frozen_batch_norm(run: Script) -> None:
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 4))
    model, optimizer = run.train(net, Adam, lr=0.02)
    for step, (x, y) in enumerate(run.batches()):
        model.train(step % 4 < 2)
        run.log(train_step(model, optimizer, x, y))


@adversarial()
def test_synchronized_batch_norm_by_a_function_of_its_own(run: Script) -> None:
    class SyncNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.ones(16)), nn.Parameter(torch.zeros(16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            from torch.distributed.nn.functional import all_reduce

            count = all_reduce(torch.tensor([float(len(x))], requires_grad=True))
            mean = all_reduce(x.sum(0)) / count
            var = all_reduce((x - mean).pow(2).sum(0)) / count
            return (x - mean) / (var + 1e-5).sqrt() * self.weight + self.bias

    model, optimizer = run.train(nn.Sequential(nn.Linear(8, 16), SyncNorm(), nn.Linear(16, 4)), SGD, lr=0.1)
    for x, y in run.batches():
        run.log(train_step(model, optimizer, x, y))


@adversarial(fallback="")
def test_default_settings_of_attach_over_many_steps(run: Script) -> None:
    """The tuner may end with plain all-reduce; the bits are the same all along."""
    model = run.ddp(mlp())
    optimizer = Adam(model.parameters(), lr=0.01)
    run.attach(model, optimizer, fusion_mb=None, schedule="auto")
    for x, y in run.batches(60):
        run.log(train_step(model, optimizer, x, y))


@adversarial(fallback="")
def test_parameters_that_ddp_ignores(run: Script) -> None:
    net = mlp()
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["2.weight"])
    model, optimizer = run.train(net, SGD, lr=0.1)
    for x, y in run.batches():
        run.log(train_step(model, optimizer, x, y))


@adversarial(refused="ValueError|RuntimeError|NotImplementedError|TypeError")
def test_refused_lbfgs(run: Script) -> None:
    model = run.ddp(mlp())
    optimizer = LBFGS(model.parameters(), max_iter=2)
    run.attach(model, optimizer)
    for x, y in run.batches(3):

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            optimizer.zero_grad()
            loss = mse(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)


@adversarial(refused="deepcopy|pickle|detach")
def test_refused_deepcopy_of_the_ddp(run: Script) -> None:
    model, optimizer = run.train(mlp(), SGD, lr=0.1)
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        copy.deepcopy(model.module)
    copy.deepcopy(model)


@adversarial(refused="forward")
def test_refused_attach_between_forward_and_backward(run: Script) -> None:
    model = run.ddp(mlp())
    optimizer = SGD(model.parameters(), lr=0.1)
    for step, (x, y) in enumerate(run.batches()):
        loss = mse(model(x), y)
        if step == 4:
            run.attach(model, optimizer)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@adversarial(fallback=GRADIENTS_READ)
def test_second_backward_adds_to_gradients_without_communication(run: Script) -> None:
    """A backward of a regularizer through the bare parameters after that of the loss."""
    net = mlp()
    model, optimizer = run.train(net, SGD, lr=0.1)
    for x, y in run.batches():
        optimizer.zero_grad()
        mse(model(x), y).backward()
        (0.01 * sum(p.pow(2).sum() for p in net.parameters())).backward()
        optimizer.step()


@adversarial()
def test_two_lines_of_the_readme_instead_of_attach(run: Script) -> None:
    model = run.ddp(mlp())
    optimizer = Adam(model.parameters(), lr=0.02)
    if run.with_dear:
        import ddp_crossover as dx

        state = dx.DearState(model, optimizer, fusion_mb=1e-4)
        model.register_comm_hook(state, dx.dear_hook)
        run.states.append(state)
    for x, y in run.batches():
        run.log(train_step(model, optimizer, x, y))


@adversarial()
def test_buffers_are_changed_by_hand_and_broadcast_by_ddp(run: Script) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = mlp()
            self.register_buffer("scale", torch.ones(4))
            self.register_buffer("count", torch.zeros((), dtype=torch.long), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return self.trunk(x) * self.scale

    model, optimizer = run.train(Net(), Adam, lr=0.02)
    for x, y in run.batches():
        run.log(train_step(model, optimizer, x, y))
        model.module.scale.mul_(1 + 0.1 * run.rank)
        model.module.scale = model.module.scale.clone()
        run.log(model.module.count, model.module.scale)


@adversarial()
def test_ddp_of_a_submodule_only(run: Script) -> None:
    trunk, head = run.ddp(mlp(outputs=8)), nn.Linear(8, 4)
    for p in head.parameters():
        dist.broadcast(p.data, 0)
    optimizer = Adam([*trunk.parameters(), *head.parameters()], lr=0.02)
    run.attach(trunk, optimizer)
    for x, y in run.batches():
        optimizer.zero_grad()
        loss = mse(head(trunk(x)), y)
        loss.backward()
        for p in head.parameters():
            dist.all_reduce(p.grad)
            p.grad /= run.world_size
        optimizer.step()
        run.log(loss)


@adversarial(refused="pickle|detach|deepcopy")
def test_refused_pickle_of_the_ddp(run: Script) -> None:
    model, optimizer = run.train(mlp(), Adam, lr=0.02)
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
    pickle.dumps(model)


@adversarial(fallback="", strict=False)
def test_optimizer_in_backward_drifts_as_under_plain_ddp(run: Script) -> None:
    net = mlp()
    optimizers = {p: SGD([p], lr=0.1) for p in net.parameters()}
    for p in net.parameters():
        p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    model = run.ddp(net, gradient_as_bucket_view=False)
    run.attach(model, *optimizers.values())
    for x, y in run.batches(3):
        mse(model(x), y).backward()
