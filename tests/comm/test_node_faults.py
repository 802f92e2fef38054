"""Nodes, when something breaks or ends: an error on every rank, also where nothing is exchanged with the lost one."""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ddp_crossover as dx
from ddp_crossover.comm.agreement import DisagreementError
from ddp_crossover.comm.gloo_leg import GlooScatterLeg
from ddp_crossover.comm.gloo_link import GlooLink
from equivalence import SGD, Case, Run, snapshot, train_step
from failing_backward import FailingBackward
from harness import run_faulty_ranks, run_ranks
from models import DeepNet, OddNet
from node_groups import INTERLEAVED, TWO_BY_TWO, Layout, on_nodes

pytestmark = pytest.mark.launches

GROUP_TIMEOUT_S = 4.0
GRACE_S = 12.0
FAULT_AT = 8
BY_NODE = {"groups": "node"}
# One bucket per layer, so that legs of both kinds are under way in backward.
SMALL_BUCKETS = {"bucket_cap_mb": 1e-4}


class _UsersError(Exception):
    pass


def _trip_at(run: Run, where: str, trip: Any) -> None:
    middle = run.model.module[6]
    if where == "forward":
        middle.register_forward_hook(lambda *_: trip())
    elif where == "backward":
        middle.weight.register_hook(lambda _: trip())


def _lose_a_rank(layout: Layout, lost: int, where: str) -> str:
    with on_nodes(layout):
        run = Run(Case(model=DeepNet, steps=FAULT_AT + 20, ddp=SMALL_BUCKETS, dear=BY_NODE), with_dear=True)
        run.attach()
    step = 0

    def trip() -> None:
        if step == FAULT_AT and run.rank == lost:
            os.kill(os.getpid(), signal.SIGKILL)

    _trip_at(run, where, trip)
    for step, (x, y) in enumerate(run.batches()):  # noqa: B007  # trip() reads it
        train_step(run, x, y)
        if where == "step":
            trip()
    return "trained to the end"


@pytest.mark.parametrize(
    ("layout", "lost", "where"),
    [(TWO_BY_TWO, 3, "backward"), (TWO_BY_TWO, 0, "forward"), (INTERLEAVED, 1, "step")],
    ids=["backward", "forward", "step"],
)
def test_a_killed_rank_ends_all_others(layout, lost, where) -> None:
    outcomes = run_faulty_ranks(_lose_a_rank, 4, layout, lost, where, group_timeout_s=GROUP_TIMEOUT_S)
    assert outcomes[lost].exitcode == -signal.SIGKILL
    for outcome in (one for one in outcomes if one.rank != lost):
        assert outcome.error is not None, f"rank {outcome.rank}: {outcome.result}"
        last_line = outcome.error.strip().splitlines()[-1]
        assert re.search(rf"LegError: rank {outcome.rank}: the (scatter|gather) leg of fusion group \d", last_line)
        assert outcome.exitcode == 0
        assert outcome.seconds < GROUP_TIMEOUT_S + GRACE_S


def _through_an_exception(dear: dict[str, Any]) -> tuple[dict[str, torch.Tensor], int]:
    """Backward raises on all ranks at one step, after which plain DDP may refuse to go on."""
    with on_nodes(TWO_BY_TWO):
        run = Run(Case(model=DeepNet, optimizer=SGD, ddp=SMALL_BUCKETS, dear=dear), with_dear=True)
        run.attach()
    run.model.module[6].register_forward_hook(lambda module, inputs, output: FailingBackward.apply(output))
    announced: list[GlooScatterLeg] = []
    announce = GlooLink.announce

    def noting(link: GlooLink, group: int, buffer: Any) -> None:
        announce(link, group, buffer)
        announced.append(link.early_receives.legs[group])  # type: ignore[attr-defined]

    with mock.patch.object(GlooLink, "announce", noting):
        after, step = _train_through(run, announced)
    assert announced
    assert all(leg.is_done() for leg in announced)
    return after, step


