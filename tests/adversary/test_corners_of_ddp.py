"""Settings and uses of DDP itself: no_sync in odd places, collectives and checkpoints in between, models that grow."""

from __future__ import annotations

import copy
import io

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam
from torch.optim.swa_utils import AveragedModel

from adversarial import ALIASED, Script, adversarial
from adversary.nets import fit, mlp, mse, train_step


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
def test_training_in_eval_mode_with_frozen_batch_norm(run: Script) -> None:
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 4))
    model, optimizer = run.train(net, Adam, lr=0.02)
    for step, (x, y) in enumerate(run.batches()):
        model.train(step % 4 < 2)
        run.log(train_step(model, optimizer, x, y))


class SyncNorm(nn.Module):
    """Its collectives run in forward and in backward, while legs are under way."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(16)), nn.Parameter(torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.distributed.nn.functional import all_reduce

        count = all_reduce(torch.tensor([float(len(x))], requires_grad=True))
        mean = all_reduce(x.sum(0)) / count
        var = all_reduce((x - mean).pow(2).sum(0)) / count
        return (x - mean) / (var + 1e-5).sqrt() * self.weight + self.bias


@adversarial()
def test_synchronized_batch_norm_by_a_function_of_its_own(run: Script) -> None:
    fit(run, *run.train(nn.Sequential(nn.Linear(8, 16), SyncNorm(), nn.Linear(16, 4)), SGD, lr=0.1))


@adversarial(fallback="")
def test_parameters_that_ddp_ignores(run: Script) -> None:
    net = mlp()
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["2.weight"])
    fit(run, *run.train(net, SGD, lr=0.1))


@adversarial(three=False)  # whose plain arm has gloo's order of sums
def test_two_lines_of_the_guide_instead_of_attach(run: Script) -> None:
    model = run.ddp(mlp())
    optimizer = Adam(model.parameters(), lr=0.02)
    if run.with_dear:
        import ddp_crossover as dx

        state = dx.DearState(model, optimizer, fusion_mb=1e-4)
        model.register_comm_hook(state, dx.dear_hook)
        run.states.append(state)
    fit(run, model, optimizer)


@adversarial(fallback="", strict=False)
def test_optimizer_in_backward_drifts_as_under_plain_ddp(run: Script) -> None:
    _optimize_in_backward(run, drop=False)


@adversarial(fallback="had not ended, and DDP reduces gradients behind their hooks", strict=False)
def test_optimizer_in_backward_that_drops_gradients_drifts_as_under_plain_ddp(run: Script) -> None:
    _optimize_in_backward(run, drop=True)


def _optimize_in_backward(run: Script, *, drop: bool) -> None:
    def optimize(p: torch.Tensor) -> None:
        optimizers[p].step()
        if drop:
            optimizers[p].zero_grad()

    net = mlp()
    optimizers = {p: SGD([p], lr=0.1) for p in net.parameters()}
    for p in net.parameters():
        p.register_post_accumulate_grad_hook(optimize)
    model = run.ddp(net, gradient_as_bucket_view=False)
    run.attach(model, *optimizers.values())
    for x, y in run.batches(3):
        mse(model(x), y).backward()


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
def test_copies_of_the_whole_ddp(run: Script) -> None:
    """The best weights so far, an average and a checkpoint, of the wrapper and not of what is inside."""
    model, optimizer = run.train(mlp(), Adam, lr=0.03)
    kept: list[nn.Module] = []
    for step, (x, y) in enumerate(run.batches(12)):
        train_step(model, optimizer, x, y)
        if step == 6:
            average = AveragedModel(model)
            kept += [average, copy.deepcopy(model)]
        if step in (8, 10):
            average.update_parameters(model)
            saved = io.BytesIO()
            torch.save(model, saved)
    saved.seek(0)
    kept.append(torch.load(saved, weights_only=False))
    run.log([parameter.detach().clone() for each in kept for parameter in each.parameters()])


@adversarial(fallback=ALIASED)
def test_model_grows_and_is_wrapped_again_without_a_detach(run: Script) -> None:
    """Progressive growing: the old DDP and the old optimizer are just dropped."""
    net = nn.Sequential(mlp(), nn.Linear(4, 4))
    model, optimizer = run.train(net, Adam, lr=0.02)
    fit(run, model, optimizer)
    net.append(nn.Linear(4, 4))
    del model, optimizer
    fit(run, *run.train(net, Adam, lr=0.02))


@adversarial()
def test_attach_is_called_inside_of_inference_mode(run: Script) -> None:
    model = run.ddp(mlp())
    optimizer = Adam(model.parameters(), lr=0.02)
    with torch.inference_mode():
        run.attach(model, optimizer)
    fit(run, model, optimizer)


class _CallsReducer(DistributedDataParallel):
    """Trains past `forward()`, as MMDistributedDataParallel of mmcv 1 does."""

    def train_step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.reducer._rebuild_buckets()
        loss = mse(self.module(x), y)
        self.reducer.prepare_for_backward([])
        return loss


@adversarial(deferred=0, fallback="the model is never called itself")
def test_a_subclass_calls_the_reducer_itself(run: Script) -> None:
    model = run.ddp(mlp())
    model.__class__ = _CallsReducer
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    run.attach(model, optimizer)
    for x, y in run.batches():
        optimizer.zero_grad()
        loss = model.train_step(x, y)
        loss.backward()
        optimizer.step()
        run.log(loss)
