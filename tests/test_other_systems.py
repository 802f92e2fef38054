"""On macOS, and on builds of torch for ROCm and XPU: imports work, training on CPU is exact, the lease says no.

Such a system is this one with the names removed that it lacks, in an interpreter of its own.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import ddp_crossover as dx

_AS_ON_MACOS = """
import fcntl, os, select, signal, socket
LACKING = {
    fcntl: ("F_ADD_SEALS", "F_SEAL_GROW", "F_SEAL_SEAL", "F_SEAL_SHRINK"),
    os: ("MFD_ALLOW_SEALING", "MFD_CLOEXEC", "memfd_create", "pidfd_open", "sched_getaffinity", "sched_setaffinity"),
    select: ("EPOLLIN", "epoll"),
    signal: ("SIGRTMAX", "SIGRTMIN"),
    socket: ("MSG_NOSIGNAL", "SO_PEERCRED", "SOCK_CLOEXEC", "SOCK_SEQPACKET"),
}
for module, names in LACKING.items():
    for name in names:
        delattr(module, name)
listdir = os.listdir
def without_proc(path="."):
    if str(path).startswith("/proc"):
        raise FileNotFoundError(2, "No such file or directory", path)
    return listdir(path)
os.listdir = without_proc
"""

# Builds for other devices have torch.cuda, which can do nothing; this one has not even its classes.
_WITHOUT_CUDA = """
import torch
torch.distributed  # imports of torch's own that need the classes
import torch.distributed.fsdp, torch._dynamo
del torch.cuda.Event, torch.cuda.Stream
"""

_IMPORT_EVERYTHING = """
import importlib, pkgutil, ddp_crossover
for module in pkgutil.walk_packages(ddp_crossover.__path__, "ddp_crossover."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
for name in ddp_crossover.__all__:
    getattr(ddp_crossover, name)
print("imported")
"""

_TRAIN = """
import torch, torch.distributed as dist
from torch import nn
import ddp_crossover as dx
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
def train(attached):
    torch.manual_seed(0)
    ddp = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2)))
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.1)
    state = dx.attach(ddp, optimizer, fusion_mb=1.0) if attached else None
    for _ in range(8):
        optimizer.zero_grad()
        ddp(torch.randn(4, 6)).square().sum().backward()
        optimizer.step()
    assert state is None or state.stats().pipelined_iterations
    return [p.detach().clone() for p in ddp.parameters()]
assert all(torch.equal(*pair) for pair in zip(train(False), train(True), strict=True))
print("exact")
"""

_LEASE = """
import ddp_crossover as dx
dx.GpuLease(job="a")
"""


def _run(*programs: str) -> str:
    job = subprocess.run(
        [sys.executable, "-c", "".join(programs)],
        cwd=Path(dx.__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=240,
    )
    return job.stdout + job.stderr


@pytest.mark.nightly
def test_every_module_imports_on_macos() -> None:
    assert _run(_AS_ON_MACOS, _IMPORT_EVERYTHING).endswith("imported\n")


def test_every_module_imports_on_a_build_without_cuda() -> None:
    assert _run(_WITHOUT_CUDA, _IMPORT_EVERYTHING).endswith("imported\n")


def test_training_on_macos_is_exact() -> None:
    assert _run(_AS_ON_MACOS, _TRAIN).endswith("exact\n")


def test_a_lease_on_macos_is_an_error_that_names_the_way_out() -> None:
    error = _run(_AS_ON_MACOS, _LEASE)
    assert "OSError: the GPU lease runs on Linux only" in error and "leave out lease=" in error


@pytest.mark.parametrize("verb", ["serve", "status", "top"])
def test_commands_of_the_lease_say_so_in_one_line(verb) -> None:
    command = f"import sys; from ddp_crossover.cli import main; sys.exit(main(['lease', '{verb}']))"
    assert _run(_AS_ON_MACOS, command).startswith(f"lease {verb}: the GPU lease runs on Linux only")
