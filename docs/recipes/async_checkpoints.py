"""Checkpoints that are written while training goes on: `torch.distributed.checkpoint.async_save`.

    torchrun --nproc-per-node 2 docs/recipes/async_checkpoints.py --dear --output-dir runs
    torchrun --nproc-per-node 2 docs/recipes/async_checkpoints.py --dear --output-dir runs --resume runs/step=8

`--dear` adds one line. The data are random numbers from a seed, and the model is tiny, so that it runs anywhere. A
checkpoint holds what plain DDP would hold after that step. The step that makes it waits for its updates.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import ddp_crossover as dx


def main() -> None:
    """Train, and save a checkpoint every few steps."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dear", action="store_true", help="overlap communication with compute")
    parser.add_argument("--out", type=Path, help="folder for the final state of every rank")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=4)
    parser.add_argument("--output-dir", type=Path, help="folder for checkpoints")
    parser.add_argument("--resume", type=Path, help="checkpoint to go on from")
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

    first_step = 0
    if args.resume:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        checkpoint = {"model": model_state, "optimizer": optimizer_state, "step": torch.tensor(0)}
        dcp.load(checkpoint, checkpoint_id=args.resume)
        set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
        first_step = int(checkpoint["step"])

    of_checkpoints = dist.new_group(backend="gloo")  # its thread's collectives must not mix with those of training
    saving = None
    for step in range(first_step, args.steps):
        generator = torch.Generator().manual_seed(step * dist.get_world_size() + rank)
        x, y = torch.randn(8, 16, generator=generator).to(device), torch.randn(8, 4, generator=generator).to(device)
        optimizer.zero_grad()
        loss = mse_loss(ddp(x), y)
        loss.backward()
        optimizer.step()
        if args.output_dir and (step + 1) % args.save_every == 0:
            if saving:
                saving.result()  # one at a time
            model_state, optimizer_state = get_state_dict(model, optimizer)
            checkpoint = {"model": model_state, "optimizer": optimizer_state, "step": torch.tensor(step + 1)}
            folder = args.output_dir / f"step={step + 1}"
            saving = dcp.async_save(checkpoint, checkpoint_id=folder, process_group=of_checkpoints)
            # It is copied by now. It shares its memory with the parameters, whose updates would be applied at once.
            del checkpoint, model_state, optimizer_state
    if saving:
        saving.result()

    if rank == 0:
        print(f"loss {loss.item():.4f}")
        if args.dear:
            print(state.stats())
    if args.out:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, args.out / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
