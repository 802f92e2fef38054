"""The backend's own all-reduce, in place of two legs."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_crossover.collectives.leg import Meanwhile
from ddp_crossover.tracing.clock import CommClock


def all_reduce_sum(
    buffer: Tensor,
    process_group: dist.ProcessGroup,
    clock: CommClock | None = None,
    group: int = -1,
    stream: torch.cuda.Stream | None = None,
) -> torch.futures.Future[Tensor]:
    """The backend's own all-reduce, in place; the future delivers ``buffer``. ``clock`` is told of it as ``group``.

    On NCCL it needs a ``stream`` to run on, see :func:`stream_for_all_reduces`.
    """
    if stream is not None:
        return _all_reduce_sum_on(stream, buffer, process_group, clock, group)
    ended = clock.all_reduce_started(group, buffer.device) if clock is not None else None
    work = dist.all_reduce(buffer, group=process_group, async_op=True)
    assert work is not None

    def deliver(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        # On CUDA this runs on a stream that waits for the work.
        if ended is not None:
            ended()
        return future.value()[0]

    return work.get_future().then(deliver)


def _all_reduce_sum_on(
    stream: torch.cuda.Stream,
    buffer: Tensor,
    process_group: dist.ProcessGroup,
    clock: CommClock | None,
    group: int,
) -> torch.futures.Future[Tensor]:
    """All-reduce on ``stream``. The caller's stream goes on; waiting for the future makes a stream wait for the sum.

    An asynchronous call has a future as well, but torch 2.15's NCCL backend (nccl2) makes the caller's stream wait for
    the sum when it is asked for that one: backward would stand still at every bucket.
    """
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[buffer.device])
    # Protects the gradients, which are written on the caller's stream.
    stream.wait_stream(torch.cuda.current_stream(buffer.device))
    begin = clock.mark(stream) if clock is not None else None
    with torch.cuda.stream(stream):
        dist.all_reduce(buffer, group=process_group)
        # The future notes here how far this stream has come.
        future.set_result(buffer)
    if clock is not None:
        clock.span("all_reduce", begin, stream, group=group)
    # Protects it from an allocator that knows of the caller's stream only.
    buffer.record_stream(stream)
    return future


def stream_for_all_reduces(process_group: dist.ProcessGroup, device: torch.device) -> torch.cuda.Stream | None:
    """A stream for :func:`all_reduce_sum`; None where the backend makes futures that hold nobody up."""
    is_nccl = device.type == "cuda" and backend_for(process_group, device).startswith("nccl")
    return torch.cuda.Stream(device) if is_nccl else None


def wait_for_futures(futures: Sequence[torch.futures.Future[Tensor]], meanwhile: Meanwhile) -> None:
    """Wait on the host until all have a result or an error, which is left in them."""
    done = threading.Event()
    torch.futures.collect_all(list(futures)).add_done_callback(lambda _: done.set())
    if not done.is_set():
        while not done.wait(meanwhile()):
            pass


def backend_for(process_group: dist.ProcessGroup, device: torch.device) -> str:
    """``cpu:gloo,cuda:nccl`` has one backend per device type; ``gloo`` has one for all."""
    config = dist.get_backend_config(process_group)
    by_device = dict(entry.split(":", 1) for entry in str(config).split(",") if entry.count(":") == 1)
    return by_device.get(device.type, dist.get_backend(process_group))