def _train_through(run: Run, announced: list[GlooScatterLeg]) -> tuple[dict[str, torch.Tensor], int]:
    for step, (x, y) in enumerate(run.batches()):
        run.optimizer.zero_grad()
        if step == FAULT_AT:
            announced.clear()
            FailingBackward.error = _UsersError()
            with pytest.raises(_UsersError):
                run.loss(run.model(x), y).backward()
            before = snapshot(run.model.module.state_dict())
            continue
        try:
            run.loss(run.model(x), y).backward()
        except RuntimeError:  # "Expected to have finished reduction in the prior iteration"
            break
        run.optimizer.step()
    run.optimizer.zero_grad()
    after = snapshot(run.model.module.state_dict())
    if step == FAULT_AT + 1:
        assert all(torch.equal(after[name], value) for name, value in before.items())
    run.detach()
    return after, step


CODED = {"wire_dtype": torch.int8}


@pytest.mark.parametrize("wire", [{}, CODED, {"compress": dx.TopK(0.25)}], ids=["dense", "coded", "sparse"])
def test_an_exception_in_backward_leaves_no_leg_open(on_ranks, wire) -> None:
    of_ranks = on_ranks(_through_an_exception, 4, {**BY_NODE, **wire}, timeout_s=40)
    states = [state for state, _ in of_ranks]
    assert len({step for _, step in of_ranks}) == 1
    for name, value in states[0].items():
        assert value.isfinite().all()
        assert all(torch.equal(state[name], value) for state in states)


# Ends.


def _leave(how: str, dear: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What is left when a script leaves in the middle of an iteration."""
    with on_nodes(INTERLEAVED):
        run = Run(Case(model=DeepNet, optimizer=SGD, steps=6, ddp=SMALL_BUCKETS, dear=dear), with_dear=True)
        run.attach()
    if run.rank == 2:
        run.model.module[6].weight.register_hook(lambda _: time.sleep(0.05))
    for x, y in run.batches():
        train_step(run, x, y)
    if how == "open_backward":
        run.optimizer.zero_grad()
        run.loss(run.model(x), y).backward()
    elif how == "detach":
        run.state.detach()
        run.state.detach()
    elif how == "destroy":
        dist.destroy_process_group(run.state._link.process_group)  # of the legs
    elif how == "closed":
        state = snapshot(run.model.module.state_dict())
        run.state._link.close()
        return state
    return snapshot(run.model.module.state_dict())


@pytest.mark.parametrize(
    ("how", "wire"),
    [("open_backward", {}), ("open_backward", CODED), ("detach", {}), ("destroy", {}), ("closed", {})],
    ids=["open_backward", "open_backward_with_codes", "detach", "destroy", "closed"],
)
def test_a_script_may_end_at_any_time(how, wire) -> None:
    states = run_ranks(_leave, 4, how, {**BY_NODE, **wire}, timeout_s=40)
    assert all(torch.equal(state[name], value) for state in states for name, value in states[0].items())


# Ranks that were set up differently.


def _attach(layout: Layout, without_groups: tuple[int, ...], not_by_torchrun: tuple[int, ...]) -> str:
    model = DistributedDataParallel(OddNet())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {} if dist.get_rank() in without_groups else BY_NODE
    start_s = time.monotonic()
    try:
        with nullcontext() if dist.get_rank() in not_by_torchrun else on_nodes(layout):
            assert ("GROUP_RANK" in os.environ) == (dist.get_rank() not in not_by_torchrun)
            dx.attach(model, optimizer, **options)
    except (DisagreementError, ValueError) as error:
        assert time.monotonic() - start_s < GRACE_S
        return f"{type(error).__name__}: {error}"
    return "attached"


def test_a_rank_without_groups_is_named_on_every_rank(on_ranks) -> None:
    for error in on_ranks(_attach, 4, TWO_BY_TWO, (0, 2, 3), (), timeout_s=30):
        assert error.startswith("DisagreementError: rank 1 differs from rank 0")
        assert "groups is None on rank 0 and 'node' on rank 1" in error


@pytest.mark.parametrize(
    ("layout", "not_by_torchrun", "sizes"),
    [(((0, 1, 3), (2,)), (), "3, 1"), (((0, 1, 2, 3),), (0,), "1, 3")],  # such a rank is on a node of its own
)
def test_nodes_of_different_sizes_are_refused_on_every_rank(on_ranks, layout, not_by_torchrun, sizes) -> None:
    for error in on_ranks(_attach, 4, layout, (), not_by_torchrun):
        assert error.startswith(f"ValueError: groups='node' needs equally many ranks on each node, got {sizes}")
