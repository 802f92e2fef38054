"""mmengine: `Runner` with an `OptimWrapper` that accumulates and clips, an average of weights, validation, checkpoints."""

import os
from pathlib import Path

import cpu_ddp  # noqa: F401
import digests
import torch
from mmengine.evaluator import BaseMetric, Evaluator
from mmengine.model import BaseModel
from mmengine.registry import MODELS
from mmengine.runner import Runner
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset


class Points(Dataset):
    """Points of three classes."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(96, 12, generator=generator)
        self.y = self.x[:, :3].argmax(1)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]


@MODELS.register_module()
class Net(BaseModel):
    """A model as mmengine wants it: its loss in training, its predictions in validation."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(12, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Dropout(0.1), nn.Linear(48, 48), nn.ReLU(),
            nn.Linear(48, 3),
        )  # fmt: skip

    def forward(self, x: torch.Tensor, y: torch.Tensor, mode: str) -> object:
        scores = self.net(x)
        return {"loss": cross_entropy(scores, y)} if mode == "loss" else (scores, y)


class Accuracy(BaseMetric):
    """Correct predictions, per sample."""

    def process(self, data_batch: object, data_samples: tuple[torch.Tensor, torch.Tensor]) -> None:
        scores, y = data_samples
        self.results.append({"correct": (scores.argmax(1) == y).sum().item(), "samples": len(y)})

    def compute_metrics(self, results: list[dict[str, int]]) -> dict[str, float]:
        return {"accuracy": sum(one["correct"] for one in results) / sum(one["samples"] for one in results)}


def main() -> None:
    torch.distributed.init_process_group("gloo")  # mmengine would choose a GPU
    loader = {"dataset": Points(), "batch_size": 8, "num_workers": 0, "collate_fn": {"type": "default_collate"}}
    runner = Runner(
        model={"type": "Net"},
        work_dir="work",
        train_dataloader={**loader, "sampler": {"type": "DefaultSampler", "shuffle": True}},
        val_dataloader={**loader, "sampler": {"type": "DefaultSampler", "shuffle": False}},
        val_evaluator=Evaluator(Accuracy()),
        val_cfg={},
        train_cfg={"by_epoch": True, "max_epochs": 6, "val_interval": 2},
        optim_wrapper={
            "optimizer": {"type": "AdamW", "lr": 1e-2},
            "accumulative_counts": int(os.environ.get("ACCUMULATE", "1")),
            "clip_grad": {"max_norm": 0.5} if os.environ.get("CLIP") else None,
        },
        param_scheduler={"type": "ExponentialLR", "gamma": 0.9, "by_epoch": True},
        custom_hooks=[{"type": "EMAHook", "momentum": 0.1}] if os.environ.get("EMA") else None,
        launcher="pytorch",
        randomness={"seed": 5},
        default_hooks={"checkpoint": {"type": "CheckpointHook", "interval": 2}},
        log_level="WARNING",
    )
    runner.train()
    torch.distributed.barrier()
    digests.say(runner.model, runner.optim_wrapper.optimizer, Path("work/epoch_6.pth"))


if __name__ == "__main__":
    main()
