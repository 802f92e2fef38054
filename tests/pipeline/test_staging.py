"""Staging on the posting thread, when it is late: DDP's buckets belong to the next backward as soon as that begins."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from ddp_crossover.comm.gloo_link import GlooLink
from ddp_crossover.dear import Pipeline
from equivalence import SGD, Case, Run, check_case
from models import DeepNet

LATE_S = 0.1
HOLDS_AT = (8, 11)

pytestmark = pytest.mark.quick


def _held_gradients(run: Run) -> Iterator[Any]:
    """Gradients that are put aside unread, without a step, while another batch is on its way."""
    copy, is_late = Pipeline._copy, False

    def late_copy(self: Pipeline, *args: Any) -> None:
        if is_late and threading.current_thread() is not threading.main_thread():
            time.sleep(LATE_S)
        copy(self, *args)

    # As on a link that wants a buffer in one piece.
    with mock.patch.object(Pipeline, "_copy", late_copy), mock.patch.object(GlooLink, "takes_parts", False):
        run.attach()
        for index, (x, y) in enumerate(run.batches()):
            run.optimizer.zero_grad()
            is_late = index in HOLDS_AT
            loss = run.loss(run.model(x), y)
            loss.backward()
            if is_late:
                held = [p.grad for p in run.model.parameters()]
                run.optimizer.zero_grad()
                other_x, other_y = run.batch(100 + index)
                (100 * run.loss(run.model(other_x), other_y)).backward()
                yield held
                continue
            run.optimizer.step()
            yield loss


def test_late_staging_ends_before_the_next_backward_writes_into_the_buckets(on_ranks) -> None:
    ddp = {"gradient_as_bucket_view": False}
    check_case(Case(_held_gradients, DeepNet, SGD, steps=14, ddp=ddp), on_ranks)
