"""Checkpoints of `train.py`: written whole or not at all, and refused where they do not fit."""

import os
from pathlib import Path
from typing import Any

import torch

# The options that decide the numbers. A checkpoint goes on only under the same ones, because a
# resumed run promises the parameters of the run that never stopped. `--hook` is not among them.
DECISIVE = (
    "model", "image_size", "shrink", "limit_samples", "optimizer", "lr", "weight_decay", "epochs",
    "warmup_epochs", "batch_size", "accumulate", "clip_norm", "amp", "seed", "world_size",
)  # fmt: skip


def save(path: Path, content: dict[str, Any], config: dict[str, Any]) -> None:
    """Replace `path` atomically: a crash at any point leaves the old checkpoint intact."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        torch.save(content | {"config": {key: config[key] for key in DECISIVE}}, file)
        file.flush()
        os.fsync(file.fileno())  # else the rename can reach the disk before the bytes do
    partial.replace(path)


def load(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Read a checkpoint. Raises ValueError if it is damaged or made with other options."""
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        saved = content["config"]
    except Exception as error:  # torch.load raises many kinds for a damaged file
        reason = (str(error).splitlines() or [""])[0]
        raise ValueError(
            f"--checkpoint {path} cannot be read: it is damaged, or no checkpoint of this script "
            f"({type(error).__name__}: {reason})"
        ) from error
    for key in DECISIVE:
        if saved.get(key) != config[key]:
            raise ValueError(
                f"--checkpoint {path} was made with {key} {saved.get(key)}, and this run has "
                f"{config[key]}: resume with the same, or name another file"
            )
    return content
