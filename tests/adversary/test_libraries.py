"""Optimizers that people install, of packages that the tests install, too. Each is skipped without."""

from __future__ import annotations

import pytest
import torch

from adversarial import Script, adversarial
from adversary.nets import fit, mlp, mse, train_step


def _named(*names: str) -> dict[str, str]:
    return {name: name for name in names}


OF_TIMM = _named("lamb", "adan", "sgdw", "madgradw", "rmsproptf", "laprop", "adopt", "mars", "cadamw", "larc")
OF_TIMM |= _named("novograd", "lookahead_adam")


@adversarial(needs="timm", cases=OF_TIMM, fallback="")
def test_optimizers_of_timm_by_name(run: Script, case: str) -> None:
    from timm.optim import create_optimizer_v2

    model = run.ddp(mlp())
    optimizer = create_optimizer_v2(model.module, opt=case, lr=0.01, weight_decay=0.05)
    run.attach(model, optimizer)
    fit(run, model, optimizer)


OF_PYTORCH_OPTIMIZER = _named("adamp", "tiger", "stableadamw", "amos", "adashift", "soap", "shampoo", "lars", "aida")
OF_PYTORCH_OPTIMIZER |= _named("grams", "srmm", "swats")


@adversarial(needs="pytorch_optimizer", cases=OF_PYTORCH_OPTIMIZER, fallback="")
def test_optimizers_of_pytorch_optimizer(run: Script, case: str) -> None:
    import pytorch_optimizer

    model, optimizer = run.train(mlp(), pytorch_optimizer.load_optimizer(case), lr=0.01)
    fit(run, model, optimizer)


@adversarial(needs="schedulefree", fallback="")
def test_schedule_free_adamw_with_train_and_eval(run: Script) -> None:
    from schedulefree import AdamWScheduleFree

    model, optimizer = run.train(mlp(), AdamWScheduleFree, lr=0.02, warmup_steps=3)
    optimizer.train()
    for step, (x, y) in enumerate(run.batches()):
        train_step(model, optimizer, x, y)
        if step % 4 == 3:
            optimizer.eval()
            with torch.no_grad():
                run.log(mse(model.module(x), y))
            optimizer.train()


@pytest.mark.nightly
@adversarial(needs="schedulefree", fallback="")
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
