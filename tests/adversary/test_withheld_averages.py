"""Averages of weights, teachers, targets: the second half."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW

from adversary.nets import mlp, train_step
from adversary.script import ALIASED, Script, adversarial


@adversarial(three=True)
def test_ema_in_a_step_post_hook_with_lerp(run: Script) -> None:
    net = mlp()
    model, optimizer = run.train(net, Adam, lr=0.03)
    shadow = [p.detach().clone() for p in net.parameters()]

    def follow(*_: Any) -> None:
        torch._foreach_lerp_(shadow, [p.detach() for p in net.parameters()], 0.2)

    optimizer.register_step_post_hook(follow)
    for x, y in run.batches():
        run.log(train_step(model, optimizer, x, y))
    run.log(shadow)


@adversarial()
def test_ema_of_floats_in_a_context_manager_that_swaps_storage(run: Script) -> None:
    from contextlib import contextmanager

    net = mlp()
    model, optimizer = run.train(net, Adam, lr=0.03)
    shadow = {n: p.detach().clone() for n, p in net.named_parameters()}

    @contextmanager
    def averaged() -> Any:
        kept = {n: p.detach().clone() for n, p in net.named_parameters()}
        net.load_state_dict(shadow)
        try:
            yield
        finally:
            net.load_state_dict(kept)

    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        for n, p in net.named_parameters():
            shadow[n].mul_(0.8).add_(p.detach(), alpha=0.2)
        with averaged(), torch.no_grad():
            run.log(net(x))


@adversarial()
def test_ema_that_is_late_by_one_step(run: Script) -> None:
    """It updates before backward, from the weights that the step before has left."""
    net = mlp()
    model, optimizer = run.train(net, AdamW, lr=0.03)
    shadow = copy.deepcopy(net)
    for x, y in run.batches():
        with torch.no_grad():
            for s, p in zip(shadow.parameters(), net.parameters(), strict=True):
                s.copy_(s * 0.9 + p * 0.1)
        run.log(train_step(model, optimizer, x, y))
    run.log(list(shadow.parameters()))


@adversarial()
def test_stochastic_weight_averaging_with_a_swap_at_the_end(run: Script) -> None:
    from torch.optim.swa_utils import AveragedModel

    net = mlp()
    model, optimizer = run.train(net, SGD, lr=0.1)
    averaged = AveragedModel(net, avg_fn=lambda a, m, n: a + (m - a) / (n + 1))
    for step, (x, y) in enumerate(run.batches(12)):
        train_step(model, optimizer, x, y)
        if step % 3 == 2:
            averaged.update_parameters(model.module)
    for p, q in zip(net.parameters(), averaged.module.parameters(), strict=True):
        p.data, q.data = q.data, p.data
    x, y = next(run.batches(1))
    run.log(net(x), averaged(x))


@adversarial()
def test_dino_teacher_with_centering(run: Script) -> None:
    student = nn.Sequential(mlp(), nn.utils.parametrizations.weight_norm(nn.Linear(4, 6, bias=False)))
    model = run.ddp(student)
    teacher = copy.deepcopy(student).requires_grad_(False)
    optimizer = AdamW(model.parameters(), lr=0.02)
    run.attach(model, optimizer)
    center = torch.zeros(6)
    for step, (x, _) in enumerate(run.batches()):
        with torch.no_grad():
            goal = teacher(x)
            soft = ((goal - center) / 0.04).softmax(1)
            center = center * 0.9 + goal.mean(0) * 0.1
        loss = -(soft * model(x + 0.05).log_softmax(1)).sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        if step < 4:
            for n, p in student.named_parameters():
                if "parametrizations" in n:
                    p.grad = None
        optimizer.step()
        with torch.no_grad():
            for q, k in zip(student.parameters(), teacher.parameters(), strict=True):
                k.data.mul_(0.9).add_(0.1 * q.detach().data)
        run.log(loss)


@adversarial()
def test_polyak_average_of_the_optimizer_state_and_weights_by_numpy(run: Script) -> None:
    import numpy as np

    net = mlp()
    model, optimizer = run.train(net, Adam, lr=0.03)
    averages = [np.zeros(tuple(p.shape), dtype=np.float32) for p in net.parameters()]
    for step, (x, y) in enumerate(run.batches()):
        train_step(model, optimizer, x, y)
        for a, p in zip(averages, net.parameters(), strict=True):
            a += (p.data.cpu().numpy() - a) / (step + 1)
    run.log(averages)


@adversarial(needs=("timm",))
def test_timm_ema_v1_of_the_ddp_object(run: Script) -> None:
    from timm.utils import ModelEma, unwrap_model

    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    shadow = ModelEma(net, decay=0.9)
    model, optimizer = run.train(net, SGD, lr=0.1, momentum=0.9)
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        shadow.update(unwrap_model(model))
        run.log(shadow.ema(x))


@adversarial()
def test_model_soup_of_every_second_checkpoint(run: Script) -> None:
    import io

    model, optimizer = run.train(mlp(), AdamW, lr=0.05)
    files = []
    for step, (x, y) in enumerate(run.batches()):
        train_step(model, optimizer, x, y)
        if step % 2:
            file = io.BytesIO()
            torch.save(model.module, file)
            files.append(file.getvalue())
    loaded = [torch.load(io.BytesIO(f), weights_only=False) for f in files]
    run.log([sum(ps) / len(ps) for ps in zip(*(m.parameters() for m in loaded), strict=True)])


@adversarial(fallback=ALIASED)
def test_fast_and_slow_weights_of_serf_reset(run: Script) -> None:
    """The slow copy pulls the fast weights back each fourth step, through vectors."""
    from torch.nn.utils import parameters_to_vector, vector_to_parameters

    net = mlp()
    model, optimizer = run.train(net, Adam, lr=0.05)
    slow = parameters_to_vector(net.parameters()).detach().clone()
    for step, (x, y) in enumerate(run.batches(12)):
        run.log(train_step(model, optimizer, x, y))
        if step % 4 == 3:
            slow = slow + 0.5 * (parameters_to_vector(net.parameters()).detach() - slow)
            vector_to_parameters(slow, net.parameters())
