"""Adversaries: several models or optimizers that take turns."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Adam

from adversarial import Script, adversarial
from adversary.nets import mlp


def bce(logits: torch.Tensor, label: float) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, label))


@adversarial(three=True)
def test_dcgan_of_the_tutorial(run: Script) -> None:
    generator, discriminator = run.ddp(mlp(outputs=8)), run.ddp(mlp(outputs=1))
    g_opt = Adam(generator.parameters(), lr=0.02, betas=(0.5, 0.999))
    d_opt = Adam(discriminator.parameters(), lr=0.02, betas=(0.5, 0.999))
    run.attach(generator, g_opt)
    run.attach(discriminator, d_opt)
    for x, _ in run.batches():
        discriminator.zero_grad()
        real = bce(discriminator(x), 1.0)
        real.backward()
        fake = generator(torch.randn_like(x))
        bce(discriminator(fake.detach()), 0.0).backward()
        d_opt.step()
        generator.zero_grad()
        loss = bce(discriminator(fake), 1.0)
        loss.backward()
        g_opt.step()
        run.log(real, loss)


class Gan(nn.Module):
    """One wrapped module with both halves, which take turns."""

    def __init__(self) -> None:
        super().__init__()
        self.g, self.d = mlp(outputs=8), mlp(outputs=1)

    def forward(self, x: torch.Tensor, turn: str) -> torch.Tensor:
        fake = self.g(x.flip(1))
        if turn == "d":
            return self.d(x).mean() - self.d(fake.detach()).mean()
        return self.d(fake).mean()


@adversarial(three=True)
def test_two_time_scale_gan_in_one_ddp_with_two_optimizers(run: Script) -> None:
    model = run.ddp(Gan(), find_unused_parameters=True)
    g_opt, d_opt = Adam(model.module.g.parameters(), lr=0.01), Adam(model.module.d.parameters(), lr=0.03)
    run.attach(model, g_opt, d_opt)
    for x, _ in run.batches():
        for turn, optimizer in (("d", d_opt), ("g", g_opt)):
            model.zero_grad()
            loss = model(x, turn)
            loss.backward()
            optimizer.step()
            run.log(loss)


@adversarial(three=True, fallback="shares its memory|were read or replaced")
def test_two_models_around_one_encoder_add_up_its_gradients(run: Script) -> None:
    encoder = nn.Linear(8, 8)
    one, two = (run.ddp(nn.Sequential(encoder, mlp(outputs=outputs))) for outputs in (8, 4))
    optimizer = Adam(dict.fromkeys([*one.parameters(), *two.parameters()]), lr=0.01)
    run.attach(one, optimizer)
    run.attach(two, optimizer)
    for step, (x, _) in enumerate(run.batches()):
        optimizer.zero_grad()
        for model in (one, two) if step % 2 else (two, one):
            loss = model(x).square().mean()
            loss.backward()
            run.log(loss)
        optimizer.step()


@adversarial(fallback="another optimizer has a part of its state")
def test_a_population_whose_worst_takes_the_state_of_the_best(run: Script) -> None:
    """`load_state_dict()` copies no tensors: both optimizers write to the same moments from then on."""
    models = [run.ddp(mlp(outputs=2)) for _ in range(2)]
    optimizers = [Adam(model.parameters(), lr=0.02) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        run.attach(model, optimizer)
    for step, (x, _) in enumerate(run.batches()):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            run.log(loss)
        if step % 4 == 3:
            best = step // 4 % 2
            models[1 - best].module.load_state_dict(models[best].module.state_dict())
            optimizers[1 - best].load_state_dict(optimizers[best].state_dict())


@adversarial(fallback="another optimizer has a part of its state", deferred=6)
def test_an_optimizer_loads_what_another_one_of_its_model_had_a_step_ago(run: Script) -> None:
    model = run.ddp(nn.Sequential(mlp(outputs=8), mlp(outputs=8)))
    one, other = optimizers = [Adam(net.parameters(), lr=0.02) for net in model.module]
    run.attach(model, *optimizers)
    checkpoint = one.state_dict()
    for step, (x, _) in enumerate(run.batches(16)):
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        if step == 7:
            other.load_state_dict(checkpoint)
        for optimizer in optimizers:
            optimizer.step()
        if step == 6:
            checkpoint = one.state_dict()
        elif step == 8:
            run.log([own["exp_avg"].clone() for own in other.state.values()])
        elif step == 10:
            other.load_state_dict(copy.deepcopy(other.state_dict()))
        run.log(loss)
