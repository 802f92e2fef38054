"""The part `rest`: traces, CUDA graphs, DDP built on another stream, no `set_device`, `torch.compile`, alignment."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from bench_kit.ranks import Launch
from gpu_check_parts import alignment, checks, graphs, odd_setups, two_ranks
from gpu_check_parts.case import ENVIRONMENT, Case, one_rank
from gpu_check_parts.exact import ADAMW, SGD, WIDE
from gpu_check_parts.runner import Runner
from gpu_check_parts.training import Recipe

GROUP = "rest"
COMPILE_LIMIT_S = 120.0  # inductor starts compiler processes of its own


def run(runner: Runner) -> None:
    """One case each, alignment last."""
    device = runner.device
    runner.run_all(_setups(device))
    _run_on_two_gpus(runner)
    runner.run_all(
        [Case(GROUP, "alignment: copies and updates", alignment.copies_and_updates, (), one_rank(device), alone=True)]
    )
    two_ranks.run_over_nccl(
        runner, lambda launch: [Case(GROUP, "alignment: legs over NCCL", alignment.legs, (), launch, alone=True)]
    )


def _setups(device: str) -> Iterator[Case]:
    launch = one_rank(device)
    adamw = Recipe("AdamW", ADAMW)
    wide = checks.on(Recipe("AdamW", {"lr": 0.001}, **WIDE), device)  # type: ignore[arg-type]
    yield Case(GROUP, "trace", odd_setups.trace, (wide,), launch, alone=True)
    built = odd_setups.built_on_another_stream
    yield Case(GROUP, "DDP built on another stream", built, (wide,), launch, alone=True, needs_cuda=True)
    for late in (False, True):
        name = f"a CUDA graph, captured {'after' if late else 'before'} the first plan"
        yield Case(GROUP, name, graphs.graph_captured, (Recipe(options=SGD), late), launch, alone=True, needs_cuda=True)
    # What inductor generates makes no difference to hooks, and a CPU may lack the compiler that it needs.
    compiled = replace(adamw, compiled="aot_eager" if device == "cpu" else "inductor")
    yield Case(GROUP, "torch.compile", checks.equivalence, (compiled,), launch, alone=True, limit_s=COMPILE_LIMIT_S)


def _run_on_two_gpus(runner: Runner) -> None:
    """On a GPU that is not the current one, and between two."""
    other = Launch("nccl", ("cuda:1",), ENVIRONMENT, bind_device=True, set_device=False)
    sgd = Recipe(options=SGD)
    no_set_device = Case(GROUP, "no set_device", checks.equivalence, (sgd,), other, alone=True, needs_cuda=True)
    both = Launch("nccl", ("cuda:0", "cuda:1"), ENVIRONMENT)
    adamw = Recipe("AdamW", ADAMW, schedule="dear", copy_engines=True)
    check = odd_setups.gathers_on_copy_engines
    copies = Case(GROUP, "gather legs on copy engines", check, (adamw,), both, alone=True, needs_cuda=True)
    for case, why in ((no_set_device, ": with one, it is the current device anyway"), (copies, "")):
        if runner.device != "cpu" and torch.cuda.device_count() < 2:
            runner.skip_all([case], f"needs two GPUs{why}")
        else:
            runner.run_all([case])
