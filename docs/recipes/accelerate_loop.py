"""A loop with Hugging Face Accelerate: gradient accumulation, clipping and a learning-rate schedule.

    torchrun --nproc-per-node 2 docs/recipes/accelerate_loop.py --dear
    accelerate launch --num_processes 2 docs/recipes/accelerate_loop.py --dear

`--dear` adds one line. The data are random numbers from a seed, and the model is tiny, so that it runs anywhere.
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from ddp_crossover.integrations.accelerate import attach


def main() -> None:
    """Train, and save what came out of it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dear", action="store_true", help="overlap communication with compute")
    parser.add_argument("--out", type=Path, help="folder for the final state of every rank")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--accumulate", type=int, default=2, help="backward passes per optimizer step")
    parser.add_argument("--max-grad-norm", type=float, help="largest norm of the gradients")
    args = parser.parse_args()

    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=args.accumulate)
    set_seed(3)
    data = TensorDataset(torch.randn(80, 16), torch.randn(80, 4))
    loader = DataLoader(data, batch_size=8, shuffle=True)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if args.dear:
        state = attach(accelerator, model, optimizer, fusion_mb=0.005)  # without fusion_mb the size is searched for

    for _ in range(args.epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = mse_loss(model(x), y)
                accelerator.backward(loss)
                if args.max_grad_norm and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    accelerator.print(f"loss {loss.item():.4f}")
    if args.dear:
        accelerator.print(state.stats())
    if args.out:
        state_dicts = {"model": accelerator.unwrap_model(model).state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state_dicts, args.out / f"{accelerator.process_index}.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
