"""The schedule simulator: predicts the time of one training step from fusion groups, compute times and a link.

One rank stands for all. The link carries one leg at a time and never interrupts it. The simulated period goes from the
start of one backward to the start of the next. A forward waits for every group, at the latest at its own end, so the
link is empty whenever a backward begins, and one period is the periodic steady state.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from typing import Literal, NamedTuple

from ddp_crossover.fusion import Schedule
from ddp_crossover.plan.cost_model import ComputeProfile, LinkModel

LegKind = Literal["scatter", "gather", "all_reduce"]

# Times closer than this count as equal, so that rounding does not decide which of two simultaneous events goes first.
_MOMENT_S = 1e-9


class TimedGroup(NamedTuple):
    """Size and times of one fusion group.

    Attributes:
        buffer_bytes: size of its fusion buffer on the wire, in bytes, in the larger one of its two legs.
        arrival_s: seconds from the start of the backward until its last gradient is staged.
        use_s: seconds from the start of the forward until the first use of one of its parameters.
        split: whether it travels as a scatter and a gather leg; else it is one all-reduce with twice the bytes.
        scatter_part, gather_part: the part of ``buffer_bytes`` that each leg sends.
        codec_s: seconds that encoding and decoding take in each leg.
    """

    buffer_bytes: float
    arrival_s: float
    use_s: float
    split: bool = True
    scatter_part: float = 1.0
    gather_part: float = 1.0
    codec_s: float = 0.0


class SimulatedLeg(NamedTuple):
    """One leg's time on the link, in seconds from the start of the backward."""

    kind: LegKind
    group: int
    start_s: float
    end_s: float


class SimulatedStep(NamedTuple):
    """One period of the steady state.

    Attributes:
        step_s: length of a step in seconds.
        exposed_s: seconds of the step in which compute waits for communication.
        legs: all legs in the order in which the link sends them.
    """

    step_s: float
    exposed_s: float
    legs: tuple[SimulatedLeg, ...]

    @property
    def launch_order(self) -> tuple[tuple[str, int], ...]:
        """(kind, group) of all legs in the order of sending, for links that need the same order on all ranks."""
        return tuple((leg.kind, leg.group) for leg in self.legs)


def simulate(
    groups: Sequence[TimedGroup], profile: ComputeProfile, link: LinkModel, world_size: int, schedule: Schedule
) -> SimulatedStep:
    """Predict the step time of a schedule.

    Args:
        groups: the fusion groups; legs refer to them by index into this sequence.
        profile: lengths of forward, backward and the rest. Its times per parameter are not used: ``groups`` holds them.
        link: the link of each rank.
        world_size: number of ranks that share each group.
        schedule: ``ALLREDUCE``: both legs of a group are sent back to back when it arrives, and the backward ends
            when all legs have ended; this is plain DDP if the groups are its buckets. ``DEAR``: scatter legs are
            sent as groups arrive, gather legs in use order after the backward has ended and all scatter legs are sent
            (DeAR, Zhang et al. 2023, section 3). ``AUTO``: a ready scatter leg goes first, else the ready gather
            leg whose group is used first. With ``DEAR`` and ``AUTO`` the forward waits for each group at its
            first use.
    """
    if schedule == Schedule.ALLREDUCE:
        legs, done_s = _all_reduces(groups, link, world_size)
        backward_end_s = max(profile.backward_s, *done_s, 0.0)
    else:
        gathers_from_s = profile.backward_s if schedule == Schedule.DEAR else None
        legs, done_s = _split_legs(groups, link, world_size, gathers_from_s)
        backward_end_s = profile.backward_s
    step_s = _forward_end_s(groups, done_s, backward_end_s + profile.rest_s, profile.forward_s)
    return SimulatedStep(
        step_s=step_s,
        exposed_s=max(step_s - profile.compute_s, 0.0),
        legs=tuple(legs),
    )


def _by_arrival(groups: Sequence[TimedGroup]) -> list[int]:
    return sorted(range(len(groups)), key=lambda index: (groups[index].arrival_s, index))


