"""Two jobs on one GPU: each alone, both at once, and both at once with a lease, in rounds."""

import statistics
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

import ddp_crossover as dx
from bench_kit.device_time import now, synchronize, wait_for
from ddp_crossover.comm.agreement import all_gather_json
from gpu_bench_parts.arms import GpuArm
from gpu_bench_parts.emulation import emulated_wire
from gpu_bench_parts.settings import ArmSettings, CaseSettings
from gpu_bench_parts.wire import Wire
from gpu_bench_parts.workloads import make_workload

ROUNDS = 2
WINDOW_S = 2.5
# Beside another job a lease compares some 40 steps, with it and without it, before it is known whether it pays.
REHEARSAL_S = 7.0
# Long enough to be split, short enough that no tuner has to find it.
FUSION_MB = 8.0
WARM_UP_STEPS = 20  # the pipeline begins after about ten
LEASE_START_S = 10.0
NO_LEASE, LEASE = "both, no lease", "both, lease"


@dataclass(frozen=True)
class Sharing:
    """What shares the GPU.

    Attributes:
        case: model and wire of the training jobs.
        second: what the second job does; the first one trains.
        ranks_per_job: 1: training sends over the emulated wire. 2: it sends over gloo, through host memory.
    """

    case: CaseSettings
    second: Literal["training", "filler"]
    ranks_per_job: int = 1


def share(device: torch.device, sharing: Sharing) -> Iterator[dict[str, Any]]:
    """Each rank is one of the two jobs, or a part of it."""
    with ExitStack() as stack:
        job = _Job(device, sharing, stack)
        rates: dict[str, list[float]] = defaultdict(list)
        dist.barrier()
        job.steps_per_s(True, REHEARSAL_S)
        for _ in range(ROUNDS):
            for phase, active, has_lease in (
                ("alone", (0,), False),
                ("alone", (1,), False),
                (NO_LEASE, (0, 1), False),
                (LEASE, (0, 1), True),
            ):
                dist.barrier()
                if job.number in active:
                    rates[phase].append(job.steps_per_s(has_lease))
            yield _figures(job, rates)
        job.close()


def _figures(job: "_Job", rates: dict[str, list[float]]) -> dict[str, Any]:
    """This job's rates; on the first rank also what both have got together."""
    own: dict[str, Any] = {"job": job.number, "steps_per_s": dict(rates), "lease": job.lease_figures()}
    world = dist.group.WORLD
    assert world is not None
    everybody = all_gather_json(own, world, torch.device("cpu"))
    if dist.get_rank() != 0:
        return own
    jobs = {found["job"]: found for found in everybody}
    together, words = {}, []
    for phase in (NO_LEASE, LEASE):
        shares = [_share(jobs[number]["steps_per_s"], phase) for number in sorted(jobs)]
        together[phase] = {"of_alone": shares, "sum": sum(shares)}
        words.append(f"{phase}: {' + '.join(f'{one:.2f}' for one in shares)} = {sum(shares):.2f} of alone")
    use = own["lease"].get("use", {})
    if use.get("given_s"):
        words.append(f"{use['given_s']:.2f} s given in gaps, {use['filled_s'] / use['given_s']:.0%} of it taken")
    return own | {"together": together, "noticed": "; ".join(words)}


def _share(steps_per_s: dict[str, list[float]], phase: str) -> float:
    """Speed in a phase over speed alone, the median of the rounds (with two rounds, their mean)."""
    rounds = zip(steps_per_s[phase], steps_per_s["alone"], strict=True)
    return statistics.median(beside / alone for beside, alone in rounds)


