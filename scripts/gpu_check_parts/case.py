"""One case: a check, the ranks that it runs on, and how long it may take."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench_kit.ranks import Launch

# Needed by cuBLAS for deterministic results. Loopback: no host name has to resolve. A hung leg ends its process one
# second after its timeout, and not after a minute of waiting for other ranks' reports.
ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_DEBUG": "WARN",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1000",
}


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        group: what kind of check.
        name: which one.
        check: runs on every rank; returns its figures, or yields them as they grow.
        arguments: of the check, after the device.
        launch: how its ranks are started.
        alone: times or loads the device, so nothing else may run beside it.
        needs_cuda: cannot be rehearsed on a CPU.
        limit_s: time limit, where the usual one does not do.
    """

    group: str
    name: str
    check: Callable[..., Any]
    arguments: tuple[Any, ...]
    launch: Launch
    alone: bool = False
    needs_cuda: bool = False
    limit_s: float | None = None


def one_rank(device: str, **options: Any) -> Launch:
    """A single rank: over NCCL on a GPU, over gloo in a rehearsal."""
    return Launch("gloo" if device == "cpu" else "nccl", (device,), ENVIRONMENT, **options)


def two_ranks_over_gloo(device: str) -> Launch:
    """Two ranks on one device, over gloo."""
    return Launch("gloo", (device, device), ENVIRONMENT)
