"""The backend's own all-reduce, used instead of two legs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_crossover import device as gpu
from ddp_crossover.comm.leg import HostWait
from ddp_crossover.report.clock import CommClock
from ddp_crossover.torch_internals.groups import backend_of


def all_reduce_sum(
    buffer: Tensor,
    process_group: dist.ProcessGroup,
    clock: CommClock | None = None,
    group: int = -1,
    stream: gpu.Stream | None = None,
) -> torch.futures.Future[Tensor]:
    """All-reduce ``buffer`` in place with the backend's own operation; the future's value is ``buffer``.

    ``clock`` measures it under the number ``group``. NCCL needs a ``stream``, see :func:`stream_for_all_reduces`.
    """
    if stream is not None:
        return _all_reduce_sum_on(stream, buffer, process_group, clock, group)
    ended = clock.all_reduce_started(group, buffer.device) if clock is not None else None
    work = dist.all_reduce(buffer, group=process_group, async_op=True)
    assert work is not None

    def deliver(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        # On CUDA this runs on a stream that waits for the all-reduce.
        if ended is not None:
            ended()
        return future.value()[0]

    return work.get_future().then(deliver)


def _all_reduce_sum_on(
    stream: gpu.Stream,
    buffer: Tensor,
    process_group: dist.ProcessGroup,
    clock: CommClock | None,
    group: int,
) -> torch.futures.Future[Tensor]:
    """All-reduce on ``stream`` without blocking the caller's stream; a stream that waits for the future gets the sum.

    An asynchronous call would return a future, too, but getting it from torch 2.15's NCCL backend (nccl2) makes the
    caller's stream wait for the sum, which would stall backward at every bucket.
    """
    future = gpu.future_on(buffer.device)
    # Wait for the gradients, which are written on the caller's stream.
    stream.wait_stream(gpu.current_stream(buffer.device))
    begin = clock.mark(stream) if clock is not None else None
    with gpu.on_stream(stream):
        dist.all_reduce(buffer, group=process_group)
        # set_result() records an event on this stream, for which streams that wait for the future will wait.
        future.set_result(buffer)
    if clock is not None:
        clock.span("all_reduce", begin, stream, group=group)
    # The caching allocator knows only the caller's stream: keep the memory until this stream is done with it.
    gpu.keep(buffer, stream)
    return future


def stream_for_all_reduces(process_group: dist.ProcessGroup, device: torch.device) -> gpu.Stream | None:
    """The stream that :func:`all_reduce_sum` needs on NCCL; None on other backends, whose futures block no stream."""
    is_nccl = gpu.has_streams(device) and family_of(process_group, device) == "nccl"
    return gpu.new_stream(device) if is_nccl else None


def wait_for_futures(futures: Sequence[torch.futures.Future[Tensor]], host_wait: HostWait) -> None:
    """Wait on the host until all futures have a result or an error; errors stay in the futures."""
    done = threading.Event()
    torch.futures.collect_all(list(futures)).add_done_callback(lambda _: done.set())
    while not done.is_set():
        done.wait(host_wait.poll())


def backend_for(process_group: dist.ProcessGroup, device: torch.device) -> str:
    """What the group's backend for ``device`` is registered as; a group such as ``cpu:gloo,cuda:nccl`` has several."""
    config = dist.get_backend_config(process_group)
    by_device = dict(entry.split(":", 1) for entry in str(config).split(",") if entry.count(":") == 1)
    return by_device.get(device.type, dist.get_backend(process_group))


_ON_NCCL = ("nccl", "nccl2", "nccl-legacy", "nccl-lazy", "ncclx")


def family_of(process_group: dist.ProcessGroup, device: torch.device) -> str:
    """``gloo`` or ``nccl`` if that is what the group uses on ``device``, whatever it is registered as; else its name.

    With ``TORCH_DISTRIBUTED_USE_TORCHCOMMS=1`` torch wraps the backends of torchcomms, which keep their names. Its NCCL
    has all that legs use; messages over its gloo have no tags.
    """
    name = backend_for(process_group, device)
    with contextlib.suppress(RuntimeError):  # no backend for this device, or one that does not tell its name
        backend = backend_of(process_group, device)
        name = backend.name()
        if name == "gloo" and hasattr(backend, "get_comm"):
            return "gloo of torchcomms, by TORCH_DISTRIBUTED_USE_TORCHCOMMS"
    return "nccl" if name in _ON_NCCL else name
