"""The package in a soak: attached, detached and attached anew with the next options, and what all that added up to."""

from collections import Counter
from typing import Any

import torch.distributed as dist

import ddp_crossover as dx
from soak_parts.settings import SoakSettings
from soak_parts.training import Training

JOB = "soak"
LEASE_START_S = 10.0
# By default the tuner runs, and on a loopback it may end with plain all-reduces. The other two keep the pipeline at
# work. Three, so that the first and the last quarter of a run see the same ones: see `SoakSettings.attach_every`.
OPTIONS: tuple[dict[str, Any], ...] = ({}, {"fusion_mb": 0.03}, {"schedule": "dear"})


class Attached:
    """The package on one training, with a lease that another job wants as well. Its methods are collective."""

    def __init__(self, training: Training, settings: SoakSettings) -> None:
        self._training = training
        self._lease = dx.GpuLease(
            f"cpu:{dist.get_rank()}", job=JOB, directory=settings.directory, spawn_broker=False
        )  # fmt: skip
        if not self._lease.wait_until_connected(LEASE_START_S):
            raise RuntimeError(f"no lease within {LEASE_START_S} s: {self._lease.stats().unleased}")
        self._times = 0
        self._plans: Counter[str] = Counter()
        self._sums: Counter[str] = Counter()
        self._attach()

    def attach_anew(self) -> None:
        self._detach()
        self._attach()

    def close(self) -> dict[str, Any]:
        """Leave; returns figures of all times that the package was attached."""
        self._detach()
        lease = self._lease.stats()
        self._lease.close()
        return {
            "attached": self._times,
            **self._sums,
            "grants": lease.grants,
            "unleased": dict(lease.unleased),
            "lost_holds": lease.lost,
            "plans": dict(self._plans),
        }

    def _attach(self) -> None:
        options = OPTIONS[self._times % len(OPTIONS)]
        self._times += 1
        self._state = dx.attach(self._training.ddp, self._training.optimizer, lease=self._lease, **options)

    def _detach(self) -> None:
        self._state.synchronize()
        stats = self._state.stats()
        self._sums.update(steps=stats.iterations, pipelined_steps=stats.pipelined_iterations)
        self._plans[self._state.plan.headline() if self._state.plan else self._state.tuning_progress()] += 1
        self._state.detach()
