"""Adversaries: several models or optimizers that take turns."""

from __future__ import annotations

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
