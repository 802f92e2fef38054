"""Optimizers and wrappers that people install. Each is skipped where its package is missing. One of a kind runs before
each change.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, AdamW

from adversarial import Script, adversarial
from adversary.nets import mlp, mse, train_step


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


@pytest.mark.nightly
@adversarial(needs=("timm",), fallback="")
def test_more_optimizers_of_timm_by_name(run: Script) -> None:
    from timm.optim import create_optimizer_v2

    for name in ("laprop", "adopt", "mars", "cadamw", "larc", "novograd"):
        model = run.ddp(mlp())
        optimizer = create_optimizer_v2(model.module, opt=name, lr=0.01, weight_decay=0.05)
        run.attach(model, optimizer)
        fit(run, optimizer, model, 7)


@pytest.mark.nightly
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
    for step, (x, y) in enumerate(run.batches()):
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


@pytest.mark.nightly
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


@pytest.mark.nightly
@adversarial(needs=("torch_optimizer",), fallback="")
def test_lookahead_of_torch_optimizer_attached(run: Script) -> None:
    import torch_optimizer

    model = run.ddp(mlp())
    optimizer = torch_optimizer.Lookahead(torch_optimizer.Yogi(model.parameters(), lr=0.01), k=3)
    run.attach(model, optimizer)
    fit(run, optimizer, model)
    optimizer.state_dict = dict  # its own raises, with plain DDP as well


@pytest.mark.nightly
@adversarial(needs=("came_pytorch",), fallback="")
def test_came_factors_second_moments(run: Script) -> None:
    from came_pytorch import CAME

    model, optimizer = run.train(mlp(), CAME, lr=0.01, betas=(0.9, 0.99, 0.999))
    fit(run, optimizer, model)


@pytest.mark.nightly
@adversarial(needs=("grokfast_pytorch",), fallback="")
def test_grokfast_adamw_filters_slow_gradients(run: Script) -> None:
    from grokfast_pytorch import GrokFastAdamW

    model, optimizer = run.train(mlp(), GrokFastAdamW, lr=0.01, grokfast_after_step=4)
    fit(run, optimizer, model)


@pytest.mark.nightly
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


@pytest.mark.nightly
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


@pytest.mark.nightly
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


@adversarial(needs=("pytorch_optimizer",), fallback="")
def test_optimizers_of_pytorch_optimizer(run: Script) -> None:
    import pytorch_optimizer

    for name in ("adamp", "tiger", "stableadamw", "amos", "adashift", "soap"):
        model = run.ddp(mlp())
        optimizer = pytorch_optimizer.load_optimizer(name)(model.parameters(), lr=0.01)
        run.attach(model, optimizer)
        fit(run, optimizer, model, 7)


@pytest.mark.nightly
@adversarial(needs=("pytorch_optimizer",), fallback="")
def test_more_optimizers_of_pytorch_optimizer(run: Script) -> None:
    import pytorch_optimizer

    for name in ("shampoo", "lars", "aida", "grams", "srmm", "swats"):
        model = run.ddp(mlp())
        optimizer = pytorch_optimizer.load_optimizer(name)(model.parameters(), lr=0.01)
        run.attach(model, optimizer)
        fit(run, optimizer, model, 7)


@pytest.mark.nightly
@adversarial(needs=("schedulefree",), fallback="")
def test_schedule_free_wrapper_around_sgd(run: Script) -> None:
    from schedulefree import ScheduleFreeWrapper

    model = run.ddp(mlp())
    optimizer = ScheduleFreeWrapper(SGD(model.parameters(), lr=0.05), momentum=0.9)
    run.attach(model, optimizer.base)
    optimizer.train()
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        optimizer.eval()
        run.log([p.norm() for p in model.parameters()])
        optimizer.train()


@pytest.mark.nightly
@adversarial(needs=("schedulefree",), fallback="")
def test_schedule_free_sgd_closure_and_radam(run: Script) -> None:
    from schedulefree import RAdamScheduleFree, SGDScheduleFreeClosure

    net = mlp()
    model = run.ddp(net)
    one = RAdamScheduleFree(net[0].parameters(), lr=0.02)
    two = SGDScheduleFreeClosure([*net[2].parameters(), *net[4].parameters()], lr=0.2)
    run.attach(model, one, two)
    one.train()
    for x, y in run.batches():

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            model.zero_grad()
            loss = mse(model(x), y)
            loss.backward()
            return loss

        run.log(two.step(closure))
        one.step()


@pytest.mark.nightly
@adversarial(needs=("dadaptation",), fallback="")
def test_d_adaptation_of_adam_and_sgd(run: Script) -> None:
    import dadaptation

    for cls in (dadaptation.DAdaptAdam, dadaptation.DAdaptSGD, dadaptation.DAdaptLion):
        model, optimizer = run.train(mlp(), cls, lr=1.0)
        fit(run, optimizer, model, 8)


@pytest.mark.nightly
@adversarial(needs=("adabelief_pytorch",), fallback="")
def test_adabelief_of_its_authors(run: Script) -> None:
    from adabelief_pytorch import AdaBelief

    model, optimizer = run.train(mlp(), AdaBelief, lr=0.01, print_change_log=False)
    fit(run, optimizer, model)


@pytest.mark.nightly
@adversarial(needs=("adam_atan2_pytorch",), fallback="")
def test_adam_atan2_and_its_relatives(run: Script) -> None:
    from adam_atan2_pytorch import AdamAtan2, AdoptAtan2

    for cls in (AdamAtan2, AdoptAtan2):
        model, optimizer = run.train(mlp(), cls, lr=0.01)
        fit(run, optimizer, model, 8)


@pytest.mark.nightly
@adversarial(needs=("torch_optimizer",), fallback="")
def test_the_other_optimizers_of_torch_optimizer(run: Script) -> None:
    import torch_optimizer

    for name in ("AccSGD", "AdaBound", "Apollo", "Ranger", "Shampoo", "SGDP"):
        model = run.ddp(mlp())
        optimizer = getattr(torch_optimizer, name)(model.parameters(), lr=0.01)
        run.attach(model, optimizer)
        fit(run, optimizer, model, 7)


@pytest.mark.nightly
@adversarial(needs=("heavyball",), fallback="")
def test_foreach_optimizers_of_heavyball(run: Script) -> None:
    import heavyball

    heavyball.utils.compile_mode = None
    for cls in (heavyball.AdamW, heavyball.LaProp):
        model, optimizer = run.train(mlp(), cls, lr=0.01)
        fit(run, optimizer, model, 8)


@pytest.mark.nightly
@adversarial(needs=("ema_pytorch",))
def test_post_hoc_ema_and_switch_ema(run: Script) -> None:
    from ema_pytorch import EMA

    net = mlp()
    model, optimizer = run.train(net, AdamW, lr=0.02)
    ema = EMA(net, beta=0.8, update_every=1, update_model_with_ema_every=4, update_after_step=0)
    for x, y in run.batches():
        train_step(model, optimizer, x, y)
        ema.update()
        run.log(ema(x))


@adversarial(needs=("grokfast_pytorch",))
def test_gradfilter_functions_of_grokfast(run: Script) -> None:
    net = mlp()
    # With views of buckets, plain DDP adds up gradients that `.grad.data =` has replaced (seen on torch 2.15).
    model = run.ddp(net, gradient_as_bucket_view=False)
    optimizer = Adam(model.parameters(), lr=0.02)
    run.attach(model, optimizer)
    slow: dict[str, torch.Tensor] = {}
    for x, y in run.batches():
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()
        for n, p in net.named_parameters():
            slow[n] = slow.get(n, 0) * 0.9 + p.grad.data.detach() * 0.1
            p.grad.data = p.grad.data + slow[n]
        run.log([p.grad for p in net.parameters()])


@adversarial(needs=("peft",))
def test_peft_adapters_are_merged_and_disabled(run: Script) -> None:
    from peft import LoraConfig, get_peft_model

    net = get_peft_model(mlp(), LoraConfig(r=4, target_modules=["0", "2", "4"], lora_dropout=0.1))
    model = run.ddp(net)
    optimizer = AdamW([p for p in net.parameters() if p.requires_grad], lr=0.05)
    run.attach(model, optimizer)
    for step, (x, y) in enumerate(run.batches()):
        run.log(train_step(model, optimizer, x, y))
        if step % 3 == 2:
            with torch.no_grad(), net.disable_adapter():
                run.log(net(x))
            net.eval()
            net.merge_adapter()
            run.log(net(x))
            net.unmerge_adapter()
            net.train()


@pytest.mark.nightly
@adversarial(needs=("pytorch_metric_learning",))
def test_losses_of_metric_learning_with_parameters_of_their_own(run: Script) -> None:
    from pytorch_metric_learning.losses import ArcFaceLoss, ProxyAnchorLoss

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = mlp()
            self.arc, self.proxy = ArcFaceLoss(3, 4), ProxyAnchorLoss(3, 4)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            e = self.trunk(x)
            return self.arc(e, labels) + self.proxy(e, labels)

    model, optimizer = run.train(Net(), SGD, lr=0.05, momentum=0.9)
    for x, _ in run.batches():
        optimizer.zero_grad()
        loss = model(x, torch.arange(len(x)) % 3)
        loss.backward()
        optimizer.step()
        run.log(loss)
