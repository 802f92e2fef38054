"""DDP writes into its buckets before it calls the hook: when a backward begins, no leg and no update uses them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from ddp_crossover.comm.gloo_leg import GlooGatherLeg
from equivalence import Case, Run, check_case
from models import DeepNet

LATE_S = 0.02
MOVES_AT = 5


def _peers_take_their_time(run: Run) -> Iterator[Any]:
    complete, open_legs, pending = GlooGatherLeg._complete, [], []

    def later(leg: GlooGatherLeg) -> None:
        time.sleep(LATE_S)  # as if a peer had not yet taken all that this rank sends
        complete(leg)

    def look(gradient: Any) -> None:
        pipeline = run.state._reducer._in_force.pipeline if run.state is not None else None
        if pipeline is not None:
            open_legs.append(sum(group.gather is not None and not group.gather.is_done() for group in pipeline.groups))
            pending.append(len(pipeline.updates))

    with mock.patch.object(GlooGatherLeg, "_complete", later):
        for index, (x, y) in enumerate(run.batches()):
            run.optimizer.zero_grad()
            output = run.model(x)
            output.register_hook(look)
            loss = run.loss(output, y)
            loss.backward()
            if index % 2:  # else nobody asks for these gradients
                run.optimizer.step()
            yield loss
    if run.with_dear:
        assert len(open_legs) > run.case.steps // 2
        assert not any(open_legs) and not any(pending), (open_legs, pending)


def _storage_moves(run: Run) -> Iterator[Any]:
    """A script that has got one gradient moves the storage of the whole bucket."""
    post = GlooGatherLeg.post

    def later(leg: GlooGatherLeg) -> None:
        time.sleep(LATE_S)  # so that peers' gradients come when the first one was read long ago
        post(leg)

    with mock.patch.object(GlooGatherLeg, "post", later):
        for index, (x, y) in enumerate(run.batches()):
            run.optimizer.zero_grad()
            loss = run.loss(run.model(x), y)
            loss.backward()
            if index == MOVES_AT:
                next(run.model.parameters()).grad.share_memory_()  # gathered first
            run.optimizer.step()
            yield loss


def test_storage_of_a_bucket_moves_only_when_no_leg_uses_it(on_ranks) -> None:
    check_case(Case(_storage_moves, DeepNet, ddp={"gradient_as_bucket_view": True}, pipelined=False), on_ranks)


@pytest.mark.parametrize("view", [False, True], ids=["", "bucket_view"])
def test_legs_and_updates_are_over_when_backward_begins(on_ranks, view) -> None:
    check_case(Case(_peers_take_their_time, DeepNet, ddp={"gradient_as_bucket_view": view}), on_ranks)
