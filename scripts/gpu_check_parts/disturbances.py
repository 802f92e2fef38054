"""Legs that take long, and package code without one of its waits: they show whether streams are ordered.

At world size 1 a collective changes nothing, so a missing wait would not be seen. Here a scatter leg also doubles what
it finds in the buffer, and the gather leg sleeps and then halves it, both exactly. In the end the values are right, but
code that reads or writes the buffer at the wrong time is off by a factor of two.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from gpu_check_parts.models import device_sleep

LEG_CYCLES = 10_000_000


@contextmanager
def late_legs(device: torch.device, *, own_shard_is_read: bool) -> Iterator[None]:
    """Make all legs on this device late and noisy.

    Args:
        device: where the gradients are.
        own_shard_is_read: clipping and loss scaling may read this rank's slice between the legs. Then the scatter leg
            shows NaN for a while instead, and the gather leg leaves the buffer alone.
    """
    if device.type != "cuda":
        yield
        return
    from ddp_crossover.nccl import nccl_link
    from ddp_crossover.nccl.staged_gloo_link import _StagedGatherLeg

    reduce_scatter, all_gather = nccl_link._reduce_scatter, nccl_link._all_gather
    after_receiving = _StagedGatherLeg.after_receiving

    def late_reduce_scatter(shard: Tensor, buffer: Tensor, *args: Any, **kwargs: Any) -> Any:
        if own_shard_is_read:
            _hide_for_a_while(buffer)
        else:
            buffer.mul_(2.0)
        return reduce_scatter(shard, buffer, *args, **kwargs)

    def late_all_gather(buffer: Tensor, shard: Tensor, *args: Any, **kwargs: Any) -> Any:
        work = all_gather(buffer, shard, *args, **kwargs)
        is_leg = buffer.untyped_storage().data_ptr() == shard.untyped_storage().data_ptr()
        if is_leg:  # and not an exchange of norms
            device_sleep(device, LEG_CYCLES)
            if not own_shard_is_read:
                buffer.mul_(0.5)
        return work

    def late_after_receiving(leg: _StagedGatherLeg) -> None:
        with torch.cuda.device(device), torch.cuda.stream(leg.copy_stream):
            device_sleep(device, LEG_CYCLES)
        after_receiving(leg)

    with (
        mock.patch.object(nccl_link, "_reduce_scatter", late_reduce_scatter),
        mock.patch.object(nccl_link, "_all_gather", late_all_gather),
        mock.patch.object(_StagedGatherLeg, "after_receiving", late_after_receiving),
    ):
        yield


def _hide_for_a_while(buffer: Tensor) -> None:
    """On the current stream: keep a copy, show NaN, sleep, put the copy back."""
    copy = buffer.clone()
    buffer.fill_(float("nan"))
    device_sleep(buffer.device, LEG_CYCLES)
    buffer.copy_(copy)


@contextmanager
def without_wait_for_legs(device: torch.device) -> Iterator[None]:
    """Nobody waits for a leg any more."""
    from ddp_crossover.nccl.nccl_link import _NcclLeg

    with mock.patch.object(_NcclLeg, "wait", lambda leg, host_wait=None: None):
        yield


@contextmanager
def without_wait_for_gradients(device: torch.device) -> Iterator[None]:
    """Legs do not wait for the copies that fill their buffers."""
    from ddp_crossover.nccl.nccl_link import NcclLink

    original: Callable[..., None] = NcclLink.__init__

    def init(link: Any, *args: Any, **kwargs: Any) -> None:
        original(link, *args, **kwargs)
        link._stream = _DeafStream(device, priority=-1)

    with mock.patch.object(NcclLink, "__init__", init):
        yield


class _DeafStream(torch.cuda.Stream):
    """A stream that waits for no other."""

    def wait_stream(self, stream: torch.Stream) -> None:
        """Does nothing."""
