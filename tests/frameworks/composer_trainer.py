"""composer: `Trainer` with micro-batches, an average of weights, clipping if told so, and checkpoints."""

import os
from pathlib import Path

import digests
import torch
from composer import Trainer
from composer.algorithms import EMA, GradientClipping, LabelSmoothing
from composer.models import ComposerClassifier
from composer.utils import dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(12, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 3))
    data = TensorDataset(torch.randn(96, 12), torch.randint(0, 3, (96,)))
    dist.initialize_dist("cpu")
    loader = DataLoader(data, batch_size=8, sampler=dist.get_sampler(data, shuffle=True))
    model = ComposerClassifier(net, num_classes=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    algorithms = [LabelSmoothing(0.1)]
    algorithms += [EMA(smoothing=0.9, update_interval="2ba")] if os.environ.get("EMA") else []
    algorithms += [GradientClipping("norm", 1.0)] if os.environ.get("CLIP") else []
    trainer = Trainer(
        model=model, train_dataloader=loader, eval_dataloader=DataLoader(data, batch_size=8, sampler=dist.get_sampler(data)),
        max_duration="5ep", optimizers=optimizer, device="cpu", seed=5, device_train_microbatch_size=4,
        algorithms=algorithms, save_folder="saved", save_filename="ep{epoch}.pt", save_overwrite=True, progress_bar=False,
        ddp_sync_strategy=os.environ.get("SYNC"),
    )  # fmt: skip
    trainer.fit()
    dist.barrier()
    digests.say(model, optimizer, Path("saved/ep5.pt"))
    trainer.close()


if __name__ == "__main__":
    main()
