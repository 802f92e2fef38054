"""What the demo measures, on all ranks together: compute, the link, the arms, their losses."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

import ddp_crossover as dx
from bench_kit.digest import digests
from bench_kit.rounds import turns
from bench_kit.training import all_reduces_s, mean_over_ranks
from demo_parts.arms import DemoArm, Images

BATCH_SIZES = (8, 64)
# DDP rebuilds its buckets in the second step.
WARM_UP_STEPS = 3
MOST_TUNING_STEPS = 400


@dataclass(frozen=True)
class Lengths:
    """How much of everything is measured.

    Attributes:
        end_s: when the demo is to end, after its start.
        compute_s: of a step: long against disturbances, and short enough for some hundred steps.
        compute_turns: turns of compute alone, before the link's speed is chosen.
        buckets_mb: bucket sizes of plain DDP to try; None: as it comes.
        first_rounds: rounds of all of them, and of DeAR, for the first picture.
        traced_steps: steps in the last picture's traces.
        tune: whether DeAR tries group sizes, as it does by default; otherwise it predicts them from measured times.
    """

    end_s: float = 85.0
    compute_s: float = 0.2
    compute_turns: int = 2
    buckets_mb: tuple[float | None, ...] = (None, 4.0, 2.0, 1.0)
    first_rounds: int = 2
    traced_steps: int = 5
    tune: bool = False


SHORT = Lengths()
FULL = Lengths(
    end_s=270.0, compute_turns=4, buckets_mb=(None, 10.0, 4.0, 2.0, 1.0), first_rounds=3, traced_steps=10, tune=True
)
QUICK = Lengths(end_s=0.0, compute_turns=1, buckets_mb=(None, 1.0), first_rounds=1, traced_steps=3)
_SEARCH_STEPS = 3

Report = Callable[[str], None]
"""Called with what is done now."""


def choose_batch_size(images: Images, alone: DemoArm, lengths: Lengths) -> None:
    """Set the batch size so that a step computes for about as long as `lengths` says. Collective."""
    step_s = compute_s(alone, 1)
    low, high = BATCH_SIZES
    images.batch_size = min(max(8 * round(images.batch_size * lengths.compute_s / step_s / 8), low), high)


def compute_s(alone: DemoArm, turns_of_it: int) -> float:
    """Seconds per step without communication: the shortest of some turns, as disturbances only make it longer."""
    alone.catch_up(alone.steps + WARM_UP_STEPS)
    return min(mean_over_ranks([alone.arm.turn_s(_SEARCH_STEPS) for _ in range(turns_of_it)]))


def communication_s(arm: DemoArm, gradient_bytes: int) -> float:
    """Seconds for one all-reduce of all gradients over the arm's link, with nothing else to do."""
    return min(all_reduces_s(torch.zeros(gradient_bytes // 4), warm_up=1, times=2, process_group=arm.group))


def least_s(lengths: Lengths, steps: int, rounds: int, ddp_s: float, compute_s: float) -> float:
    """Seconds for the warm-up, the first rounds, so many rounds more and the traces, at these times of a step."""
    plain = len(lengths.buckets_mb)
    warm_up = plain * WARM_UP_STEPS * ddp_s + (MOST_TUNING_STEPS / 4 if lengths.tune else 12) * ddp_s
    first = lengths.first_rounds * (steps + 1) * ((plain + 1) * ddp_s + compute_s)
    return warm_up + first + rounds * (steps + 1) * (3 * ddp_s + compute_s) + 3 * (lengths.traced_steps + 2) * ddp_s


def fastest(times_s: list[list[float]]) -> int:
    """The number of the arm whose median turn is the shortest."""
    medians_s = [statistics.median(of_arm) for of_arm in times_s]
    return medians_s.index(min(medians_s))


def time_rounds(arms: list[DemoArm], rounds: int, steps: int, report: Report) -> list[list[float]]:
    """Seconds per step of each arm in each round. Arms take turns, so a slow moment hits all of them."""
    own_s: list[list[float]] = [[] for _ in arms]
    for turn in turns(len(arms), rounds):
        report(f"round {turn.round + 1} of {rounds}: {arms[turn.index].label}")
        own_s[turn.index].append(arms[turn.index].arm.turn_s(steps))
    return [mean_over_ranks(times_s) for times_s in own_s]


class Traced(NamedTuple):
    """Some steps of one arm, one after the other as in training.

    Attributes:
        trace: of this rank.
        exposed_s: median time of a step in which a leg was under way and nothing was computed, on this rank.
        sent_bytes: bytes per step over each of its links.
        limits_bytes_per_s: how fast each connection of each link may send.
        overlapped: number of steps whose gather legs were mostly hidden; None for plain DDP.
        finished: number of steps that had gather legs; None for plain DDP.
    """

    trace: dx.Trace
    exposed_s: float
    sent_bytes: list[float]
    limits_bytes_per_s: list[list[int]]
    overlapped: int | None
    finished: int | None


def trace_steps(demo_arm: DemoArm, steps: int) -> Traced:
    """Trace some steps. Collective. Plain DDP gets a hook for it, so this comes after what is timed."""
    arm = demo_arm.arm
    state = None if demo_arm.is_left_alone else arm.state
    traceable = dx.DdpTimer(demo_arm.ddp, demo_arm.optimizer) if state is None else state
    sent_before = demo_arm.sent_bytes()
    dist.barrier()
    arm.step()
    before = state.stats() if state else None
    with traceable.trace() as trace:
        for _ in range(steps + 1):  # the last step is complete when one more begins
            arm.step()
    after = state.stats() if state else None
    arm.drain()
    dist.barrier()
    trace.title = demo_arm.label
    return Traced(
        trace=trace,
        exposed_s=statistics.median(step.exposed_s for step in trace.steps()),
        sent_bytes=[
            (late - early) / (steps + 2) for late, early in zip(demo_arm.sent_bytes(), sent_before, strict=True)
        ],
        limits_bytes_per_s=[link.limits_bytes_per_s() for link in demo_arm.open_links],
        overlapped=after.overlapped_steps - before.overlapped_steps if before and after else None,
        finished=after.finished_steps - before.finished_steps if before and after else None,
    )


def last_loss(demo_arm: DemoArm, steps: int) -> float:
    """The mean loss of its last steps, on all ranks. Collective."""
    last = torch.stack(demo_arm.course.losses[-steps:]).double().mean()
    dist.all_reduce(last)
    return last.item() / dist.get_world_size()


class Comparison(NamedTuple):
    """Whether all arms ended with the same bits, on all ranks. `first_difference` names a tensor, or is empty."""

    tensors: int
    steps: int
    first_difference: str


def compare(arms: list[DemoArm]) -> Comparison:
    """Compare losses of all steps, parameters and buffers of the arms, and parameters of the ranks. Collective."""
    own = [digests({"model": arm.state_dict(), "losses": torch.stack(arm.course.losses)}) for arm in arms]
    ranks: list[list[dict[str, str]]] = [[]] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    # Each rank has losses of its own, and buffers, until DDP sends those of rank 0 before the next forward.
    parameters = {f"model.{name}" for name, _ in arms[0].ddp.module.named_parameters()}
    pairs = [(arms_of[0], other, set(arms_of[0])) for arms_of in ranks for other in arms_of[1:]]
    pairs += [(ranks[0][0], arms_of[0], parameters) for arms_of in ranks[1:]]
    different = (name for one, other, names in pairs for name in one if name in names and one[name] != other[name])
    return Comparison(len(arms[0].state_dict()), arms[0].steps, next(different, ""))
