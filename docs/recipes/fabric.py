"""A loop with Lightning Fabric.

    torchrun --nproc-per-node 2 docs/recipes/fabric.py --dear

`--dear` adds one line. The data are random numbers from a seed, and the model is tiny, so that it runs anywhere.
"""

import argparse
from pathlib import Path

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import ddp_crossover as dx


def main() -> None:
    """Train, and save what came out of it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dear", action="store_true", help="overlap communication with compute")
    parser.add_argument("--out", type=Path, help="folder for the final state of every rank")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=1, help="backward passes per optimizer step")
    parser.add_argument("--clip", type=float, help="largest norm of the gradients")
    args = parser.parse_args()

    fabric = Fabric(strategy="ddp", devices=2, accelerator="auto" if torch.cuda.device_count() > 1 else "cpu")
    fabric.launch()
    fabric.seed_everything(3, verbose=False)
    data = TensorDataset(torch.randn(80, 16), torch.randn(80, 4))
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=8, shuffle=True))
    if args.dear:
        state = dx.attach(model, optimizer, fusion_mb=0.005)  # without fusion_mb the size is searched for

    for _ in range(args.epochs):
        for index, (x, y) in enumerate(loader):
            is_last = (index + 1) % args.accumulate == 0
            with fabric.no_backward_sync(model, enabled=not is_last):
                loss = mse_loss(model(x), y)
                fabric.backward(loss / args.accumulate)
            if is_last:
                if args.clip:
                    fabric.clip_gradients(model, optimizer, max_norm=args.clip)
                optimizer.step()
                optimizer.zero_grad()

    fabric.print(f"loss {loss.item():.4f}")
    if args.dear:
        fabric.print(state.stats())
    if args.out:
        state_dicts = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state_dicts, args.out / f"{fabric.global_rank}.pt")


if __name__ == "__main__":
    main()
