"""A small convolutional network, trained as torchvision's references do: a moving average of the weights, and resuming.

    torchrun --nproc-per-node 2 docs/recipes/torchvision_like.py --dear --output-dir runs
    torchrun --nproc-per-node 2 docs/recipes/torchvision_like.py --dear --output-dir runs --resume runs/checkpoint.pth

`--dear` adds one line. The images are random numbers from a seed, and the model is tiny, so that it runs anywhere.
Steps that average wait for all updates; `dx.Ema` computes the same average without a wait.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ddp_crossover as dx


class ExponentialMovingAverage(torch.optim.swa_utils.AveragedModel):
    """Average of parameters and buffers, as in torchvision's references."""

    def __init__(self, model: nn.Module, decay: float, device: str) -> None:
        def average(averaged, current, steps):
            return decay * averaged + (1 - decay) * current

        super().__init__(model, device, average, use_buffers=True)


def images() -> TensorDataset:
    """64 images of 16x16 pixels in 10 classes."""
    generator = torch.Generator().manual_seed(7)
    return TensorDataset(torch.randn(64, 3, 16, 16, generator=generator), torch.randint(10, (64,), generator=generator))


def network() -> nn.Module:
    """Convolutions with batch norm, dropout, and a linear head."""
    layers = []
    for inputs, outputs in ((3, 8), (8, 16), (16, 32)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Dropout(0.1), nn.Linear(128, 10))


def main() -> None:
    """Train, and save a checkpoint after each epoch."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dear", action="store_true", help="overlap communication with compute")
    parser.add_argument("--out", type=Path, help="folder for the final state of every rank")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--output-dir", type=Path, help="folder for checkpoints")
    parser.add_argument("--resume", type=Path, help="checkpoint to go on from")
    parser.add_argument("--model-ema-steps", type=int, default=4, help="optimizer steps between averages")
    args = parser.parse_args()

    dist.init_process_group()
    rank = dist.get_rank()
    device = f"cuda:{rank % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    data = images()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = network().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    ddp = DistributedDataParallel(model)
    average = ExponentialMovingAverage(model, decay=0.9, device=device)
    if args.dear:
        state = dx.attach(ddp, optimizer, fusion_mb=0.02)  # without fusion_mb the size is searched for

    stateful = {"model": model, "optimizer": optimizer, "lr_scheduler": scheduler, "model_ema": average}
    first_epoch = 0
    if args.resume:
        checkpoint = torch.load(args.resume, map_location=device)
        for name, thing in stateful.items():
            thing.load_state_dict(checkpoint[name])
        first_epoch = checkpoint["epoch"] + 1

    for epoch in range(first_epoch, args.epochs):
        sampler.set_epoch(epoch)
        torch.manual_seed(epoch * dist.get_world_size() + rank)  # so that dropout resumes as well
        for step, (image, target) in enumerate(loader):
            optimizer.zero_grad()
            loss = cross_entropy(ddp(image.to(device)), target.to(device))
            loss.backward()
            optimizer.step()
            if step % args.model_ema_steps == 0:
                average.update_parameters(model)
        scheduler.step()
        if args.output_dir and rank == 0:
            checkpoint = {name: thing.state_dict() for name, thing in stateful.items()} | {"epoch": epoch}
            torch.save(checkpoint, args.output_dir / f"model_{epoch}.pth")
            torch.save(checkpoint, args.output_dir / "checkpoint.pth")
            del checkpoint  # it shares its memory with the parameters, whose updates would have to be applied at once

    if rank == 0:
        print(f"loss {loss.item():.4f}")
        if args.dear:
            print(state.stats())
    if args.out:
        torch.save({name: thing.state_dict() for name, thing in stateful.items()}, args.out / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
