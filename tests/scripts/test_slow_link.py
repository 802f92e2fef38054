"""The link of the demo: the kernel keeps to the speed, both groups of an arm have it, and what cannot be is said."""

from __future__ import annotations

import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ddp_crossover as dx
from bench_kit import slow_link
from bench_kit.slow_link import Connections, PacingError, require_slow, slow_groups, why_not_here

needs_pacing = pytest.mark.skipif(why_not_here() is not None, reason=str(why_not_here()))
SLOW_BYTES_PER_S = 4e6
BUFFER = 500_000  # fp32 elements: half a second at that speed


def _fastest_bytes_per_s(group: dist.ProcessGroup, times: int) -> float:
    flat = torch.zeros(BUFFER)
    best_s = float("inf")
    for _ in range(times):
        dist.barrier()
        start_s = time.perf_counter()
        dist.all_reduce(flat, group=group)
        best_s = min(best_s, time.perf_counter() - start_s)
    return flat.nbytes / best_s


def _slow_then_free() -> tuple[float, float, int, int]:
    with slow_groups(SLOW_BYTES_PER_S) as links:
        group = dist.new_group()
    slow = _fastest_bytes_per_s(group, times=2)
    sent_bytes = links[0].sent_bytes()
    links[0].pace(None)
    free = _fastest_bytes_per_s(group, times=5)
    dist.destroy_process_group(group)
    return slow, free, len(links[0]), sent_bytes


@needs_pacing
@pytest.mark.alone
def test_the_kernel_keeps_to_the_speed_until_it_is_lifted(on_ranks) -> None:
    for slow, free, connections, sent_bytes in on_ranks(_slow_then_free, 2):
        assert slow < 1.5 * SLOW_BYTES_PER_S
        assert free > 3 * SLOW_BYTES_PER_S
        assert connections == 1
        # Two all-reduces between two ranks send the buffer twice; the last bytes may not be acknowledged yet.
        assert 1.8 * 4 * BUFFER < sent_bytes < 2.2 * 4 * BUFFER


def _links_of_dear() -> tuple[list[int], list[int], bool]:
    new_group = dist.new_group
    with slow_groups(50e6) as links:
        ddp = DistributedDataParallel(torch.nn.Linear(500, 500), process_group=dist.new_group())
        state = dx.attach(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), fusion_mb=0.1)
    before = [link.sent_bytes() for link in links]
    for _ in range(6):
        ddp(torch.ones(1, 500)).sum().backward()
    state.synchronize()
    dist.barrier()
    sent_bytes = [link.sent_bytes() - early for link, early in zip(links, before, strict=True)]
    state.detach()
    return [len(link) for link in links], sent_bytes, dist.new_group is new_group


@needs_pacing
def test_gradients_of_dear_travel_one_way_over_each_of_its_own_links(on_ranks) -> None:
    for rank, (connections, (ddp_bytes, *own_bytes), is_restored) in enumerate(on_ranks(_links_of_dear, 2)):
        assert connections == [1, 1, 1]
        forth, back = own_bytes if rank == 0 else reversed(own_bytes)
        assert forth > 4 * 500 * 500 * 4 > 10 * max(ddp_bytes, back)
        assert is_restored


def test_a_link_that_is_too_fast_is_an_error_and_a_slower_one_is_not() -> None:
    require_slow(10e6, 11e6)
    require_slow(10e6, 5e6)
    with pytest.raises(PacingError, match="was to send 10 MB/s and sends 900"):
        require_slow(10e6, 900e6)


def test_where_connections_cannot_be_paced_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Connections, bytes_per_s: float | None) -> None:
        raise OSError(92, "Protocol not available")

    monkeypatch.setattr(slow_link.Connections, "pace", refuse)
    if sys.platform.startswith("linux"):
        assert "Protocol not available" in str(why_not_here())
    monkeypatch.setattr(sys, "platform", "darwin")
    assert why_not_here() == "only Linux can pace a TCP connection"
