"""A small vision transformer, trained as timm's train.py does: its optimizer, its schedule, its moving average.

    torchrun --nproc-per-node 2 docs/recipes/timm_like.py --dear

`--dear` adds one line. The images are random numbers from a seed, and the model is tiny, so that it runs anywhere.
"""

import argparse
from pathlib import Path

import timm
import torch
import torch.distributed as dist
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import ModelEmaV3, dispatch_clip_grad
from torch.nn.parallel import DistributedDataParallel

import ddp_crossover as dx


def main() -> None:
    """Train, and save what came out of it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dear", action="store_true", help="overlap communication with compute")
    parser.add_argument("--out", type=Path, help="folder for the final state of every rank")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--clip-grad", type=float, help="largest norm of the gradients")
    parser.add_argument("--model-ema", action="store_true", help="average the weights after each step")
    args = parser.parse_args()

    dist.init_process_group()
    rank = dist.get_rank()
    device = f"cuda:{rank % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=16, patch_size=4, embed_dim=32, depth=2, num_heads=2, num_classes=10
    ).to(device)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
    model_ema = ModelEmaV3(model, decay=0.9) if args.model_ema else None
    model = DistributedDataParallel(model)
    if args.dear:
        state = dx.attach(model, optimizer, fusion_mb=0.02)  # without fusion_mb the size is searched for
    scheduler, epochs = create_scheduler_v2(
        optimizer, sched="cosine", num_epochs=args.epochs, warmup_epochs=1, updates_per_epoch=8, step_on_epochs=False
    )

    generator = torch.Generator().manual_seed(rank)
    loss_of = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
    updates = 0
    for _ in range(epochs):
        model.train()
        for _ in range(8):
            image = torch.randn(4, 3, 16, 16, generator=generator).to(device)
            target = torch.randint(10, (4,), generator=generator).to(device)
            loss = loss_of(model(image), target)
            loss.backward()
            if args.clip_grad:
                dispatch_clip_grad(model.parameters(), args.clip_grad, mode="norm")
            optimizer.step()
            optimizer.zero_grad()
            updates += 1
            if model_ema is not None:
                model_ema.update(model, step=updates)
            scheduler.step_update(updates, metric=loss.item())

    if rank == 0:
        print(f"loss {loss.item():.4f}")
        if args.dear:
            print(state.stats())
    if args.out:
        final = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        if model_ema is not None:
            final["model_ema"] = model_ema.state_dict()
        torch.save(final, args.out / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
