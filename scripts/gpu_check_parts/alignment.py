"""What it costs that a gradient's place in a fusion buffer is aligned to 4 bytes only: copies, updates, legs.

The planner puts gradients one behind the other, and cuts shards at multiples of an element. Kernels that move 16 bytes
at once, and NCCL, may need more than that to be fast.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import AdamW

from bench_kit.device_time import between_s, now, synchronize
from bench_kit.rounds import spread
from ddp_crossover.nccl import nccl_link

OFFSETS_BYTES = (0, 4, 8, 16, 64, 128, 256)
TENSORS = 16
ROUNDS, REPEATS = 7, 20
GPU_NUMEL, CPU_NUMEL = 2**20, 2**14


def copies_and_updates(device: torch.device) -> dict[str, Any]:
    """Copy into, and update from, views that begin so many bytes behind an aligned address."""
    numel = GPU_NUMEL if device.type == "cuda" else CPU_NUMEL
    found = {"copy_s": {}, "adamw_foreach_s": {}, "adamw_fused_s": {}}  # type: dict[str, dict[str, Any]]
    for offset_bytes in OFFSETS_BYTES:
        views = [_view_at(device, numel, offset_bytes) for _ in range(TENSORS)]
        source = torch.randn(numel, device=device)

        def copy(views: list[Tensor] = views, source: Tensor = source) -> None:
            for view in views:
                torch.mul(source, 0.5, out=view)

        found["copy_s"][str(offset_bytes)] = spread(_times_s(device, copy))
        for name, options in (("adamw_foreach_s", {"foreach": True}), ("adamw_fused_s", {"fused": True})):
            found[name][str(offset_bytes)] = spread(_times_s(device, _updates(views, options)))
    return found | {"noticed": "; ".join(f"{what[:-2]}: {_worst(times)}" for what, times in found.items())}


def legs(device: torch.device) -> dict[str, Any]:
    """Both legs over NCCL, with shards whose sizes are multiples of so many bytes. On all ranks."""
    world_size, found = dist.get_world_size(), {}  # type: int, dict[str, Any]
    for odd_bytes in (0, 4, 16, 128):
        shard_numel = GPU_NUMEL + odd_bytes // 4
        buffer = torch.zeros(shard_numel * world_size, device=device)
        low = dist.get_rank() * shard_numel
        shard = buffer[low : low + shard_numel]

        def both(shard: Tensor = shard, buffer: Tensor = buffer) -> None:
            nccl_link._reduce_scatter(shard, buffer)
            nccl_link._all_gather(buffer, shard)

        found[str(odd_bytes)] = spread(_times_s(device, both))
    return {"legs_s": found, "noticed": f"shards of 4 MiB and so many bytes: {_worst(found)}"}


def _view_at(device: torch.device, numel: int, offset_bytes: int) -> Tensor:
    memory = torch.zeros(numel + offset_bytes // 4, device=device)
    assert device.type != "cuda" or memory.data_ptr() % 256 == 0, "torch's allocator gives other addresses"
    return memory[offset_bytes // 4 :]


def _updates(gradients: list[Tensor], options: dict[str, Any]) -> Callable[[], None]:
    """A step of AdamW whose gradients are these."""
    parameters = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimizer = AdamW(parameters, lr=1e-4, **options)
    return lambda: optimizer.step()


def _times_s(device: torch.device, work: Callable[[], None]) -> list[float]:
    """Seconds of one call, as the mean of some calls in a row, several times."""
    for _ in range(3):
        work()
    times_s = []
    for _ in range(ROUNDS):
        synchronize(device)
        begin = now(device)
        for _ in range(REPEATS):
            work()
        times_s.append(between_s(begin, now(device)) / REPEATS)
    return times_s


def _worst(times: dict[str, Any]) -> str:
    """The slowest offset beside the aligned one."""
    aligned_s = times["0"]["median"]
    worst = max(times, key=lambda offset: float(times[offset]["median"]))
    slower = times[worst]["median"] / aligned_s
    return f"{aligned_s * 1e6:.0f} us aligned, at worst {slower:.2f} times that ({worst} bytes)"
