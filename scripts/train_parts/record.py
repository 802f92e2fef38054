"""The record of a run: what was set, on what, what came out."""

import argparse
import hashlib
import json
import platform
import statistics
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ddp_crossover as dx


def make_record(
    args: argparse.Namespace,
    net: nn.Module,
    history: list[dict[str, Any]],
    state: dx.DearState | None,
) -> dict[str, Any]:
    """The record of a run. Collective: every rank must call it."""
    digests: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(digests, _digest(net))
    # The first epoch pays for start-up (connections, DDP rebuilding its buckets): speeds leave it
    # out where there is another.
    steady = history[1:] or history
    exposed = [e["exposed_s_per_step"] for e in steady if e["exposed_s_per_step"] is not None]
    stats = state.stats() if state else None
    return {
        "config": {key: str(v) if isinstance(v, Path) else v for key, v in vars(args).items()},
        "environment": {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "threads_per_rank": torch.get_num_threads(),
            "backend": dist.get_backend(),
            "machine": platform.machine(),
        },
        "epochs": history,
        "samples_per_s": statistics.median(e["samples_per_s"] for e in steady),
        "exposed_s_per_step": statistics.median(exposed) if exposed else None,
        "sent_bytes": stats.sent_bytes if stats else None,
        "fallbacks": dict(stats.fallbacks) if stats else {},
        "parameters_sha256": digests,
    }


def write_files(args: argparse.Namespace, net: nn.Module, record: dict[str, Any]) -> None:
    """Write what `--json` and `--save-params` ask for."""
    for path in filter(None, (args.json, args.save_params)):
        path.parent.mkdir(parents=True, exist_ok=True)
    if args.json:
        args.json.write_text(json.dumps(record, indent=2) + "\n")
    if args.save_params:
        torch.save(net.state_dict(), args.save_params)


def _digest(net: nn.Module) -> str:
    """SHA-256 of all parameters. Not of buffers: BatchNorm's statistics are each rank's own."""
    digest = hashlib.sha256()
    for parameter in net.parameters():
        digest.update(parameter.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
