"""Figures for users about training steps, a state in words, and the log of fall-backs to slower paths."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_crossover.fusion import MB, FusionPlan
from ddp_crossover.log import say, short
from ddp_crossover.report.clock import NOT_MEASURED, CommSums
from ddp_crossover.torch_internals.ddp import managed_parameters

STEPS_KEPT = 100
# An iteration counts as overlapped if compute hides at least this share of the time of its gather legs.
_MOSTLY = 0.5
# Causes that are shown to people.
_SHOWN = 4
# What `DearStats.flat` shows of the latest iteration, and of the lease.
_FLAT_STEP = {
    "step_s": "duration_s",
    **{name: name for name in ("compute_s", "communication_s", "exposed_s", "gather_s", "gather_exposed_s")},
    "sent_bytes": "sent_bytes",
}
_FLAT_LEASE = ("held_s", "given_s", "filled_s", "regrant_s")


@dataclass(frozen=True)
class StepStats:
    """Figures of one rank and one iteration: from the end of one reduced backward to the end of the next.

    Attributes:
        duration_s: wall-clock time.
        communication_s: time in which at least one leg was under way. NaN where no
            leg is timed, as on NCCL, whose legs do not run in host time.
        exposed_s: time in which the training thread waited for a leg. NaN where no leg is timed.
        gather_s: time in which at least one gather leg was under way. NaN where no leg is timed.
        gather_exposed_s: time in which the training thread waited for a gather leg. NaN where no leg is timed.
        sent_bytes: payload bytes that this rank has sent. A leg may be sent one iteration after it was started.
        fallbacks: for each reason, how often a slower path was taken.
    """

    duration_s: float
    communication_s: float
    exposed_s: float
    gather_s: float
    gather_exposed_s: float
    sent_bytes: int
    fallbacks: Mapping[str, int]

    @property
    def compute_s(self) -> float:
        """Time not spent waiting for communication."""
        return self.duration_s - self.exposed_s

    @property
    def hidden_share(self) -> float | None:
        """Share of ``gather_s`` in which compute went on, 0 to 1; None if no gather leg was timed."""
        return max(0.0, 1.0 - self.gather_exposed_s / self.gather_s) if self.gather_s > 0 else None


@dataclass(frozen=True)
class LeaseUse:
    """How one rank has shared its device with other jobs since attach.

    Attributes:
        held_s: time in which this job held the lease.
        gaps: number of waits for communication in which this job gave its lease away, or another job held it.
        given_s: total length of the gaps, from when the lease was free until the communication was over.
        filled_s: time inside gaps in which another job held the lease, sampled every millisecond.
        regrant_s: time in which compute waited for the lease.
        predicted_s: for forwards that were held for another job, how long after the end of backward they were
            predicted to be able to run through, in sum.
        stalls_s: by how much they began too early, and so stalled while this job held the lease.
        late_s: by how much they began too late, because of a wrong prediction or of another job's turn.
        hand_offs: how often the lease was given up while another job waited for it.
        gain: by how much steps beside another job were shorter with the lease than without it, as a fraction of the
            latter, when some of each were last compared; None before.
        sharing: False during a break from sharing, which begins when the gain is below 2%.
        grants: how often the lease was granted.
        lost: how often the broker ended a turn, because it was too long or because the broker went away.
        unleased: for each reason, how often a turn was computed without the lease.
    """

    held_s: float
    gaps: int
    given_s: float
    filled_s: float
    regrant_s: float
    predicted_s: float
    stalls_s: float
    late_s: float
    hand_offs: int
    gain: float | None
    sharing: bool
    grants: int
    lost: int
    unleased: Mapping[str, int]


@dataclass(frozen=True)
class DearStats:
    """Figures of one rank since attach, until DDP trains without the hook.

    Attributes:
        iterations: backward passes whose gradients were reduced.
        pipelined_iterations: iterations that took the pipeline; the others were plain all-reduces.
        overlapped_steps: pipelined iterations in which compute hid at least half of the time of the gather legs. If
            that is not measured, as on NCCL: iterations in which no code needed all updates or gradients at once.
        finished_steps: pipelined iterations whose gather legs are over; all but the last.
        looks: lines of code (file and line) that needed updates or gradients at once, and in how many steps.
        deferred_steps: ``optimizer.step()`` calls with at least one update put off to the next forward.
        elapsed_s: wall-clock time since the first reduced backward ended.
        communication_s: time in which at least one leg was under way. NaN where no
            leg is timed, as on NCCL, whose legs do not run in host time.
        exposed_s: time in which the training thread waited for a leg. NaN where no leg is timed.
        sent_bytes: payload bytes that this rank has sent.
        fallbacks: for each reason, how often a slower path was taken.
        advice: for some of these reasons, what would change it.
        last_steps: figures of the latest iterations, at most 100, the most recent last.
        lease: how the device was shared; None without ``lease=``.
    """

    iterations: int
    pipelined_iterations: int
    overlapped_steps: int
    finished_steps: int
    looks: Mapping[str, int]
    deferred_steps: int
    elapsed_s: float
    communication_s: float
    exposed_s: float
    sent_bytes: int
    fallbacks: Mapping[str, int]
    last_steps: tuple[StepStats, ...]
    lease: LeaseUse | None = None
    advice: Mapping[str, str] = field(default_factory=dict)

    @property
    def compute_s(self) -> float:
        """Time not spent waiting for communication."""
        return self.elapsed_s - self.exposed_s

    @property
    def obstacles(self) -> Counter[str]:
        """Each cause in ``looks`` and ``fallbacks`` once, with the number of steps that it kept from overlapping."""
        causes = " ".join(self.fallbacks)
        looks = {look: steps for look, steps in self.looks.items() if f"{look.split()[0]} " not in f"{causes} "}
        return Counter({**self.fallbacks, **looks})

    def __str__(self) -> str:
        """Return how many steps hid their all-gathers behind the next forward and, in a line each, what kept others."""
        plain = self.iterations - self.pipelined_iterations
        if self.pipelined_iterations:
            overlapped, more = f"{self.overlapped_steps} of {self.finished_steps} steps hid their all-gathers", " more"
        else:
            overlapped, more = "no steps hid their all-gathers", ""
        lines = [overlapped + (f"; {plain}{more} were plain all-reduces" if plain else "")]
        lines += [f"  {_times(times)}: {what}" for what, times in self.obstacles.most_common(_SHOWN)]
        if not self.obstacles and self.overlapped_steps < self.finished_steps:
            lines.append("  no code kept the others: their gather legs took longer than the forward that hides them")
        return "\n".join(lines)

    def flat(self, prefix: str = "ddp_crossover/") -> dict[str, float]:
        """Return figures for W&B, TensorBoard or Prometheus: plain floats, always under the same names.

        Made for every step: it waits for nothing and reads a few numbers. Names of the latest iteration: ``step_s``,
        ``compute_s``, ``communication_s``, ``exposed_s``, ``gather_s``, ``gather_exposed_s``, ``sent_bytes``, as in
        :class:`StepStats`; NaN before the second iteration has ended, and what is not measured. Counters
        since attach: ``steps_total``, ``pipelined_steps_total``, ``overlapped_steps_total``, ``fallbacks_total``,
        ``exposed_s_total``, ``sent_bytes_total`` and, with ``lease=``, ``lease_held_s_total``,
        ``lease_given_s_total``, ``lease_filled_s_total``, ``lease_regrant_s_total`` as in :class:`LeaseUse`.

        Args:
            prefix: put before each name. The default groups the figures in W&B and TensorBoard. Prometheus allows
                letters, digits, underscores and colons: use ``"ddp_crossover_"`` there.

        Example::

            wandb.log(state.stats().flat(), step=step)

            for name, value in state.stats().flat().items():
                writer.add_scalar(name, value, step)  # TensorBoard

            for name, value in state.stats().flat("ddp_crossover_").items():
                gauges[name].set(value)  # prometheus_client.Gauge
        """
        last = self.last_step
        figures: dict[str, float] = {
            **{name: math.nan if last is None else getattr(last, field) for name, field in _FLAT_STEP.items()},
            "steps_total": self.iterations,
            "pipelined_steps_total": self.pipelined_iterations,
            "overlapped_steps_total": self.overlapped_steps,
            "fallbacks_total": sum(self.fallbacks.values()),
            "exposed_s_total": self.exposed_s,
            "sent_bytes_total": self.sent_bytes,
        }
        if self.lease is not None:
            figures |= {f"lease_{name}_total": getattr(self.lease, name) for name in _FLAT_LEASE}
        return {prefix + name: float(value) for name, value in figures.items()}

    @property
    def last_step(self) -> StepStats | None:
        """Figures of the latest iteration; None before the second one has ended."""
        return self.last_steps[-1] if self.last_steps else None


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


class _Sample(NamedTuple):
    """Running sums at the end of one backward."""

    at_s: float
    sums: CommSums
    sent_bytes: int
    fallbacks: Counter[str]


class StepLog:
    """Keeps the figures of the latest iterations: the differences of running sums between their ends.

    Attributes:
        finished: number of pipelined iterations whose gather legs are over.
        overlapped: number of finished iterations whose gather legs compute has hidden.
    """

    def __init__(self) -> None:
        self.finished = self.overlapped = 0
        self._started_s: float | None = None
        self._last: _Sample | None = None
        self._figures: deque[StepStats] = deque(maxlen=STEPS_KEPT)
        self._last_was_pipelined = False

    def note(
        self, sums: CommSums, sent_bytes: int, fallbacks: Counter[str], *, is_pipelined: bool, was_looked_at: bool
    ) -> None:
        """Record the end of a reduced backward.

        Args:
            sums: communication times up to now.
            sent_bytes: payload bytes sent up to now.
            fallbacks: fall-backs by reason up to now.
            is_pipelined: whether this iteration takes the pipeline, so that its gather legs end in the next one.
            was_looked_at: whether code needed the previous iteration's updates or gradients at once.
        """
        now_s = time.perf_counter()
        if self._started_s is None:
            self._started_s = now_s
        before, self._last = self._last, _Sample(now_s, sums, sent_bytes, fallbacks.copy())
        if before is not None:
            self._figures.append(_between(before, self._last))
            if self._last_was_pipelined:
                self.finished += 1
                hidden = self._figures[-1].hidden_share
                self.overlapped += not was_looked_at if hidden is None else hidden >= _MOSTLY
        self._last_was_pipelined = is_pipelined

    def elapsed_s(self) -> float:
        """Return the seconds since the first reduced backward ended; 0 before."""
        return 0.0 if self._started_s is None else time.perf_counter() - self._started_s

    def figures(self) -> tuple[StepStats, ...]:
        """Return the figures of each recorded iteration, oldest first."""
        return tuple(self._figures)


def _between(before: _Sample, after: _Sample) -> StepStats:
    times = NOT_MEASURED
    if after.sums.are_measured:
        times = CommSums(*(late - early for late, early in zip(after.sums, before.sums, strict=True)))
    return StepStats(
        after.at_s - before.at_s,
        *times,
        sent_bytes=after.sent_bytes - before.sent_bytes,
        fallbacks=dict(after.fallbacks - before.fallbacks),
    )


class FallbackLog:
    """Counts fall-backs by reason, and logs each reason once.

    Attributes:
        counts: for each reason, how often.
        advice: for some of the reasons, what would change it.

    Args:
        rank: this rank.
    """

    def __init__(self, rank: int) -> None:
        self.counts: Counter[str] = Counter()
        self.advice: dict[str, str] = {}
        self._rank = rank

    def note(self, reason: str, advice: str = "", *, is_said: bool = False) -> None:
        """Count one fall-back to a slower path; rank 0 logs the reason the first time.

        Args:
            reason: why, in words.
            advice: what would change it, as a sentence of its own.
            is_said: whether another line has said it already.
        """
        if not self.counts[reason]:
            if advice:
                self.advice[reason] = advice
            if self._rank == 0 and not is_said:
                say(f"{reason}. {advice}" if advice else reason, logging.WARNING)
        self.counts[reason] += 1

    def note_here(self, reason: str) -> None:
        """Count a fall-back that concerns this rank's device only; this rank logs the reason the first time."""
        if not self.counts[reason]:
            say(f"rank {self._rank}: {reason}", logging.WARNING)
        self.counts[reason] += 1


