"""Averages of weights, teachers, targets: copies that follow a model while it trains."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW

from adversarial import ALIASED, Script, adversarial
from adversary.nets import mlp, mse, train_step


@adversarial(three=True, fallback=ALIASED)
def test_ema_in_a_dict_of_shadows(run: Script) -> None:
    """The class EMA of countless repositories: register, update, apply_shadow, restore."""
    model, optimizer = run.train(mlp(), AdamW, lr=0.02)
    shadow = {n: p.data.clone() for n, p in model.named_parameters()}
    backup: dict[str, torch.Tensor] = {}
    for step, (x, y) in enumerate(run.batches()):
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()
        for n, p in model.named_parameters():
            shadow[n] = (1.0 - 0.9) * p.data + 0.9 * shadow[n]
        if step % 3 == 2:
            for n, p in model.named_parameters():
                backup[n] = p.data
                p.data = shadow[n]
            model.eval()
            with torch.no_grad():
                run.log(mse(model(x), y))
            model.train()
            for n, p in model.named_parameters():
                p.data = backup[n]
    run.log(shadow)


@adversarial()
def test_swa_with_update_bn_and_swa_lr(run: Script) -> None:
    from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    model, optimizer = run.train(net, SGD, lr=0.1, momentum=0.9)
    averaged, scheduler = AveragedModel(net), SWALR(optimizer, swa_lr=0.02, anneal_epochs=3)
    for step, (x, y) in enumerate(run.batches()):
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()
        if step >= 4:
            averaged.update_parameters(net)
            scheduler.step()
    update_bn(run.batches(), averaged)
    run.log(averaged.state_dict())


@adversarial()
def test_averaged_model_of_the_ddp_with_multi_avg_fn_and_buffers(run: Script) -> None:
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    model, optimizer = run.train(net, AdamW, lr=0.02)
    averaged = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.8), use_buffers=True)
    for x, y in run.batches():
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()
        averaged.update_parameters(net)
        averaged.eval()
        run.log(averaged(x))


class MoCo(nn.Module):
    """Query and key encoder in one module, the key encoder updated inside of forward, a queue."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = mlp(), mlp()
        for q, k in zip(self.query.parameters(), self.key.parameters(), strict=True):
            k.data.copy_(q.data)
            k.requires_grad = False
        self.register_buffer("queue", nn.functional.normalize(torch.randn(4, 12), dim=0))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def follow(self) -> None:
        for q, k in zip(self.query.parameters(), self.key.parameters(), strict=True):
            k.data = k.data * 0.9 + q.data * 0.1

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q = nn.functional.normalize(self.query(one), dim=1)
        with torch.no_grad():
            self.follow()
            k = nn.functional.normalize(self.key(other), dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone().detach()], dim=1) / 0.2
        start = int(self.pointer)
        self.queue[:, start : start + 4] = k[:4].T
        self.pointer[0] = (start + 4) % 12
        return logits, torch.zeros(len(q), dtype=torch.long)


@adversarial(three=True)
def test_moco_updates_its_key_encoder_inside_of_forward(run: Script) -> None:
    model, optimizer = run.train(MoCo(), SGD, lr=0.1, momentum=0.9, weight_decay=1e-4)
    for x, _ in run.batches():
        logits, labels = model(x, x + 0.1)
        loss = nn.functional.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss)


@adversarial()
def test_byol_target_with_cosine_momentum(run: Script) -> None:
    online, predictor = mlp(), nn.Linear(4, 4)
    model = run.ddp(nn.Sequential(online, predictor))
    target = copy.deepcopy(online).requires_grad_(False)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    run.attach(model, optimizer)
    for step, (x, _) in enumerate(run.batches()):
        one, other = x + 0.1, x * 1.1
        with torch.no_grad():
            goals = target(one), target(other)
        loss = 2 - nn.functional.cosine_similarity(model(one), goals[1]).mean()
        loss = loss - nn.functional.cosine_similarity(model(other), goals[0]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tau = 1 - 0.1 * (math.cos(math.pi * step / 10) + 1) / 2
        with torch.no_grad():
            for o, t in zip(online.parameters(), target.parameters(), strict=True):
                t.mul_(tau).add_(o, alpha=1 - tau)
        run.log(loss)


@adversarial(fallback=ALIASED)
def test_mean_teacher_over_state_dicts(run: Script) -> None:
    student = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 4))
    model, optimizer = run.train(student, Adam, lr=0.02)
    teacher = copy.deepcopy(student).eval()
    for x, y in run.batches():
        with torch.no_grad():
            goal = teacher(x)
        loss = mse(model(x), y) + 0.5 * mse(model(x + 0.01), goal)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        old, new = teacher.state_dict(), student.state_dict()
        teacher.load_state_dict({k: 0.9 * old[k] + 0.1 * new[k] if new[k].is_floating_point() else new[k] for k in new})
        run.log(loss)


@adversarial()
def test_snapshot_ensemble_of_state_dicts(run: Script) -> None:
    model, optimizer = run.train(mlp(), SGD, lr=0.1)
    snapshots = []
    for step, (x, y) in enumerate(run.batches()):
        optimizer.param_groups[0]["lr"] = 0.1 * (math.cos(math.pi * (step % 4) / 4) + 1) / 2
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()
        if step % 4 == 3:
            snapshots.append({k: v.clone() for k, v in model.state_dict().items()})
    run.log(snapshots)


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

    for x, y in run.batches(10):
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
    for step, (x, y) in enumerate(run.batches()):
        run.log(train_step(model, optimizer, x, y))
        if step % 4 == 3:
            slow = slow + 0.5 * (parameters_to_vector(net.parameters()).detach() - slow)
            vector_to_parameters(slow, net.parameters())
