"""Adversaries, actors and critics, teachers and students: several models, optimizers, losses."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW

from adversary.nets import mlp, mse
from adversary.script import Script, adversarial


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
def test_lazy_r1_penalty_every_fourth_step(run: Script) -> None:
    discriminator = run.ddp(mlp(outputs=1))
    optimizer = Adam(discriminator.parameters(), lr=0.02, betas=(0.0, 0.99))
    run.attach(discriminator, optimizer)
    for step, (x, _) in enumerate(run.batches(12)):
        optimizer.zero_grad()
        loss = F.softplus(-discriminator(x)).mean()
        loss.backward()
        optimizer.step()
        if step % 4 == 3:
            optimizer.zero_grad()
            x = x.requires_grad_()
            scores = discriminator(x).sum()
            (slope,) = torch.autograd.grad(scores, x, create_graph=True)
            (slope.pow(2).sum(1).mean() * 5 + 0 * scores).backward()
            optimizer.step()
        run.log(loss)


@adversarial(three=True)
def test_ddpg_with_polyak_targets(run: Script) -> None:
    actor, critic = run.ddp(mlp(8, outputs=2)), run.ddp(mlp(10, outputs=1))
    actor_target, critic_target = copy.deepcopy(actor.module), copy.deepcopy(critic.module)
    a_opt, c_opt = Adam(actor.parameters(), lr=0.01), Adam(critic.parameters(), lr=0.02)
    run.attach(actor, a_opt)
    run.attach(critic, c_opt)
    for x, y in run.batches():
        with torch.no_grad():
            after = x.roll(1, 0)
            goal = y[:, :1] + 0.9 * critic_target(torch.cat([after, actor_target(after)], 1))
        c_opt.zero_grad()
        c_loss = mse(critic(torch.cat([x, actor.module(x).detach()], 1)), goal)
        c_loss.backward()
        c_opt.step()
        a_opt.zero_grad()
        a_loss = -critic.module(torch.cat([x, actor(x)], 1)).mean()
        a_loss.backward()
        a_opt.step()
        critic.zero_grad()
        for net, target in ((actor, actor_target), (critic, critic_target)):
            for p, t in zip(net.parameters(), target.parameters(), strict=True):
                t.data.copy_(0.1 * p.data + 0.9 * t.data)
        run.log(c_loss, a_loss)


@adversarial()
def test_dqn_with_a_hard_target_every_third_step(run: Script) -> None:
    online = run.ddp(mlp())
    target = copy.deepcopy(online.module)
    optimizer = Adam(online.parameters(), lr=0.02)
    run.attach(online, optimizer)
    for step, (x, y) in enumerate(run.batches(12)):
        with torch.no_grad():
            action = online.module(x).argmax(1)
            goal = y[:, 0] + 0.9 * target(x.roll(1, 0)).max(1).values
        loss = F.smooth_l1_loss(online(x).gather(1, action[:, None])[:, 0], goal)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 3 == 2:
            target.load_state_dict(online.module.state_dict())
        run.log(loss)


@adversarial()
def test_distillation_into_a_student_from_a_copy_of_itself(run: Script) -> None:
    model = run.ddp(mlp())
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    run.attach(model, optimizer)
    teacher = None
    for step, (x, y) in enumerate(run.batches(12)):
        if step % 4 == 0:
            teacher = copy.deepcopy(model.module).eval()
        with torch.no_grad():
            soft = teacher(x)
        out = model(x)
        loss = mse(out, y) + F.kl_div(out.log_softmax(1), soft.softmax(1), reduction="batchmean")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss)


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


@adversarial()
def test_one_optimizer_over_two_ddps(run: Script) -> None:
    """One loss, one optimizer, two wrapped halves: what `itertools.chain` of tutorials leads to."""
    encoder, decoder = run.ddp(mlp(outputs=6)), run.ddp(mlp(6))
    e_opt, d_opt = AdamW(encoder.parameters(), lr=0.02), AdamW(decoder.parameters(), lr=0.02)
    run.attach(encoder, e_opt)
    run.attach(decoder, d_opt)
    for x, y in run.batches():
        e_opt.zero_grad()
        d_opt.zero_grad()
        loss = mse(decoder(encoder(x)), y)
        loss.backward()
        d_opt.step()
        e_opt.step()
        run.log(loss)


@adversarial(fallback="")
def test_one_optimizer_chained_over_two_attached_ddps(run: Script) -> None:
    import itertools

    encoder, decoder = run.ddp(mlp(outputs=6)), run.ddp(mlp(6))
    optimizer = AdamW(itertools.chain(encoder.parameters(), decoder.parameters()), lr=0.02)
    run.attach(encoder, optimizer)
    run.attach(decoder, optimizer)
    for x, y in run.batches():
        optimizer.zero_grad()
        loss = mse(decoder(encoder(x)), y)
        loss.backward()
        optimizer.step()
        run.log(loss)


@adversarial(fallback="")
def test_domain_adversary_with_gradient_reversal(run: Script) -> None:
    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            return -0.3 * grad

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.task, self.domain = mlp(outputs=6), nn.Linear(6, 4), nn.Linear(6, 1)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            h = self.trunk(x)
            return self.task(h), self.domain(Reverse.apply(h))

    model, optimizer = run.train(Net(), SGD, lr=0.1, momentum=0.9)
    for x, y in run.batches():
        task, domain = model(x)
        loss = mse(task, y) + bce(domain, float(run.rank == 0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss)
