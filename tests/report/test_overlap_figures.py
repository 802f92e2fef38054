"""How many steps overlapped, and who was in the way."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import pytest
import torch

from ddp_crossover.report.clock import CommClock, CommSums
from ddp_crossover.report.stats import StepLog
from equivalence import Case, Run, train_step
from heard import heard
from models import DeepNet


def _log(exposed_s: list[float], looked_at: list[bool], gather_s: float) -> StepLog:
    """Pipelined iterations, of whose gather legs compute has waited for so many seconds."""
    log = StepLog()
    waited_s = 0.0
    for index, (step_s, looked) in enumerate(zip(exposed_s, looked_at, strict=True)):
        waited_s += step_s
        sums = CommSums(0.0, waited_s, index * gather_s, waited_s)
        log.note(sums, 0, Counter(), is_pipelined=True, was_looked_at=looked)
    return log


def test_a_step_overlaps_when_compute_hides_half_of_its_gather_legs() -> None:
    log = _log([0.0, 0.1, 0.49, 0.51, 1.0], [False] * 5, gather_s=1.0)
    assert (log.overlapped, log.finished) == (2, 4)
    hidden = [step.hidden_share for step in log.figures()]
    assert hidden == pytest.approx([0.9, 0.51, 0.49, 0.0])


def test_where_gather_legs_are_not_measured_a_look_tells() -> None:
    log = _log([0.0] * 4, [False, True, False, True], gather_s=0.0)
    assert (log.overlapped, log.finished) == (1, 3)
    assert all(math.isnan(step.exposed_s) and step.hidden_share is None for step in log.figures())


def test_gather_legs_that_overlap_each_other_count_once() -> None:
    clock = CommClock()
    first, second, other = (clock.leg_started(kind, 0) for kind in ("gather", "gather", "scatter"))
    for leg in (first, second, other):
        clock.leg_posted(leg)
    clock.leg_ended(first)
    clock.leg_ended(second)
    gathered = clock.sums()
    clock.leg_ended(other)
    after = clock.sums()
    assert 0 < gathered.gather_s <= gathered.communication_s
    assert after.gather_s == gathered.gather_s and after.communication_s > gathered.communication_s


def _average(run: Run) -> None:
    for p in run.model.parameters():
        p.detach().mul(0.9)


def _clip(run: Run) -> None:
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)


def _evaluate(run: Run) -> None:
    with torch.no_grad():
        run.model(run.batch(0)[0])


def _save(run: Run) -> None:
    run.optimizer.state_dict()


def _do_nothing(run: Run) -> None:
    pass


LOOKS: dict[str, tuple[Callable[[Run], None], Callable[[Run], None], str]] = {
    "parameters": (_do_nothing, _average, "parameters"),
    "gradients": (_clip, _do_nothing, "gradients"),
    "evaluation": (_do_nothing, _evaluate, "parameters"),
    "optimizer": (_do_nothing, _save, "parameters"),
    "nobody": (_do_nothing, _do_nothing, ""),
}


def _line_of(look: Callable[[Run], None]) -> int:
    return look.__code__.co_firstlineno


def _train(name: str) -> tuple[dict[str, int], str, list[str]]:
    before_step, after_step, _ = LOOKS[name]
    with heard() as records:
        run = Run(Case(model=DeepNet, strict=False), with_dear=True)
        for x, y in run.batches():
            run.optimizer.zero_grad()
            run.loss(run.model(x), y).backward()
            before_step(run)
            run.optimizer.step()
            after_step(run)
        run.detach()
    stats = run.state.stats()
    return dict(stats.looks), str(stats), records


@pytest.mark.parametrize("name", LOOKS)
def test_the_line_that_needs_updates_early_is_named_once_a_step(on_ranks, name) -> None:
    before_step, after_step, what = LOOKS[name]
    (looks, line, _), (_, _, logged_by_rank_1) = on_ranks(_train, 2, name)
    assert "hid their all-gathers" in line
    assert logged_by_rank_1 == []
    if name == "nobody":
        assert looks == {}
        return
    [(where, steps)] = looks.items()
    first = _line_of(after_step if before_step is _do_nothing else before_step)
    file, number = where.split()[0].split(":")
    assert file == "test_overlap_figures.py" and first < int(number) <= first + 2
    assert what in where and f"{steps} times: " in line and where.split()[0] in line
    assert steps == Case().steps - 3  # the pipeline starts with the fourth step


class TurningNet(torch.nn.Module):
    """One day uses its middle layers in the opposite order."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(7, 13)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(13, 13) for _ in range(4)])
        self.head = torch.nn.Linear(13, 5)
        self.reverse = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in reversed(self.layers) if self.reverse else self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def _urgencies() -> list[dict[int, int]]:
    """Of the first and the last of these layers, before and after they change places."""
    run = Run(Case(model=TurningNet, strict=False), with_dear=True)
    seen: list[dict[int, int]] = []
    for index, (x, y) in enumerate(run.batches()):
        run.model.module.reverse = index >= 5
        train_step(run, x, y)
        if index in (4, 7):
            seen.append(dict(run.state._reducer._in_force.pipeline.gather_order._urgency))
    groups = run.state._reducer._in_force.pipeline.groups
    names = [{slot.name.rpartition(".")[0] for slot in group.slots} for group in groups]
    run.detach()
    return [
        {layer: min(urgency[i] for i, own in enumerate(names) if layer in own) for layer in ("layers.0", "layers.3")}
        for urgency in seen
    ]


def test_gather_legs_follow_a_model_whose_order_of_use_changes(on_ranks) -> None:
    for before, after in on_ranks(_urgencies, 2):
        assert before["layers.0"] < before["layers.3"]
        assert after["layers.0"] > after["layers.3"]
