"""Parameters, buffers and optimizer state as text, by which two runs are compared bit for bit."""

import hashlib
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


def digest(network: nn.Module, optimizer: Optimizer) -> dict[str, str]:
    """A hash of each tensor's bits, and the text of each number, by name."""
    found: dict[str, str] = {}
    _add(found, "model", network.state_dict())
    _add(found, "optimizer", optimizer.state_dict())
    return found


def _add(found: dict[str, str], name: str, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        bits = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        found[name] = f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(bits).hexdigest()}"
    elif isinstance(value, dict):
        for key, entry in value.items():
            _add(found, f"{name}.{key}", entry)
    elif isinstance(value, (list, tuple)):
        for index, entry in enumerate(value):
            _add(found, f"{name}.{index}", entry)
    else:
        found[name] = repr(value)
