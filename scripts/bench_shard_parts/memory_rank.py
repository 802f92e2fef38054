"""The rank's side of memory: `python -m bench_shard_parts.memory_rank SETTINGS RESULT`, with torchrun's environment.

The process holds one arm only. A tiny network is trained with the same arm first, so that what libraries load at their
first use is not counted. Memory is what lies beyond that.
"""

import ctypes
import gc
import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor

from bench_kit.launch import tell
from bench_kit.training import Arm, ArmRefused, Workload
from bench_parts.arms import ArmName, make_arm
from bench_shard_parts.settings import MemorySettings
from ddp_crossover.sharding.sharded_updates import ShardedUpdates

TIMEOUT = timedelta(seconds=120)
TINY_LAYERS, TINY_WIDTH = 4, 64
# Sets the peak of /proc/self/status, VmHWM, to what is in use now: proc(5).
RESET_PEAK = "5"


def mlp_workload(layers: int, width: int, rows: int) -> Workload:
    """Blocks of a linear layer and a ReLU, with one batch of noise."""
    batch = torch.randn(rows, width, generator=torch.Generator().manual_seed(1))

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)))

    return Workload(build, lambda network: network(batch).square().mean(), lambda network: list(network.children()))


def measure(settings: MemorySettings) -> dict[str, Any]:
    """Train the arm; returns this rank's figures. Collective.

    Raises:
        ArmRefused: if torch or this version of ours cannot do it here.
    """
    tiny = _trained(settings, mlp_workload(TINY_LAYERS, TINY_WIDTH, settings.rows), steps=1)
    tiny.close()
    del tiny
    workload = mlp_workload(settings.layers, settings.width, settings.rows)
    _give_memory_back()
    before_bytes = _status_bytes("VmRSS")
    arm = _trained(settings, workload, settings.steps)
    peak_bytes = _status_bytes("VmHWM")
    _give_memory_back()
    return {
        "rss_bytes": _status_bytes("VmRSS") - before_bytes,
        "peak_rss_bytes": peak_bytes - before_bytes,
        "rss_before_bytes": before_bytes,
        "optimizer_state_bytes": optimizer_state_bytes(arm, settings.arm),
        **arm.facts(),
    }


def _trained(settings: MemorySettings, workload: Workload, steps: int) -> Arm:
    """The arm, after its first steps and so many more. The peak is that of its training."""
    arm = make_arm(ArmName.parse(settings.arm), workload, None, settings.optimizer)
    _reset_peak()
    arm.warm_up(settings.warm_up_limit)
    for _ in range(steps):
        arm.step()
    arm.drain()
    return arm


def optimizer_state_bytes(arm: Arm, name: str) -> int:
    """Bytes of optimizer state that this rank holds."""
    if ArmName.parse(name).kind == "shard":
        assert arm.state is not None
        updates = arm.state._updates
        assert isinstance(updates, ShardedUpdates)
        return updates.states.nbytes()
    # `optim` is ZeRO's optimizer of this rank's part.
    optimizer = arm.optimizer.optim if isinstance(arm.optimizer, ZeroRedundancyOptimizer) else arm.optimizer
    held = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return sum((value.to_local() if isinstance(value, DTensor) else value).nbytes for value in held)


def _give_memory_back() -> None:
    """Let glibc return what is free to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text(RESET_PEAK)


def _status_bytes(field: str) -> int:
    """A size in /proc/self/status."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(lines[field].split()[0])


def main() -> None:
    """Run one rank; rank 0 writes the figures of all ranks, or why they cannot be had."""
    settings, result_file = MemorySettings.read(Path(sys.argv[1])), Path(sys.argv[2])
    torch.set_flush_denormal(True)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    is_first = dist.get_rank() == 0
    if is_first:
        tell(f"training {settings.name}", 0.1)
    try:
        figures: list[Any] = [None] * settings.ranks
        dist.all_gather_object(figures, measure(settings))
        result: dict[str, Any] = {"refused": None, "figures": figures}
    except ArmRefused as reason:
        result = {"refused": str(reason), "figures": []}
    if is_first:
        result_file.write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
