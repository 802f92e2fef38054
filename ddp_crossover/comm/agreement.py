"""Exchange of settings and plans between ranks, as JSON, never pickled."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist


class DisagreementError(RuntimeError):
    """Ranks were set up differently. The message names the rank and the first difference."""


def all_gather_json(value: Any, process_group: dist.ProcessGroup, device: torch.device) -> list[Any]:
    """Gather every rank's ``value``, which must be serializable as JSON; returns them in rank order."""
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    world_size = dist.get_world_size(process_group)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world_size)]
    dist.all_gather(sizes, torch.tensor([data.numel()], device=device), group=process_group)
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: data.numel()] = data.to(device)
    rows = [torch.empty_like(padded) for _ in range(world_size)]
    dist.all_gather(rows, padded, group=process_group)
    return [json.loads(bytes(row[: int(size)].tolist())) for row, size in zip(rows, sizes, strict=True)]


def require_equal(what: str, value: dict[str, Any], process_group: dist.ProcessGroup, device: torch.device) -> None:
    """Raise :class:`DisagreementError` on every rank unless all ranks passed the same ``value``."""
    refuse_difference(what, all_gather_json(value, process_group, device))


def refuse_difference(what: str, values: list[Any]) -> None:
    """Raise :class:`DisagreementError` unless all values, which are given in rank order, are the same."""
    for rank, other in enumerate(values):
        difference = _first_difference(values[0], other, rank)
        if difference is not None:
            raise DisagreementError(
                f"rank {rank} differs from rank 0 in its {what}: {difference}. "
                "Build the model, the optimizer and DearState in the same way on all ranks"
            )


def _first_difference(left: Any, right: Any, rank: int, where: str = "") -> str | None:
    if isinstance(left, list) and isinstance(right, list):
        left, right = dict(enumerate(left)), dict(enumerate(right))
    if isinstance(left, dict) and isinstance(right, dict):
        for key in [*left, *(key for key in right if key not in left)]:
            path = f"{where}.{key}" if where else str(key)
            if key not in right or key not in left:
                return f"{path} is only on rank {0 if key in left else rank}"
            if (found := _first_difference(left[key], right[key], rank, path)) is not None:
                return found
        return None
    return None if left == right else f"{where} is {left!r} on rank 0 and {right!r} on rank {rank}"
