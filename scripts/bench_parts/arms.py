"""Arms: the ways of training that are compared. Each has its own network, wrapper and optimizer."""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

import ddp_crossover as dx
from bench_kit.training import LEARNING_RATE, Arm, ArmRefused, Workload
from bench_parts import relaxed
from bench_parts.stragglers import BalancedArm, SlowedArm, Straggler

DEFAULT_BUCKET_MB = 25.0
POWER_SGD_RANK = 4
POWER_SGD_START = 2

OPTIMIZERS: dict[str, type[SGD] | type[AdamW]] = {"sgd": SGD, "adamw": AdamW}
STATE_COPIES = {"sgd": 0, "adamw": 2}
"""Optimizer state of each parameter, in times of its size."""


class Kind(NamedTuple):
    """A kind of arm: what it is, and the options of `attach` if it is ours.

    By default those are left out that need another network, or another optimizer, to be worth a look.
    """

    meaning: str
    options: dict[str, Any] | None = None
    by_default: bool = True


TOP_K = dx.TopK(0.01)
KINDS = {
    "noop": Kind("DDP without communication (torch's noop_hook): compute alone"),
    "ddp": Kind("plain DDP, once for each size in --buckets"),
    "ddp-bf16": Kind("DDP with torch's bf16_compress_hook"),
    "ddp-powersgd": Kind(f"DDP with torch's PowerSGD hook, rank {POWER_SGD_RANK}"),
    "zero": Kind("DDP with ZeroRedundancyOptimizer, parameters_as_bucket_view=True"),
    "fsdp2": Kind("fully_shard(reshard_after_forward=False), block by block"),
    "dear": Kind('ddp_crossover, schedule="dear"', {"schedule": "dear"}),
    "auto": Kind('ddp_crossover, schedule="auto"', {"schedule": "auto"}),
    "auto-bf16": Kind('ddp_crossover, schedule="auto", bf16 on the wire', {"wire_dtype": torch.bfloat16}),
    "auto-int8": Kind("ddp_crossover, 8-bit codes on the wire", {"wire_dtype": torch.int8}),
    **{
        f"auto-{number}c": Kind(f"ddp_crossover, {number} connections to each peer", {"connections": number}, False)
        for number in (2, 4, 8)
    },
    "top-k": Kind("ddp_crossover, 1% of the elements in scatter legs", {"compress": TOP_K}, False),
    "top-k-int8": Kind(
        "the same, with 8-bit codes in gather legs", {"compress": TOP_K, "wire_dtype": torch.int8}, False
    ),
    "auto-node": Kind('ddp_crossover, groups="node"; for --ranks-per-host 2', {"groups": "node"}, False),
    "int8-node": Kind("the same, with 8-bit codes across hosts", {"groups": "node", "wire_dtype": torch.int8}, False),
    "top-k-node": Kind(
        "the same, with 1% of the elements across hosts (HiTopKComm)", {"groups": "node", "compress": TOP_K}, False
    ),
    "allreduce": Kind('ddp_crossover, schedule="allreduce"', {"schedule": "allreduce"}),
    "shard": Kind('ddp_crossover, schedule="auto", shard_optimizer=True', {"shard_optimizer": True}, False),
    "balance": Kind(
        "ddp_crossover, ranks get as many samples as they are fast; for --stragglers", {"weighted": True}, False
    ),
    **{kind: Kind(meaning, None, False) for kind, meaning in relaxed.MEANING.items()},
}


class ArmName(NamedTuple):
    """An arm as on the command line: `ddp@4` is plain DDP with `bucket_cap_mb=4`."""

    kind: str
    bucket_mb: float

    @classmethod
    def parse(cls, text: str) -> "ArmName":
        """Raises ValueError for what is not an arm."""
        kind, _, bucket_mb = text.partition("@")
        if kind not in KINDS:
            raise ValueError(f"no arm is called {kind!r}: choose from {', '.join(KINDS)}")
        with contextlib.suppress(ValueError):
            if (size := float(bucket_mb or DEFAULT_BUCKET_MB)) > 0:
                return cls(kind, size)
        raise ValueError(f"{text}: after @ comes DDP's bucket_cap_mb, a positive number of MiB")

    def __str__(self) -> str:
        always = self.kind == "ddp"
        return f"{self.kind}@{self.bucket_mb:g}" if always or self.bucket_mb != DEFAULT_BUCKET_MB else self.kind


