"""Jobs share GPUs whose work is queued: no wait of the device is kept, none is given too early, and nothing deadlocks.

On virtual GPUs, see `virtual_jobs`.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from unittest import mock

import pytest

from ddp_crossover.addons.lease.sharing.lease_holder import Backlog
from virtual_jobs import HOLD_LIMIT_S, Rank, VirtualGpu, VirtualLease, both_s, fill, idle, virtual_hosts

STEPS = 20
KERNEL_S = 1e-3
# Of a step of `Rank`: compute, and legs one after the other, of which some run under compute.
COMPUTE_S, ALONE_S = 18e-3, 42e-3


def _alone() -> list[float]:
    with virtual_hosts() as hosts:
        rank = Rank(VirtualGpu(hosts), None, "main", 1, {})
        hosts.run(partial(rank.train, STEPS))
        return [end for _, end in rank.gpu.intervals("main")]


def _beside_a_filler(begin_s: float = 0.0, **options: float) -> tuple[Rank, VirtualGpu]:
    with virtual_hosts() as hosts:
        gpu = VirtualGpu(hosts)
        rank = Rank(gpu, VirtualLease(gpu, "main"), "main", 1, {}, **options)
        filler = VirtualLease(gpu, "filler", "filler")
        hosts.run(
            partial(rank.train, STEPS),
            partial(fill, gpu, filler, KERNEL_S, lambda: len(rank.steps_s) == STEPS, begin_s),
        )
    return rank, gpu


def test_gaps_are_filled_from_the_first_wait_of_a_forward_on_and_the_main_job_is_hardly_slowed_down() -> None:
    rank, gpu = _beside_a_filler()
    main, filler = gpu.intervals("main"), gpu.intervals("filler")
    gaps = [gap for gap in idle(main) if gap[1] - gap[0] > 2 * KERNEL_S]
    gaps_s = sum(end - begin for begin, end in gaps)
    # The longest wait of a step is the first one: all legs go in 36 ms, under 18 ms of compute.
    assert gaps_s > STEPS * 10e-3
    assert both_s(filler, gaps) > 0.7 * gaps_s
    assert both_s(main, filler) < 0.02 * sum(end - begin for begin, end in main)
    assert main[-1][1] < 1.1 * _alone()[-1]
    # What is counted as filled was computed in.
    assert 0.6 * gaps_s < rank.turns.ledger.filled_s <= 1.1 * both_s(filler, idle(main))


def test_a_step_is_one_turn_whose_forward_is_held_until_it_runs_through() -> None:
    rank, gpu = _beside_a_filler()
    held = rank.turns.stats()
    # The first steps are not predicted; those at the end were not looked at.
    assert held.predicted_s > (STEPS - 6) * 15e-3
    assert held.stalls_s < 0.05 * held.predicted_s
    assert held.late_s < 0.1 * held.predicted_s
    turns = [gap for gap in idle(gpu.intervals("main")) if gap[1] - gap[0] > 2 * KERNEL_S]
    assert len(turns) < STEPS + 6


def test_in_a_held_forward_the_host_runs_ahead() -> None:
    """It queues all of a forward and a backward at once, as without a lease."""
    rank, gpu = _beside_a_filler()
    ended_s = [end for _, end in gpu.intervals("main")]
    of_a_step = 2 * rank.groups
    behind = [ended_s[(step + 1) * of_a_step - 1] - rank.steps_s[step] for step in range(6, STEPS)]
    assert min(behind) > COMPUTE_S / 2


def test_a_forward_is_not_held_for_what_has_arrived_although_it_was_predicted_to_come_later() -> None:
    rank, _ = _beside_a_filler(fast_from_step=10)
    step_s = [later - earlier for earlier, later in pairwise(rank.steps_s)]
    # From the first step with a fast wire on; a prediction alone would take five steps to follow.
    assert max(step_s[12:14]) < 0.6 * ALONE_S


def _two_unequal_ranks(*, share: bool) -> tuple[list[Rank], list[VirtualGpu]]:
    """One job on two GPUs, whose second rank computes for longer; with a filler on each, or alone."""
    with virtual_hosts() as hosts:
        gpus, meetings = [VirtualGpu(hosts) for _ in range(2)], {}
        ranks = [
            Rank(gpu, VirtualLease(gpu, "main") if share else None, "main", 2, meetings, forward_s=forward_s)
            for gpu, forward_s in zip(gpus, (1e-3, 2e-3), strict=True)
        ]
        jobs = [partial(rank.train, STEPS) for rank in ranks]

        def has_ended() -> bool:
            return all(len(rank.steps_s) == STEPS for rank in ranks)

        if share:
            jobs += [partial(fill, gpu, VirtualLease(gpu, "filler", "filler"), KERNEL_S, has_ended) for gpu in gpus]
        hosts.run(*jobs)
        return ranks, gpus


def test_ranks_of_different_speed_hold_so_that_they_come_to_their_legs_together() -> None:
    _, alone = _two_unequal_ranks(share=False)
    ranks, gpus = _two_unequal_ranks(share=True)
    for gpu, before in zip(gpus, alone, strict=True):
        assert gpu.intervals("main")[-1][1] < 1.1 * before.intervals("main")[-1][1]
    # The faster one begins its forwards later.
    fast, slow = (rank.turns.stats().predicted_s for rank in ranks)
    assert fast > slow + (STEPS - 6) * 1e-3


def test_alone_nothing_is_held_and_nothing_measured() -> None:
    with virtual_hosts() as hosts:
        gpu = VirtualGpu(hosts)
        rank = Rank(gpu, VirtualLease(gpu, "main"), "main", 1, {})
        hosts.run(partial(rank.train, STEPS))
    assert rank.turns.stats().predicted_s == rank.turns.stats().late_s == 0.0
    assert gpu.intervals("main")[-1][1] == pytest.approx(_alone()[-1], rel=0.01)


@pytest.mark.parametrize("begin_ms", [31, 47, 76, 95, 133])
def test_a_job_that_comes_later_does_not_compute_beside_what_is_queued(begin_ms) -> None:
    # Short legs: the host is more than a step ahead, and has long left the turn of the device.
    _, gpu = _beside_a_filler(begin_ms * 1e-3, leg_s=1e-4, launch_s=1e-3)
    main, filler = gpu.intervals("main"), gpu.intervals("filler")
    assert len(filler) > 2
    assert both_s(main, filler[:1]) < 2e-4


def _two_jobs_on_two_gpus(**options: bool) -> tuple[float, float]:
    """The longest step of any rank, and the time in which both computed, in seconds. Ranks come at different times."""
    with virtual_hosts() as hosts:
        gpus = [VirtualGpu(hosts) for _ in range(2)]
        ranks, jobs = [], []
        for job, begins_s in (("a", (0.0, 0.021)), ("b", (0.020, 0.001))):
            meetings: dict = {}
            for gpu, begin_s in zip(gpus, begins_s, strict=True):
                rank = Rank(gpu, VirtualLease(gpu, job), job, 2, meetings, launch_s=1e-3, **options)
                ranks.append(rank)
                jobs.append(partial(rank.train, STEPS, begin_s))
        hosts.run(*jobs)
        longest_s = max(later - earlier for rank in ranks for earlier, later in pairwise(rank.steps_s))
        return longest_s, max(both_s(gpu.intervals("a"), gpu.intervals("b")) for gpu in gpus)


def test_two_jobs_on_two_gpus_do_not_wait_for_each_other() -> None:
    longest_s, both_computed_s = _two_jobs_on_two_gpus()
    assert longest_s < 4 * ALONE_S
    # Only at the beginning: what a job has queued before the other one came goes on by itself.
    assert both_computed_s < 3 * COMPUTE_S


def test_nor_where_scripts_wait_for_gradients_between_turns() -> None:
    longest_s, _ = _two_jobs_on_two_gpus(reads_early=True)
    assert longest_s < HOLD_LIMIT_S


def test_a_turn_lasts_until_the_device_has_done_what_was_queued_in_it() -> None:
    with virtual_hosts() as hosts:
        gpu = VirtualGpu(hosts)
        # Without legs: the next turn is wanted while the device still works on the last one.
        rank = Rank(gpu, VirtualLease(gpu, "main"), "main", 1, {}, leg_s=1e-5)
        other = VirtualLease(gpu, "other")
        hosts.run(
            partial(rank.train, STEPS),
            partial(fill, gpu, other, 20 * KERNEL_S, lambda: len(rank.steps_s) == STEPS, 5e-3),
        )
    ledger = rank.turns.ledger
    assert ledger.held_s < 1.2 * sum(end - begin for begin, end in gpu.intervals("main"))


def test_without_a_look_at_open_waits_they_do() -> None:
    """A turn that lasts until the device has done everything waits for a leg whose peer waits for a turn."""
    with (
        mock.patch.object(Backlog, "stands_at_last_wait", lambda backlog: False),
        mock.patch.object(Backlog, "stands_for_long", lambda backlog: False),
    ):
        longest_s, _ = _two_jobs_on_two_gpus()
    assert longest_s > HOLD_LIMIT_S / 2
