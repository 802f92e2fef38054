"""The words, the table and the record of the demo."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rich import box
from rich.console import Console

from bench_kit.rounds import speedup, spread
from bench_kit.tables import print_table
from demo_parts.arms import DemoArm
from demo_parts.measure import Comparison, Traced

# Differences below this are called none.
NO_DIFFERENCE = 0.02
# Compute that changes by more than this factor shows that other work disturbs the measurements.
CHANGED = 1.3
CAPTION = (
    "MB: DDP's bucket_cap_mb. Medians and quartiles of rounds in which all take turns. Speedup: over the best DDP. "
    "Exposed: part of a step in which gradients travel and nothing is computed, in the steps of the picture."
)
FOR_YOUR_MODEL = (
    "For your own model: it gains most where communication takes about as long as compute, as here, "
    "and nothing where it is hidden already. The doctor tells: torchrun ... -m ddp_crossover doctor train.py"
)


class Arms(NamedTuple):
    """All arms. `best` may be the same as `default`."""

    default: DemoArm
    best: DemoArm
    dear: DemoArm
    alone: DemoArm

    @property
    def trained(self) -> list[DemoArm]:
        """Those whose models are compared, as in the table from top to bottom."""
        return [self.default, self.dear] if self.best is self.default else [self.default, self.best, self.dear]

    @property
    def all(self) -> list[DemoArm]:
        """The same, and compute alone."""
        return [*self.trained, self.alone]


def tell(console: Console, line: str) -> None:
    """Print a sentence, wrapped between words on a terminal, and in one line elsewhere."""
    console.print(line, highlight=False, soft_wrap=not console.is_terminal)


def whole_range(values: Sequence[float]) -> dict[str, float]:
    """Median, lowest and highest: what a few rounds can tell."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def rows(
    arms: Arms, times_s: list[list[float]], interval: Callable[[Sequence[float]], dict[str, float]]
) -> list[dict[str, Any]]:
    """The times of each of `arms.all`, from its seconds per step in each round. Compute alone has no speedup.

    DDP at its best is what was the fastest in these rounds, also if it was another one in the first rounds.
    """
    best_s = min(times_s[:-2], key=statistics.median)
    figures: list[dict[str, Any]] = []
    for arm, seconds in zip(arms.all, times_s, strict=True):
        label = f"{arm.label} (best)" if seconds is best_s else arm.label
        figures.append({"label": label, "step_s": interval(seconds), "rounds_s": seconds})
        if arm is not arms.alone:
            ratios = [best / own for best, own in zip(best_s, seconds, strict=True)]
            figures[-1]["speedup"] = interval(ratios)
    return figures


def so_far(figures: list[dict[str, Any]]) -> str:
    """What the first rounds say of DeAR."""
    speedup_now = figures[-2]["speedup"]
    return (
        f"DeAR is {speedup_now['median']:.2f} times as fast as DDP at its best "
        f"({speedup_now['low']:.2f} to {speedup_now['high']:.2f})"
    )


def make_record(
    arms: Arms, times_s: list[list[float]], traced: list[Traced], losses: list[float], comparison: Comparison
) -> dict[str, Any]:
    """Every figure, in types that JSON has.

    Args:
        arms: the arms.
        times_s: seconds per step of `arms.all` in each round.
        traced, losses: the same for `arms.trained`.
        comparison: of their models.
    """
    state = arms.dear.arm.state
    assert state is not None
    default_s, dear_s = (times_s[arms.all.index(arm)] for arm in (arms.default, arms.dear))
    figures = rows(arms, times_s, spread)
    for row, steps, loss in zip(figures, traced, losses, strict=False):
        row |= {
            "exposed_s": steps.exposed_s,
            "sent_bytes_per_step": steps.sent_bytes,
            "limits_bytes_per_s": steps.limits_bytes_per_s,
            "loss": loss,
        }
    return {
        "arms": figures,
        "comparison": comparison._asdict(),
        "overlapped_steps": traced[-1].overlapped,
        "of_steps": traced[-1].finished,
        "plan": str(state.plan) if state.plan else None,
        "tuning": state.tuning_progress(),
        "fallbacks": dict(state.stats().fallbacks),
        "over_best": figures[-2]["speedup"],
        "over_default": speedup(default_s, dear_s),
    }


