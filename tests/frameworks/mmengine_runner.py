"""mmengine: `Runner` with validation and checkpoints; `--options`: accumulation, clipping and an average of weights."""

import sys
from pathlib import Path

import cpu_ddp  # noqa: F401
import digests
import made_up
import torch
from mmengine.evaluator import BaseMetric, Evaluator
from mmengine.model import BaseModel
from mmengine.registry import MODELS
from mmengine.runner import Runner
from torch import nn
from torch.nn.functional import cross_entropy


@MODELS.register_module()
class Net(BaseModel):
    """A model as mmengine wants it: its loss in training, its predictions in validation."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Dropout(0.1), made_up.net())

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
    has_options = "--options" in sys.argv
    loader = {"dataset": made_up.points(96), "batch_size": 8, "collate_fn": {"type": "default_collate"}}
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
            "accumulative_counts": 2 if has_options else 1,
            "clip_grad": {"max_norm": 0.5} if has_options else None,
        },
        param_scheduler={"type": "ExponentialLR", "gamma": 0.9, "by_epoch": True},
        custom_hooks=[{"type": "EMAHook", "momentum": 0.1}] if has_options else None,
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