def _by_use(groups: Sequence[TimedGroup]) -> list[int]:
    # Of groups that are needed at the same time, the last to arrive comes first, as in the plan's use order.
    return sorted(range(len(groups)), key=lambda index: (groups[index].use_s, -index))


class _Channel:
    """A link that carries one leg at a time. ``now_s`` is the time at which it is free again."""

    def __init__(self, groups: Sequence[TimedGroup], link: LinkModel, world_size: int) -> None:
        self._groups = groups
        self._link = link
        self._world_size = world_size
        self.now_s = 0.0
        self.legs: list[SimulatedLeg] = []
        self.done_s = [0.0] * len(groups)

    def send(self, kind: LegKind, group: int) -> None:
        """Occupy the link with one leg, and note when the result of this leg can be used."""
        timed = self._groups[group]
        copies = 2 if kind == "all_reduce" else 1
        part = {"all_reduce": 2.0, "scatter": timed.scatter_part, "gather": timed.gather_part}[kind]
        # Encoding one leg and sending another go side by side, so the slower of the two sets the pace.
        end_s = self.now_s + max(self._link.leg_s(part * timed.buffer_bytes, self._world_size), timed.codec_s)
        self.legs.append(SimulatedLeg(kind, group, self.now_s, end_s))
        # The second half of an all-reduce waits for the first half; meanwhile other legs use the link.
        self.done_s[group] = end_s + copies * self._link.latency_s + timed.codec_s
        self.now_s = end_s


def _all_reduces(
    groups: Sequence[TimedGroup], link: LinkModel, world_size: int
) -> tuple[list[SimulatedLeg], list[float]]:
    channel = _Channel(groups, link, world_size)
    for index in _by_arrival(groups):
        channel.now_s = max(channel.now_s, groups[index].arrival_s)
        if groups[index].split:
            channel.send("scatter", index)
            channel.send("gather", index)
            channel.done_s[index] += link.latency_s  # latency of the scatter leg, for which the gather leg waits
        else:
            channel.send("all_reduce", index)
    return channel.legs, channel.done_s


def _split_legs(
    groups: Sequence[TimedGroup], link: LinkModel, world_size: int, gathers_from_s: float | None
) -> tuple[list[SimulatedLeg], list[float]]:
    """Send scatter legs first, and gather legs when no scatter leg is ready.

    If ``gathers_from_s`` is given, gather legs start at that time, and only after all scatter legs.
    """
    channel = _Channel(groups, link, world_size)
    use_rank = {index: rank for rank, index in enumerate(_by_use(groups))}
    arriving = deque(_by_arrival(groups))
    reduced: list[tuple[float, int]] = []  # heap by done_s: scatter leg sent, result not ready yet
    ready: list[tuple[int, int]] = []  # heap by use order
    while arriving or reduced or ready:
        soon_s = channel.now_s + _MOMENT_S
        while reduced and reduced[0][0] <= soon_s:
            index = heapq.heappop(reduced)[1]
            heapq.heappush(ready, (use_rank[index], index))
        may_gather = gathers_from_s is None or (not arriving and gathers_from_s <= soon_s)
        if arriving and groups[arriving[0]].arrival_s <= soon_s:
            index = arriving.popleft()
            channel.send("scatter" if groups[index].split else "all_reduce", index)
            if groups[index].split:
                heapq.heappush(reduced, (channel.done_s[index], index))
        elif ready and may_gather:
            channel.send("gather", heapq.heappop(ready)[1])
        else:
            events_s = [groups[index].arrival_s for index in list(arriving)[:1]]
            events_s += [done_s for done_s, _ in reduced[:1]]
            if ready and not arriving and gathers_from_s is not None:
                events_s.append(gathers_from_s)
            channel.now_s = min(events_s)
    return channel.legs, channel.done_s


def _forward_end_s(groups: Sequence[TimedGroup], done_s: Sequence[float], start_s: float, forward_s: float) -> float:
    """When the forward ends if it waits for each group at its first use."""
    now_s, offset_s = start_s, 0.0
    for index in _by_use(groups):
        use_s = min(groups[index].use_s, forward_s)  # parameters unused in forward wait at its end
        now_s = max(now_s + use_s - offset_s, done_s[index])
        offset_s = use_s
    return now_s + forward_s - offset_s
