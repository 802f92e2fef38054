"""The command line of `train.py`: every option, its default and what it refuses."""

import argparse
import difflib
import os
from pathlib import Path

import torch
import torchvision

AMP_DTYPES = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def parse_args(description: str, argv: list[str] | None = None) -> argparse.Namespace:
    """Read and check the command line; bad input ends the program with a message that names it."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    _add_training(parser.add_argument_group("training"))
    _add_run(parser.add_argument_group("the run"))
    args = parser.parse_args(argv)
    if reason := _what_is_wrong(args):
        parser.error(reason)
    args.world_size = int(os.environ["WORLD_SIZE"])
    args.image_size = args.image_size or (224 if args.data else 32)
    args.lr = args.lr or {"adamw": 1e-3, "sgd": 5e-2}[args.optimizer]
    return args


def _add_training(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    # fmt: off
    add("--hook", choices=("none", "dear"), default="dear",
        help="plain DDP, or DDP with DeAR (%(default)s)")
    add("--model", default="resnet18", help="a torchvision classifier (%(default)s)")
    add("--data", type=Path, help="folder with train/<class>/ and val/<class>/ (digits)")
    add("--image-size", type=int, help="pixels (32 for digits, 224 for --data)")
    add("--shrink", type=int, metavar="PIXELS",
        help="shorter side of training images before augmentation, which makes them small to keep (as they are)")
    add("--limit-samples", type=int, metavar="N", help="only N images of each set, for a quick try")
    add("--epochs", type=int, default=5, help="how many to train in all (%(default)s)")
    add("--batch-size", type=int, default=32, help="images per rank and forward pass (%(default)s)")
    add("--accumulate", type=int, default=1, metavar="N",
        help="forward passes per update, all but the last under no_sync() (%(default)s)")
    add("--optimizer", choices=("adamw", "sgd"), default="adamw",
        help="SGD has momentum 0.9 (%(default)s)")
    add("--lr", type=float, help="peak learning rate (1e-3 for AdamW, 5e-2 for SGD)")
    add("--weight-decay", type=float, default=1e-2, help="of the optimizer (%(default)s)")
    add("--warmup-epochs", type=float, default=1.0,
        help="linear warm-up, then a cosine down to zero (%(default)s)")
    add("--clip-norm", type=float, default=0.0, help="largest norm of the gradient; 0: any")
    add("--amp", choices=tuple(AMP_DTYPES), default="none",
        help="autocast to this type; fp16 also scales the loss (%(default)s)")
    # fmt: on


def _add_run(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    # fmt: off
    add("--seed", type=int, default=0, help="of weights, order, augmentation (%(default)s)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto",
        help="gloo on cpu, nccl on cuda; auto: cuda with a GPU for each rank (%(default)s)")
    add("--workers", type=int, default=0, help="data loading processes per rank (%(default)s)")
    add("--cache", type=Path, metavar="DIR",
        help="on a local disk: keeps decoded images of --data for all ranks, workers and later runs")
    add("--checkpoint", type=Path, metavar="FILE",
        help="written after each epoch; all ranks must be able to read it")
    add("--resume", nargs="?", choices=("yes", "auto"), const="yes", default="no",
        help="go on from --checkpoint; 'auto' starts afresh where there is none")
    add("--json", type=Path, metavar="FILE", help="where to write the record of this run")
    add("--save-params", type=Path, metavar="FILE", help="where to write the final state_dict")
    # fmt: on


def _what_is_wrong(args: argparse.Namespace) -> str | None:
    """The first thing that is wrong with the arguments, or None."""
    for name in ("image_size", "shrink", "limit_samples", "epochs", "batch_size", "accumulate", "lr"):
        value = getattr(args, name)
        if value is not None and not value > 0:  # which NaN is not, either
            return f"{option(name)} must be greater than 0, not {value}"
    for name in ("weight_decay", "warmup_epochs", "clip_norm", "workers", "seed"):
        value = getattr(args, name)
        if not value >= 0:
            return f"{option(name)} must be 0 or more, not {value}"
    for name in ("cache", "shrink"):
        if getattr(args, name) and not args.data:
            return f"{option(name)} is for the images of --data FOLDER; the digits are in memory"
    models = torchvision.models.list_models(module=torchvision.models)
    if args.model not in models:
        near = difflib.get_close_matches(args.model, models, n=5) or models
        return f"--model {args.model} is none of torchvision's classifiers, such as {', '.join(near)}"
    if args.resume != "no" and args.checkpoint is None:
        return "--resume needs --checkpoint FILE, the file to go on from"
    if args.resume == "yes" and not args.checkpoint.is_file():
        return f"--resume: {args.checkpoint} is not there; --resume auto would start afresh"
    if args.device == "cuda" and not torch.cuda.is_available():
        return "--device cuda: torch sees no GPU here; --device cpu trains without one"
    if not {"LOCAL_RANK", "WORLD_SIZE"} <= os.environ.keys():
        return "start it with: torchrun --standalone --nproc-per-node 2 scripts/train.py"
    return None


def option(name: str) -> str:
    """The spelling on the command line: `batch_size` is `--batch-size`."""
    return "--" + name.replace("_", "-")
