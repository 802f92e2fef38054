"""speechbrain: `Brain.fit` with a checkpointer and its own scheduler; with `--accumulate` gradients of two batches."""

import sys
from pathlib import Path

import digests
import made_up
import speechbrain as sb
import torch
from speechbrain.nnet.schedulers import LinearScheduler
from speechbrain.utils.checkpoints import Checkpointer
from speechbrain.utils.distributed import ddp_init_group
from speechbrain.utils.seed import seed_everything
from torch import nn


class Points(torch.utils.data.Dataset):
    """Points of three classes, as dicts."""

    def __init__(self) -> None:
        self.x, self.y = made_up.points(96).tensors

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[index], "y": self.y[index]}


class Recipe(sb.Brain):
    """Two modules, each of which speechbrain puts into a DDP of its own."""

    def compute_forward(self, batch: dict[str, torch.Tensor], stage: sb.Stage) -> torch.Tensor:
        return self.modules.classifier(self.modules.encoder(batch["x"]))

    def compute_objectives(self, scores: torch.Tensor, batch: dict[str, torch.Tensor], stage: sb.Stage) -> torch.Tensor:
        return nn.functional.cross_entropy(scores, batch["y"])

    def on_stage_end(self, stage: sb.Stage, stage_loss: float, epoch: int | None = None) -> None:
        if stage == sb.Stage.VALID:
            _, rate = self.hparams.schedule(epoch)
            sb.nnet.schedulers.update_learning_rate(self.optimizer, rate)
            self.checkpointer.save_and_keep_only(meta={"loss": stage_loss}, min_keys=["loss"], num_to_keep=10)


def main() -> None:
    options = {"device": "cpu", "distributed_backend": "gloo", "noprogressbar": True}
    options["grad_accumulation_factor"] = 2 if "--accumulate" in sys.argv else 1
    ddp_init_group({"distributed_launch": True, "distributed_backend": "gloo"})
    seed_everything(5)
    modules = {
        "encoder": nn.Sequential(nn.Linear(12, 48), nn.LayerNorm(48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU()),
        "classifier": nn.Linear(48, 3),
    }
    saved = Checkpointer("saved", dict(modules))
    brain = Recipe(
        modules, lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
        {"schedule": LinearScheduler(1e-2, 1e-3, 6)}, options, saved,
    )  # fmt: skip
    data, loader = Points(), {"batch_size": 8}
    epochs = sb.utils.epoch_loop.EpochCounter(6)
    brain.fit(epochs, data, data, train_loader_kwargs={**loader, "shuffle": True}, valid_loader_kwargs=loader)
    torch.distributed.barrier()
    newest = sorted(Path("saved").iterdir(), key=lambda path: path.stat().st_mtime)[-1]
    saved_files = [newest / f"{name}.ckpt" for name in ("encoder", "classifier", "optimizer")]
    digests.say(brain.modules, brain.optimizer, *saved_files)


if __name__ == "__main__":
    main()
