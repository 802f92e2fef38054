"""From three ranks on, plain DDP adds in another order: each single step is compared, from equal
parameters.

Sums of three or four fp32 numbers in another order differ by a few units in the last place of the
largest summand. Relative to the *sum* that is unbounded (they may cancel), hence the absolute
tolerance: 1e-7 is one unit in the last place of a parameter of size 1, and 0.1 to 0.01 of those of
a gradient times a learning rate as used here.
"""

from __future__ import annotations

import copy

import pytest
import torch

from equivalence import Case, Run, optimizer, snapshot
from models import BatchNormNet, DeepNet, OddNet
from optimizers import OPTIMIZERS

RTOL = 1e-6
ATOL = 1e-7

OPTIMIZERS_TO_STEP = {name: OPTIMIZERS[name] for name in ("sgd", "sgd_momentum")} | {
    # Adam divides each gradient by its own size, and so magnifies errors of the small ones. `eps`
    # bounds that.
    "adamw": optimizer(torch.optim.AdamW, lr=1e-3, eps=1e-3)
}


class PlainRun(Run):
    """DDP as it comes, on any world size."""

    def attach(self) -> None:
        self.attached = True


def compare_single_steps(case: Case) -> None:
    """Before each of DeAR's steps its parameters and optimizer state go into a plain DDP, which
    steps too.
    """
    run, plain = Run(case, with_dear=True), PlainRun(case, with_dear=False)
    for index, (x, y) in enumerate(run.batches()):
        plain.model.load_state_dict(snapshot(run.model.state_dict()))
        plain.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
        for each in (run, plain):
            each.optimizer.zero_grad()
            each.loss(each.model(x), y).backward()
            each.optimizer.step()
        torch.testing.assert_close(
            dict(run.model.module.state_dict()),
            dict(plain.model.module.state_dict()),
            rtol=RTOL,
            atol=ATOL,
            msg=lambda text, index=index: f"step {index}: {text}",
        )
    run.detach()


@pytest.mark.parametrize(
    ("name", "model"),
    [("sgd_momentum", OddNet), ("adamw", DeepNet), ("sgd", BatchNormNet)],
)
def test_each_single_step_is_that_of_plain_ddp(on_ranks, name, model) -> None:
    world_size, strict = (3, True) if model is OddNet else (4, False)
    case = Case(model=model, optimizer=OPTIMIZERS_TO_STEP[name], world_size=world_size, strict=strict)
    on_ranks(compare_single_steps, world_size, case)
