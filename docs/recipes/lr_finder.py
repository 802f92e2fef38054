"""A learning rate found by a range test, then lowered where the loss no longer falls (`ReduceLROnPlateau`).

    torchrun --nproc-per-node 2 docs/recipes/lr_finder.py --dear

`--dear` adds one line. The data are random numbers from a seed, and the model is tiny, so that it runs anywhere. The
range test trains with growing rates, and puts model and optimizer back; both hold what plain DDP would hold.
"""

import argparse
import copy
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ReduceLROnPlateau

import ddp_crossover as dx


def mean_over_ranks(loss):
    """The same number on all ranks, so that they choose the same rates."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def range_test(step, model, optimizer, lowest=1e-4, highest=1.0, steps=16):
    """Train with rates that grow from step to step, put everything back, and return a tenth of the best rate."""
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    losses = {}
    for index in range(steps):
        rate = lowest * (highest / lowest) ** (index / (steps - 1))
        for group in optimizer.param_groups:
            group["lr"] = rate
        losses[rate] = mean_over_ranks(step(index))
        if losses[rate] > 4 * min(losses.values()):
            break
    model.load_state_dict(before[0])
    optimizer.load_state_dict(before[1])
    return min(losses, key=losses.__getitem__) / 10


def main() -> None:
    """Train, and save what came out of it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dear", action="store_true", help="overlap communication with compute")
    parser.add_argument("--out", type=Path, help="folder for the final state of every rank")
    parser.add_argument("--epochs", type=int, default=8)
    args = parser.parse_args()

    dist.init_process_group()
    rank = dist.get_rank()
    device = f"cuda:{rank % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)).to(device)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    if args.dear:
        state = dx.attach(ddp, optimizer, fusion_mb=0.005)  # without fusion_mb the size is searched for

    generator = torch.Generator().manual_seed(rank)
    batches = [
        (torch.randn(8, 16, generator=generator).to(device), torch.randn(8, 4, generator=generator).to(device))
        for _ in range(8)
    ]

    def step(index):
        x, y = batches[index % len(batches)]
        optimizer.zero_grad()
        loss = mse_loss(ddp(x), y)
        loss.backward()
        optimizer.step()
        return loss

    rate = range_test(step, model, optimizer)
    for group in optimizer.param_groups:
        group["lr"] = rate
    plateau = ReduceLROnPlateau(optimizer, patience=1)
    for _ in range(args.epochs):
        losses = [step(index).detach() for index in range(len(batches))]
        plateau.step(mean_over_ranks(torch.stack(losses).mean()))

    if rank == 0:
        print(f"began with a rate of {rate:.1e}, ended with {plateau.get_last_lr()[0]:.1e}, loss {losses[-1]:.4f}")
        if args.dear:
            print(state.stats())
    if args.out:
        state_dicts = {"model": model, "optimizer": optimizer, "scheduler": plateau}
        torch.save({name: each.state_dict() for name, each in state_dicts.items()}, args.out / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
