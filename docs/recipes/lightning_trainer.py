"""Lightning's Trainer, with automatic or with manual optimization, checkpoints and resuming.

    torchrun --nproc-per-node 2 docs/recipes/lightning_trainer.py --dear --output-dir runs
    torchrun --nproc-per-node 2 docs/recipes/lightning_trainer.py --dear --output-dir runs --resume runs/epoch=1.ckpt

`--dear` adds one callback. The data are random numbers from a seed, and the model is tiny, so that it runs anywhere.
"""

import argparse
from itertools import pairwise
from pathlib import Path

import torch
from lightning import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from ddp_crossover.integrations.lightning import DearCallback


class Regression(LightningModule):
    """A multi-layer perceptron."""

    def __init__(self, manual: bool) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        widths = (16, 64, 64, 4)
        layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise(widths)]
        self.net = nn.Sequential(*layers)

    def training_step(self, batch, batch_index):
        x, y = batch
        loss = mse_loss(self.net(x), y)
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def validation_step(self, batch, batch_index):
        x, y = batch
        self.log("val_loss", mse_loss(self.net(x), y), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    """Train, and save what came out of it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dear", action="store_true", help="overlap communication with compute")
    parser.add_argument("--out", type=Path, help="folder for the final state of every rank")
    parser.add_argument("--max-epochs", type=int, default=4)
    parser.add_argument("--manual", action="store_true", help="optimize by hand")
    parser.add_argument("--gradient-clip-val", type=float)
    parser.add_argument("--accumulate", type=int, default=1, help="backward passes per optimizer step")
    parser.add_argument("--output-dir", type=Path, default="runs", help="folder for checkpoints")
    parser.add_argument("--resume", type=Path, help="checkpoint to go on from")
    args = parser.parse_args()

    seed_everything(3, verbose=False)
    data, held_out = (TensorDataset(torch.randn(size, 16), torch.randn(size, 4)) for size in (80, 16))
    module = Regression(args.manual)
    callbacks = [ModelCheckpoint(args.output_dir, filename="{epoch}", save_top_k=-1)]
    if args.dear:
        callbacks += [dear := DearCallback(fusion_mb=0.005)]  # without fusion_mb the size is searched for
    trainer = Trainer(
        strategy="ddp",
        devices=2,
        accelerator="auto" if torch.cuda.device_count() > 1 else "cpu",
        max_epochs=args.max_epochs,
        gradient_clip_val=args.gradient_clip_val,
        accumulate_grad_batches=args.accumulate,
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(data, batch_size=8, shuffle=True)
    trainer.fit(module, loader, DataLoader(held_out, batch_size=8), ckpt_path=args.resume)

    if args.dear and trainer.is_global_zero:
        print(dear.state.stats())
    if args.out:
        state = {"model": module.state_dict(), "optimizer": trainer.optimizers[0].state_dict()}
        torch.save(state, args.out / f"{trainer.global_rank}.pt")


if __name__ == "__main__":
    main()
