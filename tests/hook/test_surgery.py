"""What scripts do to a model after attach: exact as plain DDP, or an error that says what to do."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from equivalence import Case, Run, assert_same, check_case, optimizer, run_arm, train_step
from models import INPUTS, OUTPUTS, OddNet, WideNet
from plans import AS_BUILT, judged_plans

SGD = optimizer(torch.optim.SGD, lr=0.1)


class ConvNet(nn.Module):
    """Its second weight lies otherwise in memory in the channels-last format."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Conv2d(1, 3, kernel_size=(1, 2))
        self.conv = nn.Conv2d(3, 5, kernel_size=(1, 3))
        self.head = nn.Linear(5 * 4, OUTPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.conv(self.lift(x.view(-1, 1, 1, INPUTS)))).flatten(1))


@dataclass(frozen=True)
class Operate:
    """The loop of every tutorial, with an operation before one of its steps, while updates are pending."""

    operation: Callable[[Run], None]
    step: int

    def __call__(self, run: Run) -> Iterator[Any]:
        run.attach()
        for index in range(run.case.steps):
            x, y = run.batch(index)
            if index == self.step:
                self.operation(run)
            loss = train_step(run, x, y)
            yield loss


def _to_channels_last(run: Run) -> None:
    run.model.module.to(memory_format=torch.channels_last)


def _to_empty_and_load(run: Run) -> None:
    module = run.model.module
    saved = {name: value.clone() * 0.9 for name, value in module.state_dict().items()}
    module.to_empty(device="cpu")
    module.load_state_dict(saved)


def _without_gradients(run: Run) -> None:
    run.optimizer.zero_grad()
    _to_empty_and_load(run)


def _prune(run: Run) -> None:
    prune.l1_unstructured(run.model.module.first, "weight", 0.3)


def _prune_and_remove(run: Run) -> None:
    _prune(run)
    prune.remove(run.model.module.first, "weight")


def _old_spectral_norm(run: Run) -> None:
    nn.utils.spectral_norm(run.model.module.first)


def _new_weight_norm(run: Run) -> None:
    parametrizations.weight_norm(run.model.module.first)


def _new_weight_norm_and_remove(run: Run) -> None:
    _new_weight_norm(run)
    parametrize.remove_parametrizations(run.model.module.first, "weight")


