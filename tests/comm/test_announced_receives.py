"""Receives that are posted ahead of a scatter leg take little memory."""

from __future__ import annotations

from unittest import mock

import pytest

from ddp_crossover.comm.gloo_link import GlooLink
from ddp_crossover.dear import Pipeline
from ddp_crossover.pipeline import announcements
from equivalence import SGD, Case, Run, train_step
from models import WideNet

STEPS = 8


def _announced_at_once(fusion_mb: float) -> tuple[list[int], list[int]]:
    """The sizes of the groups that are announced before the first gradient of a backward arrives, and of all groups."""
    run = Run(Case(model=WideNet, optimizer=SGD, steps=STEPS, dear={"fusion_mb": fusion_mb}), with_dear=True)
    announced: list[int] = []
    begin_backward = Pipeline.begin_backward

    def noting(pipeline: Pipeline, *, same_buckets: bool) -> None:
        announced.clear()

        def announce(link: GlooLink, group: int, buffer: object) -> None:
            announced.append(group)
            original(link, group, buffer)

        original = GlooLink.announce
        with mock.patch.object(GlooLink, "announce", announce):
            begin_backward(pipeline, same_buckets=same_buckets)

    with mock.patch.object(Pipeline, "begin_backward", noting), mock.patch.object(announcements, "_LITTLE_BYTES", 0):
        for x, y in run.batches():
            train_step(run, x, y)
    plan = run.state.plan
    sizes = list(map(plan.group_bytes, plan.groups))
    run.detach()
    return [sizes[group] for group in announced], sizes


@pytest.mark.parametrize("fusion_mb", [0.01, 0.1, 2.0])
def test_what_is_announced_is_a_small_part_of_all_gradients_or_one_leg(on_ranks, fusion_mb) -> None:
    for announced, sizes in on_ranks(_announced_at_once, 2, fusion_mb):
        assert 1 <= len(announced) <= 4
        assert len(announced) == 1 or sum(announced) <= sum(sizes) / 16
