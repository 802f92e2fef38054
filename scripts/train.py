"""Train an image classifier on several processes, with plain DDP or with DeAR (--hook dear).

    torchrun --standalone --nproc-per-node 2 scripts/train.py --hook dear
    torchrun --standalone --nproc-per-node 8 scripts/train.py --data images --model resnet50

Any torchvision classifier; scikit-learn's digits (no download) or an image folder; AdamW or SGD,
warm-up and cosine, mixed precision, gradient accumulation, clipping, evaluation, checkpoints that
resume bit for bit. Look for "DeAR" to see what ddp_crossover adds to an ordinary DDP script.
"""

import argparse
import contextlib
import functools
import itertools
import math
import os
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torchvision
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import ddp_crossover as dx
from train_parts import checkpoint, data, record
from train_parts.display import Display
from train_parts.options import AMP_DTYPES, parse_args

STATEFUL = ("optimizer", "scheduler", "scaler")  # what a checkpoint holds besides the model


class Trainer:
    """One training job on one rank: `run()` trains epoch by epoch and writes what was asked for."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device, self.rank = args, device, dist.get_rank()
        pin_memory = device.type == "cuda"
        self.train_loader, self.test_loader, classes = data.make_loaders(args, pin_memory)
        self.updates_per_epoch = len(self.train_loader) // args.accumulate
        if self.updates_per_epoch == 0:
            raise ValueError(
                f"--accumulate {args.accumulate} is more than the {len(self.train_loader)} batches of an epoch"
            )

        torch.manual_seed(args.seed)  # the same weights on all ranks
        net = build_model(args.model, classes, args.image_size).to(device)
        self.ddp = ddp = DistributedDataParallel(net, gradient_as_bucket_view=True)
        self.optimizer = optimizer = build_optimizer(args, ddp)
        clip_grad_norm_: Callable[[float], torch.Tensor]
        clip_grad_norm_ = functools.partial(nn.utils.clip_grad_norm_, list(ddp.parameters()))
        scaler_type = torch.amp.GradScaler
        self.state: dx.DearState | None = None
        self.ddp_timer: dx.DdpTimer | None = None

        if args.hook == "dear":
            # ==== DeAR: these two lines are all that a DDP script needs ===========================
            state = dx.DearState(ddp, optimizer)
            ddp.register_comm_hook(state, dx.dear_hook)
            # ======================================================================================
            # The stock ones give the right numbers, too; these two also keep the overlap.
            clip_grad_norm_, scaler_type = state.clip_grad_norm_, dx.GradScaler
            self.state = state
        elif device.type == "cpu":
            self.ddp_timer = dx.DdpTimer(ddp, optimizer)

        self.clip_grad_norm_ = clip_grad_norm_
        self.scaler = scaler_type(device.type, enabled=args.amp == "fp16")
        factor = functools.partial(
            learning_rate_factor,
            warmup=round(args.warmup_epochs * self.updates_per_epoch),
            total=args.epochs * self.updates_per_epoch,
        )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        self.history: list[dict[str, Any]] = []
        if args.resume == "yes" or (args.resume == "auto" and args.checkpoint.is_file()):
            self.load_checkpoint()

    def run(self) -> None:
        """Train to the last epoch, with an evaluation and a checkpoint after each."""
        args, net = self.args, self.ddp.module
        with Display(self.rank, args.epochs, self.updates_per_epoch) as display:
            display.line(
                f"{args.model}, {args.optimizer}, hook {args.hook}: {args.world_size} rank(s) on "
                f"{self.device.type}, {self.updates_per_epoch} updates per epoch"
            )
            if self.history:
                display.line(f"resumed from {args.checkpoint} after epoch {len(self.history)}")
            for epoch in range(len(self.history) + 1, args.epochs + 1):
                figures = self.train_epoch(epoch, display)
                figures["accuracy"] = evaluate(net, self.test_loader, self.device)
                self.history.append(figures)
                display.epoch(figures)
                if args.checkpoint and self.rank == 0:
                    self.save_checkpoint()
            final = record.make_record(args, net, self.history, self.state)
            for reason, times in final["fallbacks"].items():
                display.line(f"DeAR fell back {times} time(s): {reason}")
        if self.rank == 0:
            record.write_files(args, net, final)

    def train_epoch(self, epoch: int, display: Display) -> dict[str, Any]:
        """Train one epoch; its figures, as means over all ranks."""
        # All randomness of an epoch (order, augmentation, dropout) follows from seed, epoch, rank:
        # a checkpoint need not hold the state of generators, and resumes bit for bit all the same.
        sequence = np.random.SeedSequence([self.args.seed, epoch, self.rank])
        torch.manual_seed(int(sequence.generate_state(1, np.uint64)[0]))
        self.train_loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        batches = iter(self.train_loader)
        losses = torch.zeros((), dtype=torch.float64, device=self.device)
        learning_rate, exposed_before_s = self.scheduler.get_last_lr()[0], self.exposed_s()
        start = time.perf_counter()
        for done in range(1, self.updates_per_epoch + 1):
            losses += self.update(itertools.islice(batches, self.args.accumulate))
            display.update(epoch, done)
        if self.state:
            self.state.synchronize()  # the last update belongs in this epoch's time
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start

        totals = [losses.item(), self.exposed_s() - exposed_before_s]
        sums = torch.tensor(totals, dtype=torch.float64, device=self.device)
        dist.all_reduce(sums)
        loss, exposed_s = (sums / self.updates_per_epoch / self.args.world_size).tolist()
        batch = self.args.batch_size * self.args.accumulate * self.args.world_size
        return {
            "epoch": epoch,
            "loss": loss,
            "learning_rate": learning_rate,
            "samples_per_s": batch * self.updates_per_epoch / seconds,
            "exposed_s_per_step": None if math.isnan(exposed_s) else exposed_s,
        }

    def update(self, batches: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """One step of the optimizer, from `--accumulate` batches. Returns their mean loss."""
        args, device, mean_loss = self.args, self.device, torch.zeros((), device=self.device)
        autocast = torch.autocast(device.type, AMP_DTYPES[args.amp], enabled=args.amp != "none")
        self.optimizer.zero_grad()
        for number, (images, labels) in enumerate(batches, start=1):
            # Only the last backward pass of an update sends gradients.
            is_last = number == args.accumulate
            with contextlib.nullcontext() if is_last else self.ddp.no_sync():
                with autocast:
                    logits = self.ddp(images.to(device, non_blocking=True))
                    labels = labels.to(device, non_blocking=True)
                    loss = nn.functional.cross_entropy(logits, labels) / args.accumulate
                self.scaler.scale(loss).backward()
            mean_loss += loss.detach()
        if args.clip_norm:
            self.scaler.unscale_(self.optimizer)
            self.clip_grad_norm_(args.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        return mean_loss

    def exposed_s(self) -> float:
        """How long compute has waited for communication so far; NaN where it is not measured."""
        if self.device.type != "cpu":
            return math.nan  # the wait is the GPU's, and the host's clock does not see it
        if self.state:
            return self.state.stats().exposed_s
        return self.ddp_timer.exposed_s if self.ddp_timer else math.nan

    def save_checkpoint(self) -> None:
        """Write all that `load_checkpoint` needs. No collective: rank 0 alone calls it."""
        content = {name: getattr(self, name).state_dict() for name in STATEFUL}
        content |= {"model": self.ddp.module.state_dict(), "history": self.history}
        checkpoint.save(self.args.checkpoint, content, vars(self.args))

    def load_checkpoint(self) -> None:
        """Go on where `save_checkpoint` left off."""
        content = checkpoint.load(self.args.checkpoint, vars(self.args))
        self.ddp.module.load_state_dict(content["model"])
        for name in STATEFUL:
            getattr(self, name).load_state_dict(content[name])
        self.history = content["history"]


def build_model(name: str, classes: int, image_size: int) -> nn.Module:
    """A classifier with fresh weights, once a trial without data has shown that images fit it."""
    with torch.device("meta"):
        trial = torchvision.models.get_model(name, weights=None, num_classes=classes)
        try:
            logits = trial(torch.empty(2, 3, image_size, image_size))
        except (RuntimeError, AssertionError, ValueError) as error:
            raise ValueError(
                f"--model {name} does not take images of {image_size} pixels ({error}). "
                f"Give another --image-size: most torchvision models were made for 224"
            ) from error
    if not isinstance(logits, torch.Tensor):
        raise ValueError(f"--model {name} has auxiliary outputs, which this script does not train")
    return torchvision.models.get_model(name, weights=None, num_classes=classes)


def build_optimizer(args: argparse.Namespace, ddp: nn.Module) -> torch.optim.Optimizer:
    """AdamW, or SGD with momentum."""
    common = {"lr": args.lr, "weight_decay": args.weight_decay}
    if args.optimizer == "adamw":
        return torch.optim.AdamW(ddp.parameters(), **common)
    return torch.optim.SGD(ddp.parameters(), momentum=0.9, **common)


def learning_rate_factor(update: int, *, warmup: int, total: int) -> float:
    """Linear warm-up to 1 over `warmup` updates, then half a cosine down to 0 at `total`."""
    if update < warmup:
        return (update + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (update - warmup) / max(1, total - warmup)))


@torch.no_grad()
def evaluate(net: nn.Module, loader: DataLoader[Any], device: torch.device) -> float:
    """Share of all test images that the model classifies right.

    Takes `ddp.module`: `ddp(x)` broadcasts buffers in each forward pass, and would hang where one
    rank has a batch more than another. Instead all ranks take rank 0's BatchNorm statistics, which
    are the ones in the checkpoint.
    """
    for buffer in net.buffers():
        dist.broadcast(buffer, src=0)
    right_and_all = torch.zeros(2, dtype=torch.long, device=device)
    net.eval()
    for images, labels in loader:
        predicted = net(images.to(device)).argmax(dim=1)
        right_and_all[0] += (predicted == labels.to(device)).sum()
        right_and_all[1] += len(labels)
    net.train()
    dist.all_reduce(right_and_all)
    right, total = right_and_all.tolist()
    return right / total


def start_ranks(choice: str) -> torch.device:
    """Join the process group; returns this rank's device."""
    ranks, gpus = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
    if choice == "cuda" and gpus < ranks:
        raise ValueError(f"--device cuda: {ranks} ranks, {gpus} GPU(s): --nproc-per-node {gpus}")
    if choice == "cpu" or gpus < ranks:  # NCCL wants a GPU for each rank
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def main() -> None:
    """Run under torchrun, once per rank."""
    args = parse_args(__doc__ or "")
    # Runs that repeat bit for bit need both on CUDA; neither has an effect on a CPU.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        device = start_ranks(args.device)
        Trainer(args, device).run()
    except ValueError as error:
        raise SystemExit(f"train.py: error: {error}") from error
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
