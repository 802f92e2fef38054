"""Lightning's Trainer with ranks whose batches have different numbers of tokens.

    torchrun --nproc-per-node 2 docs/recipes/lightning_token_weights.py --weights batch

Gradients are those of the mean over all tokens of all ranks. `--weights none` shows what is wrong without: each rank's
mean counts the same. The data are random tokens from a seed, in sequences of 4 to 16, and the model is tiny, so that it
runs anywhere.
"""

import argparse
import os
from pathlib import Path

import torch
from lightning import LightningModule, Trainer, seed_everything
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from ddp_crossover.integrations.lightning import DearCallback

VOCABULARY, LENGTH, IGNORED, GLOBAL_BATCH = 64, 16, -100, 8


def sentences() -> TensorDataset:
    """192 sequences of random tokens, each its own target, and padding that the loss ignores."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(VOCABULARY, (192, LENGTH), generator=generator)
    lengths = torch.randint(4, LENGTH + 1, (192, 1), generator=generator)
    return TensorDataset(tokens, tokens.where(torch.arange(LENGTH) < lengths, IGNORED))


class Tagger(LightningModule):
    """Predicts a label for each token.

    Args:
        dear: a `DearCallback(weighted=True)`; without it each rank's mean counts the same.
    """

    def __init__(self, dear: DearCallback | None) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(VOCABULARY, 32), nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, VOCABULARY))
        self.dear = dear

    def on_train_batch_start(self, batch, batch_index):
        _, labels = batch
        self.tokens = int((labels != IGNORED).sum())

    def training_step(self, batch, batch_index):
        tokens, labels = batch
        return cross_entropy(self.net(tokens).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)

    def optimizer_step(self, epoch, batch_index, optimizer, closure):
        def weighted_closure():  # forward and backward
            with self.dear.batch(self.tokens):
                return closure()

        super().optimizer_step(epoch, batch_index, optimizer, weighted_closure if self.dear else closure)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    """Train, and save what came out of it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--weights", choices=["batch", "none"], default="batch")
    parser.add_argument("--out", type=Path, help="folder for the final state of every rank")
    parser.add_argument("--max-epochs", type=int, default=1)
    args = parser.parse_args()

    seed_everything(3, verbose=False)
    ranks = int(os.environ["WORLD_SIZE"])
    # Without fusion_mb the size is searched for.
    dear = DearCallback(weighted=True, fusion_mb=0.005) if args.weights == "batch" else None
    module = Tagger(dear)
    trainer = Trainer(
        strategy="ddp",
        devices=ranks,
        accelerator="auto" if torch.cuda.device_count() >= ranks else "cpu",
        max_epochs=args.max_epochs,
        callbacks=[dear] if dear else [],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(sentences(), batch_size=GLOBAL_BATCH // ranks, shuffle=True))

    if dear and trainer.is_global_zero:
        print(dear.state.stats())
    if args.out:
        torch.save(module.state_dict(), args.out / f"{trainer.global_rank}.pt")


if __name__ == "__main__":
    main()
