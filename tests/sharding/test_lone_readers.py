"""One rank alone reads gradients before `step()`, as a logger does, beside all else that ranks do together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ddp_crossover as dx
from models import INPUTS, DeepNet

_STEPS = 12
_READ_IN = (4, 5, 8)


class _Script:
    """A training script, with DDP as it is or attached, whose rank `reader` reads gradients at `place`."""

    def __init__(self, attached: bool, together: str, reader: int, place: str) -> None:
        torch.manual_seed(0)
        self.net = DeepNet()
        self.ddp = DistributedDataParallel(self.net)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        options: dict[str, Any] = {"fusion_mb": 1e-4, "shard_optimizer": True}
        if together == "stock clipping":
            options["norms"] = "sharded"
        self.state = dx.attach(self.ddp, self.optimizer, **options) if attached else None
        own_scaler = dx.GradScaler if attached else torch.amp.GradScaler
        self.scaler = own_scaler("cpu", init_scale=2.0**10, enabled=together == "scaler")
        self.together = together
        self.reads = dist.get_rank() == reader
        self.place = place
        self.seen: list[float] = []

    def read(self, step: int, place: str) -> None:
        if self.reads and place == self.place and step in _READ_IN:
            self.seen += [float(parameter.grad.abs().sum()) for parameter in self.net.parameters()]

    def do_together(self) -> None:
        if self.together == "own clipping" and self.state is not None:
            self.state.clip_grad_norm_(1e6)
        elif self.together in ("own clipping", "stock clipping"):
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1e6)
        elif self.together == "scaler":
            self.scaler.unscale_(self.optimizer)
        elif self.together == "consolidate" and self.state is not None:
            self.state.consolidate()

    def run(self) -> tuple[list[float], list[torch.Tensor]]:
        for step in range(_STEPS):
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            self.optimizer.zero_grad()
            loss = self.ddp(torch.randn(4, INPUTS, generator=generator)).square().mean()
            self.scaler.scale(loss).backward()
            self.read(step, "before")
            self.do_together()
            self.read(step, "after")
            if self.together.endswith("clipping"):
                self.do_together()
                self.read(step, "after both")
            self.scaler.step(self.optimizer)
            self.scaler.update()
        if self.state is not None:
            self.state.detach()
        return self.seen, [parameter.detach().clone() for parameter in self.net.parameters()]


def _reads_alone(together: str, reader: int, place: str) -> None:
    seen, ours = _Script(True, together, reader, place).run()
    expected, plain = _Script(False, together, reader, place).run()
    assert seen == expected
    assert (len(seen) > 0) == (dist.get_rank() == reader)
    assert all(torch.equal(one, other) for one, other in zip(ours, plain, strict=True))


@pytest.mark.parametrize("place", ["before", "after", "after both"])
@pytest.mark.parametrize("reader", [0, 1])
@pytest.mark.parametrize("together", ["own clipping", "stock clipping", "scaler", "consolidate"])
def test_a_rank_that_reads_alone_finds_the_others_in_step(on_ranks, together, reader, place) -> None:
    if place == "after both" and not together.endswith("clipping"):
        pytest.skip("is done once in a step")
    on_ranks(_reads_alone, 2, together, reader, place, timeout_s=60)
