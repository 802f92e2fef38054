"""Callbacks of frameworks, and `attach` for Accelerate; tests/recipes compares what they train with plain DDP."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD

import launched
from models import OddNet

TIMEOUT_S = 240


@pytest.mark.nightly
@pytest.mark.parametrize("framework", ["lightning", "transformers"])
def test_one_trainer_trains_twice_as_plain_ddp_does(framework: str) -> None:
    pytest.importorskip(framework)
    script = launched.ROOT / "tests" / "support" / "two_fits.py"
    launched.run(*launched.torchrun(), script, framework, variables={"CUDA_VISIBLE_DEVICES": ""}, timeout_s=TIMEOUT_S)


def test_lightning_without_ddp_trains_and_says_that_nothing_is_attached(caplog: pytest.LogCaptureFixture) -> None:
    lightning = pytest.importorskip("lightning")
    from ddp_crossover.integrations.lightning import DearCallback

    class Module(lightning.LightningModule):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(2, 1)

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            with dear.batch(len(batch)):
                return self.net(batch).sum()

        def configure_optimizers(self) -> SGD:
            return SGD(self.parameters(), lr=0.1)

    dear = DearCallback(weighted=True)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(accelerator="cpu", devices=1, max_steps=2, callbacks=[dear], **quiet)
    with caplog.at_level(logging.WARNING, "ddp_crossover"):
        trainer.fit(Module(), torch.utils.data.DataLoader(torch.randn(4, 2)))
    assert dear.state is None
    assert "SingleDeviceStrategy uses no DistributedDataParallel" in caplog.text


@pytest.mark.nightly
@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_the_callback_is_of_the_lightning_that_the_script_uses(package: str) -> None:
    pytest.importorskip(package)
    program = (
        f"import {package} as used, ddp_crossover as dx\n"
        "assert issubclass(dx.integrations.lightning.DearCallback, used.Callback)"
    )
    launched.run("-c", program, timeout_s=TIMEOUT_S)


def test_transformers_without_ddp_trains_and_says_that_nothing_is_attached(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from ddp_crossover.integrations.transformers import DearCallback

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(2, 1)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            with dear.batch(len(x)):
                return {"loss": self.net(x).sum()}

    dear = DearCallback(weighted=True)
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=2, use_cpu=True, save_strategy="no", report_to="none", disable_tqdm=True
    )
    data = [{"x": torch.randn(2)} for _ in range(16)]
    with caplog.at_level(logging.WARNING, "ddp_crossover"):
        transformers.Trainer(Model(), arguments, train_dataset=data, callbacks=[dear]).train()
    assert dear.state is None
    assert caplog.text.count("the Trainer uses no DistributedDataParallel") == 1


def _batch_without_ddp() -> str:
    from ddp_crossover.integrations.batches import Batches

    with pytest.raises(RuntimeError) as caught:
        Batches().batch(3)
    return str(caught.value)


def test_a_batch_of_one_of_several_processes_that_nothing_weights_is_refused(on_ranks) -> None:
    for said in on_ranks(_batch_without_ddp, 2):
        assert "let the Trainer use DDP" in said


class _Accelerator:
    """What `attach` asks an Accelerator for; a real one of several processes is in tests/recipes."""

    def __init__(self, num_processes: int) -> None:
        self.num_processes = num_processes


def test_accelerate_with_one_process_attaches_nothing_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    from ddp_crossover.integrations.accelerate import attach

    model = OddNet()
    with caplog.at_level(logging.WARNING, "ddp_crossover"):
        assert attach(_Accelerator(1), model, SGD(model.parameters(), lr=0.1)) is None
    assert "one process only" in caplog.text


def test_accelerate_refuses_a_model_that_was_not_prepared() -> None:
    from ddp_crossover.integrations.accelerate import attach

    model = OddNet()
    with pytest.raises(TypeError, match=r"got OddNet: .* accelerator\.prepare"):
        attach(_Accelerator(2), model, SGD(model.parameters(), lr=0.1))