def make_arm(
    name: ArmName,
    workload: Workload,
    fusion_mb: float | None,
    optimizer_name: str,
    straggler: Straggler | None = None,
) -> Arm:
    """Build an arm, whose optimizer is one of `OPTIMIZERS`. Collective.

    Raises:
        ArmRefused: if torch or this version of ours cannot do it here.
    """
    torch.manual_seed(0)  # all arms begin with the same weights
    network, optimizer_class = workload.build(), OPTIMIZERS[optimizer_name]
    if name.kind == "fsdp2":
        _shard_fully(network, workload.units(network))
        return Arm(workload, network, optimizer_class(network.parameters(), lr=LEARNING_RATE))
    ddp = DistributedDataParallel(network, bucket_cap_mb=name.bucket_mb, gradient_as_bucket_view=True)
    if name.kind == "zero":
        # Its own type check reads a list only.
        parameters = list(ddp.parameters())
        # Its other way to fewer and earlier messages, overlap_with_ddp, refuses gloo.
        zero = ZeroRedundancyOptimizer(parameters, optimizer_class, parameters_as_bucket_view=True, lr=LEARNING_RATE)
        return Arm(workload, ddp, zero)
    optimizer = optimizer_class(ddp.parameters(), lr=LEARNING_RATE)
    if relaxed.period(name.kind) is not None:
        return relaxed.make_relaxed_arm(name.kind, workload, ddp, optimizer)
    options = KINDS[name.kind].options
    state = None if options is None else _attached(ddp, optimizer, options, fusion_mb)
    if name.kind in _PEER_HOOKS:
        try:
            _PEER_HOOKS[name.kind](ddp)
        except TypeError as error:
            raise ArmRefused(f"refused by {dist.get_backend()}: {error}") from error
    if straggler is not None and name.kind != "noop":  # which measures the compute of ranks that are all fast
        if name.kind == "balance":
            assert state is not None
            return BalancedArm(workload, ddp, optimizer, state, straggler)
        return SlowedArm(workload, ddp, optimizer, state, straggler)
    if name.kind == "balance":
        raise ArmRefused("needs --stragglers")
    return Arm(workload, ddp, optimizer, state)


_PEER_HOOKS: dict[str, Callable[[DistributedDataParallel], None]] = {
    "noop": lambda ddp: ddp.register_comm_hook(None, noop_hook),
    "ddp-bf16": lambda ddp: ddp.register_comm_hook(None, default_hooks.bf16_compress_hook),
    "ddp-powersgd": lambda ddp: ddp.register_comm_hook([], power_sgd_hook),
}


def power_sgd_hook(
    states: list[powerSGD_hook.PowerSGDState], bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Torch's PowerSGD hook with a process group for each bucket.

    The hook starts its second and third all-reduce from callbacks, so those of two buckets come in an order that
    differs between ranks. On one gloo group they would be taken for each other, and hang.
    """
    if bucket.index() == len(states):
        states.append(
            powerSGD_hook.PowerSGDState(
                dist.new_group(), matrix_approximation_rank=POWER_SGD_RANK, start_powerSGD_iter=POWER_SGD_START
            )
        )
    state = states[bucket.index()]
    if not bucket.is_last():  # torch counts iterations by the last bucket, which this state never sees
        state.iter += 1
    return powerSGD_hook.powerSGD_hook(state, bucket)


def _attached(
    ddp: DistributedDataParallel, optimizer: Optimizer, options: dict[str, Any], fusion_mb: float | None
) -> dx.DearState:
    try:
        return dx.attach(ddp, optimizer, fusion_mb=fusion_mb, **options)
    except TypeError as error:
        raise ArmRefused(f"refused by this version of ddp_crossover: {error}") from error


def _shard_fully(network: nn.Module, units: list[nn.Module]) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for unit in [*units, network]:
        fully_shard(unit, mesh=mesh, reshard_after_forward=False)