def about(ddp: DistributedDataParallel, rank: int) -> str:
    """Return model, size of its gradients (in the parameters' dtype), backend and rank in one line."""
    parameters = [parameter for _, parameter in managed_parameters(ddp)]
    gradients_mb = sum(parameter.nbytes for parameter in parameters) / MB
    backend = dist.get_backend(ddp.process_group)
    return (
        f"{type(ddp.module).__name__}, {len(parameters)} gradients, {short(gradients_mb)} MiB; "
        f"rank {rank} of {ddp.process_group.size()} over {backend}"
    )


def in_force(plan: FusionPlan | None) -> str:
    """Return how gradients travel under this plan, as a title."""
    return "plain all-reduces" if plan is None else f"schedule {plan.schedule}, groups of up to {plan.largest_group()}"


def summary(about_model: str, plan: FusionPlan | None, tuning: str, stats: DearStats, *, is_detached: bool) -> str:
    """Return what is in force, how far tuning has come, and the figures of the latest step that is like the next."""
    lines = [f"DearState of {about_model}"]
    if not is_detached:
        lines += (in_force(plan) if plan is None else repr(plan)).splitlines()
    lines.append(tuning)
    if stats.iterations == 0:
        return "\n  ".join(lines)
    if (last := stats.last_step) is not None and not is_detached:
        lines.append(f"last step {short(1e3 * last.duration_s)} ms, {_exposed(last.exposed_s)}")
    lines += str(stats).splitlines()
    return "\n  ".join(lines)


def _exposed(exposed_s: float) -> str:
    if math.isnan(exposed_s):
        return "exposed communication not measured"
    return f"{short(1e3 * exposed_s)} ms of it exposed"