class _Negative(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return -weight


def _parametrize(run: Run) -> None:
    """The parameter stays, with another accumulator of gradients than the one that DDP has a hook on."""
    parametrize.register_parametrization(next(run.model.module.children()), "weight", _Negative())


def _freeze(run: Run) -> None:
    run.model.module.first.requires_grad_(False)


def _replace_a_parameter(run: Run) -> None:
    first = run.model.module.first
    first.weight = nn.Parameter(first.weight.detach() * 0.5)


def _replace_data(run: Run) -> None:
    for p in run.model.module.first.parameters():
        p.data = p.data * 0.5


def _replace_a_module(run: Run) -> None:
    first = run.model.module.first = nn.Linear(INPUTS, run.model.module.first.out_features)
    nn.init.constant_(first.weight, 0.1)
    nn.init.constant_(first.bias, 0.1)
    run.optimizer.add_param_group({"params": list(first.parameters())})


def _add_a_module(run: Run) -> None:
    module = run.model.module
    more = nn.Linear(OUTPUTS, OUTPUTS)
    nn.init.eye_(more.weight)
    nn.init.zeros_(more.bias)
    module.second = nn.Sequential(module.second, more)


def _drop_a_parameter_of_the_optimizer(run: Run) -> None:
    run.optimizer.param_groups[0]["params"].pop()


def _replace_the_optimizer(run: Run) -> None:
    run.optimizers = [torch.optim.SGD(run.model.parameters(), lr=0.1, momentum=0.9)]


@pytest.mark.parametrize("step", [1, 8])
@pytest.mark.parametrize(
    "operation",
    [
        _without_gradients,
        _prune,
        _prune_and_remove,
        _old_spectral_norm,
        _new_weight_norm,
        _new_weight_norm_and_remove,
        _parametrize,
        _freeze,
        _replace_a_parameter,
        _replace_data,
        _replace_a_module,
        _add_a_module,
        _replace_the_optimizer,
    ],
)
def test_a_changed_model_is_trained_as_by_plain_ddp(on_ranks, operation, step) -> None:
    # What is changed is unused for DDP then, and the ranks of plain DDP go apart where it does not reduce what is new.
    case = Case(Operate(operation, step), OddNet, SGD, steps=12, ddp={"find_unused_parameters": True}, pipelined=False)
    on_ranks(_compare_each_rank, 2, case)


@pytest.mark.parametrize("step", [1, 8])
def test_so_is_a_parametrized_one_with_gradients_in_buckets(on_ranks, step) -> None:
    ddp = {"find_unused_parameters": True, "gradient_as_bucket_view": True}
    on_ranks(_compare_each_rank, 2, Case(Operate(_parametrize, step), OddNet, SGD, steps=12, ddp=ddp, pipelined=False))


def _then_detached(run: Run) -> Iterator[Any]:
    for index, loss in enumerate(Operate(_parametrize, 4)(run)):
        if index == 7:
            run.detach()
        yield loss


def _while_plans_are_tried(run: Run) -> Iterator[Any]:
    with judged_plans(AS_BUILT):
        yield from Operate(_parametrize, 4)(run)


@pytest.mark.parametrize(
    ("loop", "steps", "dear"),
    [
        (_then_detached, 12, {}),
        (_while_plans_are_tried, 110, {"fusion_mb": None}),
    ],
)
def test_no_new_reducer_reduces_what_that_of_the_script_does_not(on_ranks, loop, steps, dear) -> None:
    ddp = {"find_unused_parameters": True}
    case = Case(loop, WideNet, SGD, steps=steps, dear=dear, ddp=ddp, strict=False, pipelined=False)
    on_ranks(_compare_each_rank, 2, case)


def _compare_each_rank(case: Case) -> None:
    expected, expected_state, _ = run_arm(case, with_dear=False)
    seen, seen_state, _ = run_arm(case, with_dear=True)
    assert_same(list(seen.values()), list(expected.values()), "losses")
    assert_same(seen_state, expected_state, "at the end")


def _notes_of_a_replaced_optimizer(case: Case) -> list[str]:
    run = Run(case, with_dear=True)
    for _ in case.loop(run):
        pass
    notes = list(run.state.stats().fallbacks)
    run.detach()
    return notes


def test_an_optimizer_that_was_not_attached_is_noted(on_ranks) -> None:
    for notes in on_ranks(_notes_of_a_replaced_optimizer, 2, Case(Operate(_replace_the_optimizer, 8), steps=12)):
        assert len(notes) == 1 and "this optimizer was not attached" in notes[0], notes


def test_an_optimizer_may_lose_a_parameter(on_ranks) -> None:
    loop = Operate(_drop_a_parameter_of_the_optimizer, 8)
    check_case(Case(loop, OddNet, SGD, steps=12, pipelined=False), on_ranks)


@pytest.mark.parametrize("views", [True, False])
@pytest.mark.parametrize("find_unused", [True, False])
def test_another_memory_format_is_an_error(on_ranks, views, find_unused) -> None:
    """Plain DDP takes gradients for others there, unless it keeps them in its buckets and they are None just then."""
    ddp = {"gradient_as_bucket_view": views, "find_unused_parameters": find_unused}
    case = Case(Operate(_to_channels_last, 8), ConvNet, SGD, steps=12, ddp=ddp)
    for message in on_ranks(_error_of, 2, case):
        assert re.search(r"layout of conv\.weight.*new DistributedDataParallel", message), message


def _error_of(case: Case) -> str:
    run = Run(case, with_dear=True)
    try:
        for _ in case.loop(run):
            pass
    except RuntimeError as error:
        return str(error)
    finally:
        run.detach()
    return "nothing was noticed"
