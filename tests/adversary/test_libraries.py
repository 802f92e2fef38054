"""Optimizers and wrappers that people install. Each is skipped where its package is missing."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import SGD, Adam

from adversary.nets import mlp, mse, train_step
from adversary.script import Script, adversarial


def fit(run: Script, optimizer: Any, model: Any, steps: int = 10) -> None:
    for x, y in run.batches(steps):
        run.log(train_step(model, optimizer, x, y))


@adversarial(needs=("timm",), fallback="")
def test_optimizers_of_timm_by_name(run: Script) -> None:
    from timm.optim import create_optimizer_v2

    for name in ("lamb", "adan", "sgdw", "madgradw", "rmsproptf"):
        model = run.ddp(mlp())
        optimizer = create_optimizer_v2(model.module, opt=name, lr=0.01, weight_decay=0.05)
        run.attach(model, optimizer)
        fit(run, optimizer, model, 7)


@adversarial(needs=("timm",), fallback="")
def test_more_optimizers_of_timm_by_name(run: Script) -> None:
    from timm.optim import create_optimizer_v2

    for name in ("laprop", "adopt", "mars", "cadamw", "larc", "novograd"):
        model = run.ddp(mlp())
        optimizer = create_optimizer_v2(model.module, opt=name, lr=0.01, weight_decay=0.05)
        run.attach(model, optimizer)
        fit(run, optimizer, model, 7)


@adversarial(needs=("timm",), fallback="")
def test_lookahead_of_timm(run: Script) -> None:
    from timm.optim import create_optimizer_v2

    model = run.ddp(mlp())
    optimizer = create_optimizer_v2(model.module, opt="lookahead_adam", lr=0.01)
    run.attach(model, optimizer)
    fit(run, optimizer, model)


@adversarial(needs=("schedulefree",), fallback="")
def test_schedule_free_adamw_with_train_and_eval(run: Script) -> None:
    from schedulefree import AdamWScheduleFree

    model = run.ddp(mlp())
    optimizer = AdamWScheduleFree(model.parameters(), lr=0.02, warmup_steps=3)
    run.attach(model, optimizer)
    optimizer.train()
    for step, (x, y) in enumerate(run.batches(12)):
        train_step(model, optimizer, x, y)
        if step % 4 == 3:
            optimizer.eval()
            with torch.no_grad():
                run.log(mse(model.module(x), y))
            optimizer.train()


@adversarial(needs=("lion_pytorch",), fallback="may hold parameters or another optimizer")
def test_lion_of_lucidrains(run: Script) -> None:
    from lion_pytorch import Lion

    model, optimizer = run.train(mlp(), Lion, lr=3e-3, weight_decay=1e-2)
    fit(run, optimizer, model)


@adversarial(needs=("prodigyopt",), fallback="")
def test_prodigy_adapts_one_distance_for_all_parameters(run: Script) -> None:
    from prodigyopt import Prodigy

    model, optimizer = run.train(mlp(), Prodigy, lr=1.0)
    fit(run, optimizer, model)


@adversarial(needs=("torch_optimizer",), fallback="")
def test_optimizers_of_torch_optimizer(run: Script) -> None:
    import torch_optimizer

    for name in ("DiffGrad", "Yogi", "QHAdam", "Lamb", "NovoGrad", "PID"):
        model = run.ddp(mlp())
        optimizer = getattr(torch_optimizer, name)(model.parameters(), lr=0.01)
        run.attach(model, optimizer)
        fit(run, optimizer, model, 7)


@adversarial(needs=("torch_optimizer",), fallback="")
def test_lookahead_of_torch_optimizer_attached(run: Script) -> None:
    import torch_optimizer

    model = run.ddp(mlp())
    optimizer = torch_optimizer.Lookahead(torch_optimizer.Yogi(model.parameters(), lr=0.01), k=3)
    run.attach(model, optimizer)
    fit(run, optimizer, model)
    optimizer.state_dict = dict  # its own raises, with plain DDP as well


@adversarial(needs=("came_pytorch",), fallback="")
def test_came_factors_second_moments(run: Script) -> None:
    from came_pytorch import CAME

    model, optimizer = run.train(mlp(), CAME, lr=0.01, betas=(0.9, 0.99, 0.999))
    fit(run, optimizer, model)


@adversarial(needs=("grokfast_pytorch",), fallback="")
def test_grokfast_adamw_filters_slow_gradients(run: Script) -> None:
    from grokfast_pytorch import GrokFastAdamW

    model, optimizer = run.train(mlp(), GrokFastAdamW, lr=0.01, grokfast_after_step=4)
    fit(run, optimizer, model)


@adversarial(needs=("bitsandbytes",), fallback="")
def test_bitsandbytes_in_32_bits(run: Script) -> None:
    import bitsandbytes

    try:
        probe = torch.nn.Parameter(torch.ones(4))
        probe.grad = torch.ones(4)
        bitsandbytes.optim.AdamW32bit([probe], lr=0.01).step()
    except (RuntimeError, NotImplementedError, AttributeError):
        optimizer_class: Any = Adam  # no kernels for the CPU in this version
    else:
        optimizer_class = bitsandbytes.optim.AdamW32bit
    model, optimizer = run.train(mlp(), optimizer_class, lr=0.01)
    fit(run, optimizer, model)


@adversarial(needs=("higher",))
def test_inner_loop_of_higher_between_outer_steps(run: Script) -> None:
    import higher

    net = mlp()
    model, optimizer = run.train(net, Adam, lr=0.02)
    for x, y in run.batches():
        loss = train_step(model, optimizer, x, y)
        inner = SGD(net.parameters(), lr=0.1)
        with higher.innerloop_ctx(net, inner) as (copy, fast):
            fast.step(mse(copy(x), y))
            run.log(mse(copy(x), y), loss)


@adversarial(needs=("loralib",), three=True)
def test_lora_merges_on_eval_and_unmerges_on_train(run: Script) -> None:
    import loralib

    net = torch.nn.Sequential(
        loralib.Linear(8, 16, r=4),
        torch.nn.ReLU(),
        loralib.MergedLinear(16, 18, r=2, enable_lora=[True, False, True]),
        torch.nn.ReLU(),
        loralib.Linear(18, 4, r=2),
    )
    loralib.mark_only_lora_as_trainable(net, bias="lora_only")
    model = run.ddp(net)
    optimizer = Adam([p for p in model.parameters() if p.requires_grad], lr=0.05)
    run.attach(model, optimizer)
    for step, (x, y) in enumerate(run.batches()):
        run.log(train_step(model, optimizer, x, y))
        if step % 2:
            model.eval()
            with torch.no_grad():
                run.log(model(x), net[0].weight)
            model.train()


@adversarial(needs=("vector_quantize_pytorch",))
def test_vector_quantizer_with_ema_codebook(run: Script) -> None:
    from vector_quantize_pytorch import VectorQuantize

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = torch.nn.Linear(8, 6), mlp(6)
            self.quantizer = VectorQuantize(dim=6, codebook_size=8, decay=0.8, commitment_weight=1.0)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            z, _, loss = self.quantizer(self.encoder(x).unsqueeze(0))
            return self.decoder(z[0]), loss.sum()

    model, optimizer = run.train(Net(), Adam, lr=0.02)
    for x, y in run.batches():
        output, commitment = model(x)
        loss = mse(output, y) + commitment
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss)
