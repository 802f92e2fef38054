"""DDP's buckets after attach: small, unless the user's are smaller, and whatever else was asked of DDP still holds."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_crossover as dx
from ddp_crossover.torch_internals.ddp import GradBucket
from equivalence import Case, Run, check_case, optimizer
from models import INPUTS, OUTPUTS

MB = 2**20
# DDP closes a bucket with the gradient that fills it: here at most 1 MiB, so at most twice the cap.
ARRIVAL_BYTES = MB
BUCKET_VIEWS = {"gradient_as_bucket_view": True}


class LargeNet(nn.Sequential):
    """8 layers of about 0.7 MiB."""

    def __init__(self) -> None:
        layers = [nn.Linear(INPUTS, 420)]
        for _ in range(8):
            layers += [nn.Tanh(), nn.Linear(420, 420)]
        super().__init__(*layers, nn.Linear(420, OUTPUTS))


class HalfUsed(LargeNet):
    """Some layers are never used."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self):
            if index not in (5, 6):
                x = layer(x)
        return x


def _bucket_bytes(options: dict[str, Any], dear: dict[str, Any] | None, steps_before: int = 0) -> list[int]:
    """Sizes of DDP's buckets in the last of some steps; `dear=None`: without our hook."""
    ddp = DistributedDataParallel(LargeNet(), **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            ddp(torch.randn(2, INPUTS)).square().mean().backward()
            optimizer.step()

    train(steps_before)
    sizes: dict[int, int] = {}

    def note(bucket: GradBucket) -> None:
        if bucket.index() == 0:
            sizes.clear()
        sizes[bucket.index()] = bucket.buffer().nbytes

    state = None
    if dear is None:

        def hook(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            note(bucket)
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        hook.__annotations__ = {}
        ddp.register_comm_hook(None, hook)
    else:
        state = dx.attach(ddp, optimizer, **dear)
        reduce = state.reduce

        def noting(bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            note(bucket)
            return reduce(bucket)

        state.reduce = noting  # type: ignore[method-assign]
    train(5)
    if state is not None:
        state.detach()
    return [sizes[index] for index in sorted(sizes)]


def _skip_unless_known(options: Mapping[str, Any]) -> None:
    if missing := set(options) - set(inspect.signature(DistributedDataParallel.__init__).parameters):
        pytest.skip(f"torch {torch.__version__} has no {missing}")


@pytest.mark.parametrize("steps_before", [0, 3], ids=["at_once", "after_some_steps"])
@pytest.mark.parametrize(
    "options", [{}, {"bucket_cap_mb": 100}, {"static_graph": True}, {"bucket_cap_mb_list": [0.5, 20]}], ids=str
)
def test_buckets_are_small_after_attach(on_ranks, options, steps_before) -> None:
    _skip_unless_known(options)
    for sizes in on_ranks(_bucket_bytes, 2, options, {"tune": False}, steps_before):
        assert sum(sizes) == sum(p.nbytes for p in LargeNet().parameters())
        assert max(sizes) <= 2 * ARRIVAL_BYTES
        assert len(sizes) >= 4


def test_a_smaller_cap_of_the_user_is_kept(on_ranks) -> None:
    (plain, _), (ours, _) = (
        on_ranks(_bucket_bytes, 2, {"bucket_cap_mb": 0.3}, dear) for dear in (None, {"tune": False})
    )
    assert ours == plain
    assert len(ours) > 6


def test_plain_all_reduce_keeps_the_users_buckets(on_ranks) -> None:
    (plain, _), (ours, _) = (on_ranks(_bucket_bytes, 2, {}, dear) for dear in (None, {"schedule": "allreduce"}))
    assert ours == plain
    assert max(ours) > 2 * ARRIVAL_BYTES


def _attach_after_some_steps(run: Run) -> Iterator[Any]:
    """Plain DDP first; the reference arm is plain DDP throughout."""
    for index in range(run.case.steps):
        if index == 4:
            run.attach()
        x, y = run.batch(index)
        run.optimizer.zero_grad(set_to_none=index % 3 == 0)
        loss = run.loss(run.model(x), y)
        loss.backward()
        run.optimizer.step()
        yield loss


def _accumulate_and_attach_anew(run: Run) -> Iterator[Any]:
    """Of a static graph that DDP has learned it forgets nothing: not by attach, not by detach, nor between the two."""
    run.attach()
    for index in range(run.case.steps):
        if index in (7, 13, 27):
            run.detach()
        if index in (7, 19):
            run.attach()
        x, y = run.batch(index)
        with run.model.no_sync() if index > 2 and index % 3 != 2 else nullcontext():
            loss = run.loss(run.model(x), y)
            loss.backward()
        if index == 28:
            with torch.no_grad():
                run.model(x)
            copy.deepcopy(run.model)
        if index % 3 == 2:
            run.optimizer.step()
            run.optimizer.zero_grad(set_to_none=index % 2 == 0)
        yield loss


LARGE = Case(
    model=LargeNet, optimizer=optimizer(torch.optim.SGD, lr=0.01, momentum=0.9), steps=12, dear={"fusion_mb": 0.6}
)
UNUSED = {"find_unused_parameters": True}
CASES = {
    "25_mb": LARGE,
    "static_graph": replace(LARGE, ddp={"static_graph": True}),
    "find_unused": replace(LARGE, model=HalfUsed, ddp=UNUSED),
    "find_unused_static_graph": replace(LARGE, model=HalfUsed, ddp={**UNUSED, "static_graph": True}),
    "after_some_steps_bucket_view": replace(LARGE, loop=_attach_after_some_steps, ddp=BUCKET_VIEWS, steps=20),
    "after_some_steps_static_graph": replace(
        LARGE, loop=_attach_after_some_steps, ddp={"static_graph": True}, steps=20
    ),
    "attached_anew_static_graph_bucket_view": replace(
        LARGE, loop=_accumulate_and_attach_anew, ddp={"static_graph": True, **BUCKET_VIEWS}, steps=36, pipelined=False
    ),
    "bucket_cap_mb_list": replace(LARGE, ddp={"bucket_cap_mb_list": [0.5, 2.0]}),
}


@pytest.mark.parametrize("name", CASES)
def test_new_buckets_train_exactly(on_ranks, name) -> None:
    _skip_unless_known(CASES[name].ddp)
    check_case(CASES[name], on_ranks)


def _attach_within_an_iteration() -> None:
    ddp = DistributedDataParallel(LargeNet())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)

    def loss() -> torch.Tensor:
        return ddp(torch.randn(2, INPUTS)).square().mean()

    early = loss()
    state = dx.attach(ddp, optimizer, tune=False)
    with torch.no_grad():  # an evaluation changes nothing about it
        loss()
    ddp.module(torch.randn(2, INPUTS))
    with pytest.raises(RuntimeError, match="between a forward and its backward"):
        early.backward()
    optimizer.zero_grad()
    for _ in range(5):
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()
    state.detach()
    parameters = torch.cat([p.detach().flatten() for p in ddp.parameters()])
    everywhere = [torch.empty_like(parameters) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, parameters)
    assert torch.equal(*everywhere)  # each rank has batches of its own: the gradients were reduced


def test_attach_between_a_forward_and_its_backward_is_refused_and_before_the_forward_is_fine(on_ranks) -> None:
    on_ranks(_attach_within_an_iteration, 2)