def verdict(over_best: dict[str, float], over_default: dict[str, float]) -> str:
    """One sentence: whether it pays here."""
    median, low, high = (over_best[key] for key in ("median", "low", "high"))
    if low > 1 and median > 1 + NO_DIFFERENCE:
        return (
            f"DeAR is {median:.2f} times as fast as DDP with its best bucket size (quartiles {low:.2f} to {high:.2f}), "
            f"and {over_default['median']:.2f} times as fast as DDP as it comes."
        )
    if high < 1 and median < 1 - NO_DIFFERENCE:
        return (
            f"DeAR does not pay here: a step takes {1 / median - 1:.0%} longer than with DDP at its best bucket size "
            f"(speedup {median:.2f}, quartiles {low:.2f} to {high:.2f})."
        )
    return (
        f"DeAR makes no clear difference to DDP with its best bucket size here: {median:.2f} times as fast (quartiles "
        f"{low:.2f} to {high:.2f}); over DDP as it comes {over_default['median']:.2f}."
    )


def why_figures_mean_little(compute_at_start_s: float, compute_in_rounds_s: float) -> str | None:
    """A warning if compute took another time in the rounds than when the link's speed was chosen; else None."""
    if 1 / CHANGED < compute_in_rounds_s / compute_at_start_s < CHANGED:
        return None
    return (
        f"Compute alone took {compute_at_start_s * 1e3:.0f} ms a step when the link was chosen, and "
        f"{compute_in_rounds_s * 1e3:.0f} ms in the rounds: this machine is busy with other work, so these times mean "
        "little. Run the demo again when it is quiet."
    )


def show(console: Console, result: dict[str, Any]) -> None:
    """Print everything, for somebody who has never seen it."""
    headings = ("", "ms/step", "quartiles", "speedup", "exposed", "loss")
    frame: dict[str, Any] = {"box": box.SIMPLE_HEAD, "padding": (0, 1, 0, 0), "pad_edge": False, "show_edge": False}
    console.print()
    print_table(console, headings, map(_cells, result["arms"]), caption=CAPTION, caption_justify="left", **frame)
    console.print()
    for line in _lines(result):
        tell(console, line)


def _cells(arm: dict[str, Any]) -> list[str]:
    step_s = arm["step_s"]
    times = [
        arm["label"],
        f"{step_s['median'] * 1e3:.0f}",
        f"{step_s['low'] * 1e3:.0f}..{step_s['high'] * 1e3:.0f}",
    ]
    if "speedup" not in arm:
        return times
    return [
        *times,
        f"{arm['speedup']['median']:.2f}",
        f"{arm['exposed_s'] * 1e3:.0f} ms",
        f"{arm['loss']:.5f}",
    ]


def _lines(result: dict[str, Any]) -> list[str]:
    same = result["comparison"]
    if same["first_difference"]:
        identical = f"[red]Different[/] after {same['steps']} steps, first in {same['first_difference']}."
    else:
        identical = (
            f"[green]Bit-identical[/] after {same['steps']} steps: every loss and all {same['tensors']} tensors of the "
            "model, with DDP and with DeAR, on both ranks."
        )
    lines = [identical, overlap_sentence(result), verdict(result["over_best"], result["over_default"]), FOR_YOUR_MODEL]
    if busy := why_figures_mean_little(result["link"]["compute_s"], result["arms"][-1]["step_s"]["median"]):
        lines.append(f"[yellow]{busy}[/]")
    return lines


def link_sentence(link: dict[str, Any]) -> str:
    """What lies between the two processes."""
    if link["asked_bytes_per_s"] is None:
        return (
            f"[yellow]No slow link[/]: {link['why_not']}. The processes talk over loopback, so expect no difference in "
            "speed."
        )
    asked, measured = link["asked_bytes_per_s"], link["measured_bytes_per_s"]
    return (
        f"An emulated link of {_bits(asked)} lies between two processes of this machine (the kernel paces their "
        f"connections): {asked / 1e6:.3g} MB/s asked, {measured / 1e6:.3g} measured."
    )


def _bits(bytes_per_s: float) -> str:
    megabits = 8e-6 * bytes_per_s
    return f"{megabits / 1e3:.2g} Gb/s" if megabits >= 1e3 else f"{megabits:.0f} Mb/s"


def overlap_sentence(result: dict[str, Any]) -> str:
    """How the steps of DeAR went, and that both arms send alike."""
    trained = [arm for arm in result["arms"] if "speedup" in arm]
    ddp_mb, dear_mb = (max(arm["sent_bytes_per_step"], default=0) / 1e6 for arm in (trained[-2], trained[-1]))
    sent = (
        f"Both send their gradients over a single connection of the same speed: {ddp_mb:.1f} MB a step with DDP, "
        f"{dear_mb:.1f} with DeAR."
    )
    if result["plan"] is None:
        return f"DeAR's tuner kept plain all-reduce, because nothing was faster. {sent}"
    return (
        f"In {result['overlapped_steps']} of {result['of_steps']} steps, compute hid at least half of the time of "
        f"DeAR's all-gathers. {sent}"
    )
