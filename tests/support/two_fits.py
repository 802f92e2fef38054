"""Trains twice with one trainer, as plain DDP and with its callback; fails where they differ.

torchrun --nproc-per-node 2 two_fits.py lightning|transformers
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim import AdamW
from torch.utils.data import DataLoader

from equivalence import assert_same

FUSION_MB = 1e-3
STEPS = 8


def _data() -> Any:
    generator = torch.Generator().manual_seed(5)
    return [{"x": torch.randn(8, generator=generator), "y": torch.randn(2, generator=generator)} for _ in range(64)]


def _net() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 2))


def _assert_attached(states: list[Any]) -> None:
    assert states[0] is not states[1], "the second fit was not attached"
    for state in states:
        assert state.stats().pipelined_iterations > 0, state.stats()


def with_lightning(attached: bool) -> dict[str, Any]:
    """Call `fit` twice."""
    from lightning import LightningModule, Trainer

    from ddp_crossover.integrations.lightning import DearCallback

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = _net()

        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            return mse_loss(self.net(batch["x"]), batch["y"])

        def configure_optimizers(self) -> AdamW:
            return AdamW(self.parameters())

    module, dear, states = Module(), DearCallback(fusion_mb=FUSION_MB), []
    quiet: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, callbacks=[dear] if attached else [], **quiet
    )
    for max_epochs in (2, 4):
        trainer.fit_loop.max_epochs = max_epochs
        trainer.fit(module, DataLoader(_data(), batch_size=4))
        states.append(dear.state)
    if attached:
        _assert_attached(states)
    return {"model": module.state_dict(), "optimizer": trainer.optimizers[0].state_dict()}


def with_transformers(attached: bool) -> dict[str, Any]:
    """Call `train` twice."""
    from transformers import Trainer, TrainingArguments

    from ddp_crossover.integrations.transformers import DearCallback

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = _net()

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": mse_loss(self.net(x), y)}

    dear, states = DearCallback(fusion_mb=FUSION_MB), []
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=STEPS, use_cpu=True, save_strategy="no", report_to="none", eval_on_start=True,
            ddp_find_unused_parameters=False, label_names=["y"],
        )  # fmt: skip
        trainer = Trainer(
            Model(), arguments, train_dataset=_data(), eval_dataset=_data()[:8], callbacks=[dear] if attached else []
        )
        for _ in range(2):
            trainer.train()
            states.append(dear.state)
    if attached:
        _assert_attached(states)
    assert trainer.model is not None and trainer.optimizer is not None
    return {"model": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict()}


if __name__ == "__main__":
    train = {"lightning": with_lightning, "transformers": with_transformers}[sys.argv[1]]
    assert_same(train(True), train(False), sys.argv[1])
