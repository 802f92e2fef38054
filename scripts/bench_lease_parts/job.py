"""A rank of a job: `python -m bench_lease_parts.job DIRECTORY INDEX`, started by `host`.

Does what the conductor tells it. The job lives through all rounds, and trains two networks of the same kind in turn:
`plain`, and `leased`, which takes part in the lease.
"""

import statistics
import sys
import time
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import ddp_crossover as dx
from bench_kit.on_ranks import TIMEOUT
from bench_kit.paced import COLUMNS, layer_sizes, sleep_accurately
from bench_kit.training import LEARNING_RATE, WARM_UP_STEPS, Arm, Workload, all_reduces_s, paced_workload, set_pace
from bench_lease_parts.cases import CaseSettings, JobSettings
from bench_lease_parts.conductor import CONDUCTOR_SOCKET, Window
from bench_lease_parts.device import DevicePace
from ddp_crossover.addons.lease.client import GpuLease

CALIBRATION_NUMEL = 2_000_000
WARM_UP_LIMIT = 60
LEASE_START_S = 10.0


class Job:
    """One rank of one job. The conductor calls the public methods; those of training jobs are collective."""

    def __init__(self, directory: Path, index: int) -> None:
        case = CaseSettings.read(directory)
        self._directory, self._index = directory, index
        self._settings: JobSettings = case.jobs[index]
        self._pace = DevicePace(self._settings.compute_s / 3 / self._settings.layers)
        self._arms: dict[str, Arm] = {}
        self._lease = GpuLease(
            f"cpu:{dist.get_rank()}",
            job=f"{case.name}-{self._settings.name}",
            weight=self._settings.weight,
            role=self._settings.role,
        )

    def calibrate(self) -> float:
        """Bytes per second of all-reduces over the link."""
        flat = torch.zeros(CALIBRATION_NUMEL)
        return flat.nbytes / min(all_reduces_s(flat, warm_up=2, times=5))

    def prepare(self, parameters: int) -> dict[str, Any]:
        """Set the pace, build both arms and train until they run evenly.

        Returns what compute alone and the link alone take for a step, in seconds.
        """
        sizes = sizes_of_layers(self._settings, parameters)
        workload = paced_workload(sizes, 1, self._pace)
        if not self._lease.wait_until_connected(LEASE_START_S):
            raise RuntimeError(f"no lease within {LEASE_START_S} s: {self._lease.stats().unleased}")
        compute_only = self._make_arm(workload, None, communicates=False)
        for _ in range(WARM_UP_STEPS):
            compute_only.step()
        # On a GPU the part of compute that is not sleep would be kernels, too.
        compute_s = statistics.median(
            set_pace(self._pace, self._settings.layers, self._settings.compute_s, compute_only)
        )
        flat = torch.zeros(sum(sizes))
        link_s = min(all_reduces_s(flat, warm_up=2, times=5)) if self._settings.trains else 0.0
        for name, lease in (("plain", None), ("leased", self._lease)):
            self._arms[name] = self._make_arm(workload, lease)
            self._arms[name].warm_up(WARM_UP_LIMIT)
            self._rest(self._arms[name])
        return {"parameters": sum(sizes), "compute_s": compute_s, "link_s": link_s}

    def run(self, arm_name: str, window: Window) -> dict[str, Any]:
        """Train from the beginning of the window until after its end.

        Returns the times of the beginning and of the end of every step, and how many turns were taken with the lease
        and without it.
        """
        arm, before = self._arms[arm_name], self._turns()
        time.sleep(max(0.0, window.begin_s - time.monotonic()))
        ends_s = [time.monotonic()]
        while not self._is_last(window, steps=len(ends_s) - 1, now_s=ends_s[-1]):
            arm.step()
            ends_s.append(time.monotonic())
        self._rest(arm)
        return {"ends_s": ends_s, **{key: now - before[key] for key, now in self._turns().items()}}

    def close(self) -> None:
        for arm in self._arms.values():
            arm.close()
        self._lease.close()

    def _make_arm(self, workload: Workload, lease: GpuLease | None, communicates: bool = True) -> Arm:
        network = workload.build()
        if not self._settings.trains:
            optimizer = SGD(network.parameters(), lr=LEARNING_RATE)
            if lease is not None:
                lease.instrument(network, optimizer)
            return Arm(workload, network, optimizer)
        ddp = DistributedDataParallel(network, gradient_as_bucket_view=True)
        optimizer = SGD(ddp.parameters(), lr=LEARNING_RATE)
        if not communicates:
            ddp.register_comm_hook(None, noop_hook)
            return Arm(workload, ddp, optimizer)
        state = dx.attach(ddp, optimizer, schedule="dear", tune=False, lease=lease)
        return Arm(workload, ddp, optimizer, state)

    def _turns(self) -> dict[str, int]:
        stats = self._lease.stats()
        return {"grants": stats.grants, "unleased": sum(stats.unleased.values())}

    def _rest(self, arm: Arm) -> None:
        """Finish deferred work, and leave the device to others."""
        arm.drain()
        self._lease.release()

    def _is_last(self, window: Window, steps: int, now_s: float) -> bool:
        """Whether the job has run long enough: on all ranks of a training job after the same number of steps.

        Rank 0 names the last step two steps ahead. No rank gets that far without it: the first forward of a step waits
        for gradients of rank 0 of the step before.
        """
        if not self._settings.trains:
            return now_s >= window.end_s
        notice = self._directory / f"last-step-{self._index}-{window.number}"
        if dist.get_rank() == 0 and now_s >= window.end_s and not notice.exists():
            written = notice.with_suffix(".new")
            written.write_text(str(steps + 2))
            written.rename(notice)
        return notice.exists() and steps >= int(notice.read_text())


def sizes_of_layers(job: JobSettings, parameters: int) -> list[int]:
    """Elements of each layer's weight, first layer first, multiples of `paced.COLUMNS`; at least one row each."""
    parameters = max(parameters, job.layers * COLUMNS)
    if job.first_layer_share is None:
        return layer_sizes(parameters, job.layers, "uniform")
    first = round(parameters * job.first_layer_share / COLUMNS) * COLUMNS
    return [first, *layer_sizes(parameters - first, job.layers - 1, "uniform")]


def main(directory: Path, index: int) -> None:
    """Run one rank of one job."""
    torch.set_num_threads(1)
    sleep_accurately()
    dist.init_process_group("gloo", timeout=TIMEOUT)
    job = Job(directory, index)
    conductor: Connection = Client(str(directory / CONDUCTOR_SOCKET), family="AF_UNIX")
    conductor.send((index, dist.get_rank()))
    answering = True
    while answering:
        name, *arguments = conductor.recv()
        conductor.send(getattr(job, name)(*arguments))
        answering = name != "close"
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
