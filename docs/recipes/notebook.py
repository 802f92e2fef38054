"""What a cell of a notebook does: Accelerate's `notebook_launcher` starts two processes.

    python docs/recipes/notebook.py --dear

`--dear` adds one line. The data are random numbers from a seed, and the model is tiny, so that it runs anywhere. In a
notebook, `train` is in one cell and the launch in the next; on GPUs, no cell before them may use CUDA.
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator, notebook_launcher
from accelerate.utils import set_seed
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from ddp_crossover.integrations.accelerate import attach


def train(dear: bool, out: Path | None, epochs: int) -> None:
    """What each process does."""
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    set_seed(3)
    data = TensorDataset(torch.randn(80, 16), torch.randn(80, 4))
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(data, batch_size=8, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if dear:
        state = attach(accelerator, model, optimizer, fusion_mb=0.005)  # without fusion_mb the size is searched for

    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()

    accelerator.print(f"loss {loss.item():.4f}")
    if dear:
        accelerator.print(state.stats())
    if out:
        state_dicts = {"model": accelerator.unwrap_model(model).state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state_dicts, out / f"{accelerator.process_index}.pt")
    accelerator.end_training()


def main() -> None:
    """Train on two processes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dear", action="store_true", help="overlap communication with compute")
    parser.add_argument("--out", type=Path, help="folder for the final state of every rank")
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()

    notebook_launcher(train, (args.dear, args.out, args.epochs), num_processes=2)


if __name__ == "__main__":
    main()
