"""Digests of what a framework's trainer has left, which its script prints on every rank."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer


def say(model: nn.Module, optimizers: Optimizer | Iterable[Optimizer], *checkpoints: Path | Mapping[str, Any]) -> None:
    """Print a line for each of parameters, buffers, optimizers' states and checkpoints: `digest RANK WHAT SHA256`.

    `model` may be inside of DDP. Of a checkpoint, a file or its contents, only tensors count: files hold times as well.
    """
    if isinstance(model, DistributedDataParallel):
        model = model.module
    if isinstance(optimizers, Optimizer):
        optimizers = [optimizers]
    digests = {
        "parameters": _sha256(dict(model.named_parameters())),
        "buffers": _sha256(dict(model.named_buffers())),
        "optimizer": _sha256([optimizer.state_dict()["state"] for optimizer in optimizers]),
    }
    for index, checkpoint in enumerate(checkpoints):
        contents = load(checkpoint) if isinstance(checkpoint, Path) else checkpoint
        digests[f"checkpoint{index}"] = _sha256(contents)
    rank = os.environ.get("RANK", "0")
    print("".join(f"digest {rank} {what} {sha256}\n" for what, sha256 in digests.items()), end="", flush=True)


def load(path: Path) -> Any:
    """Return the contents of a checkpoint, which this script has written itself."""
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    return torch.load(path, weights_only=False)


def _sha256(value: Any) -> str:
    digest = hashlib.sha256()
    count = 0
    for name, tensor in _tensors(value, ""):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        count += 1
    return f"{digest.hexdigest()} of {count} tensors"


def _tensors(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, nn.Module):
        yield from _tensors(value.state_dict(), name)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _tensors(item, f"{name}.{index}")