class _Job:
    """This rank's part of its job: the same work twice, with a lease and without one."""

    def __init__(self, device: torch.device, sharing: Sharing, stack: ExitStack) -> None:
        self._device = device
        ranks, per_job = dist.get_world_size(), sharing.ranks_per_job
        self.number = dist.get_rank() // per_job
        is_filler = self.number == 1 and sharing.second == "filler"
        # All ranks make all groups.
        members = [range(first, first + per_job) for first in range(0, ranks, per_job)]
        control = [dist.new_group(list(group), backend="gloo") for group in members][self.number]
        assert isinstance(control, dist.ProcessGroup)
        self._control = control
        self.lease = lease = connected_lease(self.number, "filler" if is_filler else "peer")
        self.plain: GpuArm | Filler
        self.leased: GpuArm | Filler
        if is_filler:
            self.plain, self.leased = Filler(device, None), Filler(device, lease)
        else:
            self.plain, self.leased = self._training(sharing, stack, lease)
        for arm in (self.plain, self.leased):
            for _ in range(WARM_UP_STEPS):
                arm.step()
            arm.drain()
            lease.release()
        synchronize(device)

    def _training(self, sharing: Sharing, stack: ExitStack, lease: dx.GpuLease) -> list[GpuArm]:
        wire: Wire
        if sharing.ranks_per_job > 1:
            wire, group = Wire(sharing.ranks_per_job), self._control
        else:
            wire = stack.enter_context(emulated_wire(sharing.case.ranks, self._device))
            group = _group_of_one(self._device)
        workload = make_workload(sharing.case, self._device)
        arm = ArmSettings("dear", is_ours=True)
        return [
            GpuArm(arm, sharing.case, workload, wire, self._device, FUSION_MB, group, given) for given in (None, lease)
        ]

    def steps_per_s(self, has_lease: bool, seconds: float = WINDOW_S) -> float:
        """Work for a window; the host is two steps ahead of the device at most."""
        arm = self.leased if has_lease else self.plain
        steps, marks, start_s = 0, deque[Any](), time.monotonic()
        while not self._is_over(start_s, seconds):
            arm.step()
            steps += 1
            marks.append(now(self._device))
            if len(marks) > 2:
                wait_for(marks.popleft())
        arm.drain()
        self.lease.release()
        synchronize(self._device)
        return steps / (time.monotonic() - start_s)

    def _is_over(self, start_s: float, seconds: float) -> bool:
        """Whether the window is over, on all ranks of the job after the same number of steps."""
        over = torch.tensor(int(time.monotonic() - start_s >= seconds))
        if dist.get_world_size(self._control) > 1:
            dist.all_reduce(over, op=dist.ReduceOp.MAX, group=self._control)
        return bool(over.item())

    def lease_figures(self) -> dict[str, Any]:
        """What became of the lease so far."""
        found: dict[str, Any] = {"grants": self.lease.stats().grants, "unleased": dict(self.lease.stats().unleased)}
        if isinstance(self.leased, GpuArm) and self.leased.state is not None:
            use = self.leased.state.stats().lease
            found["use"] = {**asdict(use), "unleased": dict(use.unleased)} if use is not None else {}
        return found

    def close(self) -> None:
        for arm in (self.plain, self.leased):
            arm.close()
        self.lease.close()


def connected_lease(job: int, role: Any) -> dx.GpuLease:
    """A lease of a job by this number. Raises RuntimeError if there is no broker."""
    lease = dx.GpuLease(job=f"job-{job}", role=role)
    if not lease.wait_until_connected(LEASE_START_S):
        raise RuntimeError(f"no lease within {LEASE_START_S} s: {lease.stats().unleased}")
    return lease


def _group_of_one(device: torch.device) -> dist.ProcessGroup:
    """A group of this rank alone, over what trains there."""
    backend = "gloo" if device.type == "cpu" else "nccl"
    group = dist.new_group([dist.get_rank()], backend=backend, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group


class Filler:
    """A job that only computes: forward passes of some large matrices.

    Args:
        device: the device.
        lease: takes its turns; None to compute at any time.
    """

    def __init__(self, device: torch.device, lease: dx.GpuLease | None) -> None:
        is_cuda = device.type == "cuda"
        width, dtype = (4096, torch.bfloat16) if is_cuda else (128, torch.float32)
        self._network = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(8))).to(device, dtype)
        self._batch = torch.randn(width, width, device=device, dtype=dtype)
        self._hooks = lease.instrument(self._network) if lease is not None else None

    def step(self) -> None:
        """One forward, on an H100 some 2 ms."""
        with torch.no_grad():
            self._network(self._batch)

    def drain(self) -> None:
        """Nothing is deferred."""

    def close(self) -> None:
        if self._hooks is not None:
            self._hooks.remove()
