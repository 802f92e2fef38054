"""The part `tuner`: nothing is set, so that the package measures the link and chooses by itself; and the plain path."""

from collections.abc import Iterator
from typing import Any

import torch

from bench_kit.ranks import Launch
from gpu_bench_parts.arms import GpuArm
from gpu_bench_parts.emulation import emulated_wire
from gpu_bench_parts.settings import AUTO, ArmSettings, CaseSettings
from gpu_bench_parts.workloads import SMALL, make_workload
from gpu_check_parts import checks, two_ranks
from gpu_check_parts.case import Case, one_rank, two_ranks_over_gloo
from gpu_check_parts.exact import ADAMW, SGD
from gpu_check_parts.runner import Runner
from gpu_check_parts.training import Recipe

GROUP = "tuner"
# At most 104 steps are tuned, see `DearState`, and some come before.
SETTLED_AFTER = 200
STEPS_AFTER = 8
LIMIT_S = 90.0


def run(runner: Runner) -> None:
    """One rank over a wire at two speeds, then two ranks over what there is."""
    device = runner.device
    is_rehearsal = device == "cpu"
    for gbit_per_s in (2.0,) if is_rehearsal else (25.0, 10.0):
        settings = CaseSettings(SMALL if is_rehearsal else "resnet50", gbit_per_s, precision="fp32")
        name = f"over an emulated wire: {settings.name}"
        case = Case(GROUP, name, tunes, (settings,), one_rank(device), alone=True, limit_s=LIMIT_S)
        runner.run_all([case])
    runner.run_all(_two_rank_cases(two_ranks_over_gloo(device), "gloo"))
    two_ranks.run_over_nccl(runner, lambda launch: _two_rank_cases(launch, "NCCL"))


def _two_rank_cases(launch: Launch, backend: str) -> Iterator[Case]:
    check = checks.equivalence_while_tuning
    recipes = {
        "nothing set, AdamW": Recipe("AdamW", ADAMW, fusion_mb=None, steps=90),  # enough for all trials
        "plain all-reduces, SGD": Recipe(options=SGD, fusion_mb=None, schedule="allreduce"),
    }
    for name, recipe in recipes.items():
        yield Case(GROUP, f"two ranks over {backend}: {name}", check, (recipe,), launch, alone=True, limit_s=LIMIT_S)


def tunes(device: torch.device, settings: CaseSettings) -> dict[str, Any]:
    """The tuner must come to an end; says what it found, and what the probe measured of a wire that is known."""
    with emulated_wire(settings.ranks, device) as wire:
        workload = make_workload(settings, device)
        arm = GpuArm(ArmSettings(AUTO, is_ours=True), settings, workload, wire, device, None)
        assert arm.state is not None
        probed = arm.state._planning.link_model
        steps = arm.warm_up(SETTLED_AFTER)
        turn_s = arm.turn_s(STEPS_AFTER)
        result = arm.state._planning.result
        figures = {
            "steps": steps,
            "step_s": turn_s,
            "tuning": arm.state.tuning_progress(),
            "trials": [
                {"candidate": str(trial.candidate), "steps_s": trial.steps_s}
                for trial in (result.trials if result else ())
            ],
            "left_alone": arm.state.detached,
            **arm.facts(),
        }
        arm.close()
    assert probed is not None, "the link was not probed"
    real_s_per_byte = 8e-9 / settings.gbit_per_s
    figures["probed"] = probed.to_json()
    figures["wire"] = {"s_per_byte": real_s_per_byte, "latency_s": settings.latency_s}
    figures["noticed"] = (
        f"settled after {steps} steps: {figures['tuning']}; the probe took the wire for one of "
        f"{8e-9 / probed.s_per_byte if probed.s_per_byte else float('inf'):.1f} Gb/s, "
        f"{probed.per_leg_s * 1e6:.0f} us a leg and {probed.latency_s * 1e6:.0f} us late"
    )
    return figures
