"""Adversaries, actors and critics, peers: several models, optimizers, losses."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adam

from adversarial import Script, adversarial
from adversary.nets import mlp, mse


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


@adversarial()
def test_wgan_gp_with_five_steps_of_the_critic(run: Script) -> None:
    generator, critic = run.ddp(mlp(outputs=8)), run.ddp(mlp(outputs=1))
    g_opt, c_opt = Adam(generator.parameters(), lr=0.01), Adam(critic.parameters(), lr=0.01)
    run.attach(generator, g_opt)
    run.attach(critic, c_opt)
    for step, (x, _) in enumerate(run.batches(24)):
        c_opt.zero_grad()
        fake = generator(torch.randn_like(x)).detach()
        mix = torch.lerp(x, fake, torch.rand(len(x), 1)).requires_grad_()
        both = critic(torch.cat([x, fake, mix]))
        scores = both[2 * len(x) :]
        (slope,) = torch.autograd.grad(scores.sum(), mix, create_graph=True)
        loss = both[len(x) : 2 * len(x)].mean() - both[: len(x)].mean() + 10 * (slope.norm(2, 1) - 1).pow(2).mean()
        loss.backward()
        c_opt.step()
        run.log(loss)
        if step % 2 == 1:
            g_opt.zero_grad()
            for p in critic.parameters():
                p.requires_grad_(False)
            (-critic.module(generator(torch.randn_like(x))).mean()).backward()
            for p in critic.parameters():
                p.requires_grad_(True)
            g_opt.step()


@adversarial()
def test_mutual_learning_of_two_models_in_one_step(run: Script) -> None:
    one, two = run.ddp(mlp()), run.ddp(mlp())
    optimizers = [Adam(one.parameters(), lr=0.02), SGD(two.parameters(), lr=0.1)]
    run.attach(one, optimizers[0])
    run.attach(two, optimizers[1])
    for x, y in run.batches():
        a, b = one(x), two(x)
        loss = mse(a, y) + mse(b, y) + mse(a, b.detach()) + mse(b, a.detach())
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        run.log(loss)


@adversarial(three=True)
def test_two_time_scale_gan_in_one_ddp_with_two_optimizers(run: Script) -> None:
    """One wrapped module with both halves, which take turns."""

    class Gan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.g, self.d = mlp(outputs=8), mlp(outputs=1)

        def forward(self, x: torch.Tensor, turn: str) -> torch.Tensor:
            fake = self.g(x.flip(1))
            if turn == "d":
                return self.d(x).mean() - self.d(fake.detach()).mean()
            return self.d(fake).mean()

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


@adversarial()
def test_critic_outside_of_the_ddp_shares_the_trunk_of_the_actor(run: Script) -> None:
    """Its backward fills the gradients of its own head only."""
    trunk = nn.Linear(8, 8)
    actor = run.ddp(nn.Sequential(trunk, nn.Tanh(), nn.Linear(8, 4)))
    a_opt = Adam(actor.parameters(), lr=0.02)
    run.attach(actor, a_opt)
    critic = nn.Sequential(trunk, nn.Tanh(), nn.Linear(8, 1))
    c_opt = SGD(critic[2].parameters(), lr=0.1)
    for x, y in run.batches():
        a_opt.zero_grad()
        loss = mse(actor(x), y)
        loss.backward()
        a_opt.step()
        c_opt.zero_grad()
        value = mse(critic(x), y[:, :1])
        torch.autograd.backward(value, inputs=list(critic[2].parameters()))
        c_opt.step()
        run.log(loss, value)


@adversarial()
def test_loss_module_with_parameters_outside_of_the_ddp(run: Script) -> None:
    """Uncertainty weights of Kendall: averaged by hand, stepped by the same optimizer."""
    import torch.distributed as dist

    model = run.ddp(mlp())
    log_vars = nn.Parameter(torch.zeros(2))
    optimizer = Adam([{"params": model.parameters()}, {"params": [log_vars], "lr": 0.1}], lr=0.02)
    run.attach(model, optimizer)
    for x, y in run.batches():
        out = model(x)
        losses = torch.stack([mse(out[:, :2], y[:, :2]), mse(out[:, 2:], y[:, 2:])])
        loss = (losses * (-log_vars).exp() + log_vars).sum()
        optimizer.zero_grad()
        loss.backward()
        dist.all_reduce(log_vars.grad)
        log_vars.grad /= run.world_size
        optimizer.step()
        run.log(loss, log_vars)
