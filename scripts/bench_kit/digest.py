"""Tensors and numbers as text, by which two runs are compared bit for bit."""

import hashlib
from typing import Any

import torch


def digests(value: Any, name: str = "") -> dict[str, str]:
    """A hash of each tensor's bits, and the text of each number, by its name within nested dicts and lists."""
    if isinstance(value, torch.Tensor):
        bits = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return {name: f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(bits).hexdigest()}"}
    if not isinstance(value, (dict, list, tuple)):
        return {name: repr(value)}
    found: dict[str, str] = {}
    for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
        found |= digests(entry, f"{name}.{key}" if name else str(key))
    return found
