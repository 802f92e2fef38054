"""Ray Train's TorchTrainer: two workers, metrics and a checkpoint after each epoch.

    python docs/recipes/ray_train.py --dear

`--dear` adds one line. The data are random numbers from a seed, and the model is tiny, so that it runs anywhere. Ray
starts the workers, so there is no torchrun. On several machines this package must be installed on each.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig, get_context, report
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import ddp_crossover as dx


def train(settings: dict) -> None:
    """What each worker does."""
    rank = get_context().get_world_rank()
    torch.manual_seed(3)
    data = TensorDataset(torch.randn(80, 16), torch.randn(80, 4))
    loader = prepare_data_loader(DataLoader(data, batch_size=8, shuffle=True))
    ddp = prepare_model(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)))
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    if settings["dear"]:
        state = dx.attach(ddp, optimizer, fusion_mb=0.005)  # without fusion_mb the size is searched for

    for epoch in range(settings["epochs"]):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = mse_loss(ddp(x), y)
            loss.backward()
            optimizer.step()
        metrics = {"loss": loss.item(), **(state.stats().flat() if settings["dear"] else {})}
        with tempfile.TemporaryDirectory() as folder:
            if rank == 0:
                torch.save({"model": ddp.module.state_dict(), "epoch": epoch}, Path(folder) / "checkpoint.pt")
            report(metrics, checkpoint=Checkpoint.from_directory(folder) if rank == 0 else None)

    if settings["dear"] and rank == 0:
        print(state.stats())
    if settings["out"]:
        torch.save(
            {"model": ddp.module.state_dict(), "optimizer": optimizer.state_dict()}, f"{settings['out']}/{rank}.pt"
        )


def main() -> None:
    """Train on two workers."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dear", action="store_true", help="overlap communication with compute")
    parser.add_argument("--out", type=Path, help="folder for the final state of every rank")
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as storage:
        trainer = TorchTrainer(
            train,
            train_loop_config={"dear": args.dear, "epochs": args.epochs, "out": args.out and str(args.out.resolve())},
            scaling_config=ScalingConfig(num_workers=2, use_gpu=torch.cuda.device_count() > 1),
            run_config=RunConfig(name="recipe", storage_path=storage),
        )
        result = trainer.fit()
        print(f"loss {result.metrics['loss']:.4f}")


if __name__ == "__main__":
    main()
