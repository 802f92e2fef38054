"""TensorBoard or Weights & Biases: rank 0 logs the loss, and in each step how much of it hid.

    torchrun --nproc-per-node 2 docs/recipes/loggers.py --dear --log-dir runs
    WANDB_MODE=offline torchrun --nproc-per-node 2 docs/recipes/loggers.py --dear --log-dir runs --logger wandb

`--dear` adds two lines. The data are random numbers from a seed, and the model is tiny, so that it runs anywhere.
`flat()` waits for nothing, so logging it costs no overlap. Norms of gradients or weights would cost it in that step.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import ddp_crossover as dx


def tensorboard(folder: Path) -> tuple[Callable[[dict[str, float], int], None], Callable[[], None]]:
    """Return a function that logs figures of a step, and one to call at the end."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(folder)

    def log(figures, step):
        for name, value in figures.items():
            writer.add_scalar(name, value, step)

    return log, writer.close


def wandb(folder: Path) -> tuple[Callable[[dict[str, float], int], None], Callable[[], None]]:
    """The same."""
    import wandb

    run = wandb.init(project="recipe", dir=folder)
    return run.log, run.finish


def main() -> None:
    """Train, and save what came out of it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dear", action="store_true", help="overlap communication with compute")
    parser.add_argument("--out", type=Path, help="folder for the final state of every rank")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--log-dir", type=Path, default="runs")
    parser.add_argument("--logger", choices=["tensorboard", "wandb"], default="tensorboard")
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
    if rank == 0:
        log, end = {"tensorboard": tensorboard, "wandb": wandb}[args.logger](args.log_dir)

    generator = torch.Generator().manual_seed(rank)
    for step in range(args.steps):
        x, y = torch.randn(8, 16, generator=generator).to(device), torch.randn(8, 4, generator=generator).to(device)
        optimizer.zero_grad()
        loss = mse_loss(ddp(x), y)
        loss.backward()
        optimizer.step()
        if rank == 0:
            log({"train/loss": loss.item(), **(state.stats().flat() if args.dear else {})}, step)

    if rank == 0:
        end()
        print(f"loss {loss.item():.4f}")
        if args.dear:
            print(state.stats())
    if args.out:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, args.out / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
