"""composer: `Trainer` with micro-batches and checkpoints; with `--options` clipping and an average of weights."""

import sys
from pathlib import Path

import digests
import made_up
import torch
from composer import Trainer
from composer.algorithms import EMA, GradientClipping, LabelSmoothing
from composer.models import ComposerClassifier
from composer.utils import dist
from torch.utils.data import DataLoader


def main() -> None:
    torch.manual_seed(5)
    data = made_up.points(96)
    dist.initialize_dist("cpu")
    loader = DataLoader(data, batch_size=8, sampler=dist.get_sampler(data, shuffle=True))
    evaluated = DataLoader(data, batch_size=8, sampler=dist.get_sampler(data))
    model = ComposerClassifier(made_up.net(), num_classes=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = (
        [EMA(half_life=None, smoothing=0.9, update_interval="2ba"), GradientClipping("norm", 1.0)]
        if "--options" in sys.argv
        else []
    )
    trainer = Trainer(
        model=model, train_dataloader=loader, eval_dataloader=evaluated, max_duration="5ep", optimizers=optimizer,
        device="cpu", seed=5, device_train_microbatch_size=4, algorithms=[LabelSmoothing(0.1), *options],
        save_folder="saved", save_filename="ep{epoch}.pt", save_overwrite=True, progress_bar=False,
    )  # fmt: skip
    trainer.fit()
    dist.barrier()
    digests.say(model, optimizer, Path("saved/ep5.pt"))
    trainer.close()


if __name__ == "__main__":
    main()
