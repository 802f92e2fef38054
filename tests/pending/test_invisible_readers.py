"""Code that reads parameters where no function override sees it, or that looks at their class or version:
the run is exact, perhaps with less overlap, or ends with an error that names the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from equivalence import (
    SGD,
    Case,
    Run,
    assert_same,
    assert_same_on_all_ranks,
    check_case,
    plain_loop,
    run_arm,
    snapshot,
)
from invisible_models import (
    CheckpointedMatricesNet,
    CompiledClosureNet,
    MyParameter,
    PaddedEncoderNet,
    ScaledOutputNet,
    ScriptedBiasNet,
    ScriptedModuleNet,
    ScriptedWeightNet,
    ScriptInFunctionNet,
    SubclassActivationNet,
    SubclassParameterNet,
    padding,
)
from matrix import in_turn
from models import OUTPUTS, DeepNet, MatrixNet
from optimizers import MUON
from stale_loops import LIMIT

INVISIBLE = {
    "bias_in_script": (ScriptedBiasNet, "bias"),
    "weight_in_script": (ScriptedWeightNet, "weight"),
    "weight_in_scripted_module": (ScriptedModuleNet, "weight"),
    "weight_in_script_in_function": (ScriptInFunctionNet, "weight"),
    "activation_disables_overrides": (SubclassActivationNet, "weight"),
}


def _exact_or_refused(case: Case, name: str) -> None:
    expected, expected_state, _ = run_arm(case, with_dear=False)
    run = Run(case, with_dear=True)
    try:
        for step, value in enumerate(case.loop(run)):
            assert_same(snapshot(value), expected[step], f"step {step}")
    except RuntimeError as error:
        assert name in str(error), f"{error} does not name {name}"
    else:
        state = snapshot(run.visible_state())
        assert_same(state, expected_state, "at the end")
        assert_same_on_all_ranks(state)
    finally:
        run.detach()


def _clip_and_evaluate(run: Run) -> Iterator[Any]:
    parameters = list(run.model.parameters())
    x_eval, _ = run.batch(10_000)
    for index, loss in enumerate(plain_loop(run)):
        for p in parameters if index % 3 == 2 else []:
            p.data.clamp_(-LIMIT, LIMIT)
        with torch.no_grad():
            yield loss, run.model.module(x_eval) if index % 3 else None


@pytest.mark.parametrize("world_size, strict", [(2, False), (2, True), (3, True)])
@pytest.mark.parametrize("loop", [plain_loop, _clip_and_evaluate], ids=["train", "clip_and_evaluate"])
@pytest.mark.parametrize("model, name", INVISIBLE.values(), ids=INVISIBLE)
def test_a_reader_that_no_override_sees_is_exact_or_named(on_ranks, model, name, loop, world_size, strict) -> None:
    on_ranks(_exact_or_refused, world_size, Case(loop, model=model, world_size=world_size, strict=strict), name)


def _evaluate(run: Run, called: Callable[[Run, torch.Tensor], torch.Tensor]) -> Iterator[Any]:
    x_eval, _ = run.batch(10_000)
    for loss in plain_loop(run):
        run.model.eval()
        with torch.no_grad():
            output = called(run, x_eval)
        run.model.train()
        yield loss, output


def _module(run: Run, x: torch.Tensor) -> torch.Tensor:
    return run.model.module(x)


def _one_layer(run: Run, x: torch.Tensor) -> torch.Tensor:
    module = run.model.module
    tokens = torch.ones(len(x), x.shape[1], 8)
    return module.encoder.layers[1](tokens, src_key_padding_mask=padding(x))


FAST_PATHS = {
    f"{called.__name__.lstrip('_')}_{'always_eval' if always_eval else 'eval'}": Case(
        partial(_evaluate, called=called), model=partial(PaddedEncoderNet, always_eval), pipelined=False
    )
    for called in (_module, _one_layer)
    for always_eval in (False, True)
}


@pytest.mark.parametrize("case", in_turn(FAST_PATHS))
def test_evaluation_takes_the_fast_path_that_it_takes_under_plain_ddp(on_ranks, case: Case) -> None:
    check_case(case, on_ranks)


def _backward_on_an_old_graph(run: Run) -> Iterator[Any]:
    for index, (x, y) in enumerate(run.batches()):
        run.optimizer.zero_grad()
        loss = run.loss(run.model(x), y)
        loss.backward(retain_graph=True)
        run.optimizer.step()
        if index % 5 == 4:
            message = "nothing was raised"
            try:
                loss.backward()
            except RuntimeError as error:
                message = str(error)
            assert "modified by an inplace operation" in message, message
        yield loss


OLD_GRAPHS = {
    "the_parameter_itself": Case(_backward_on_an_old_graph, model=ScaledOutputNet, optimizer=SGD, pipelined=False),
    "a_view": Case(_backward_on_an_old_graph, model=MatrixNet, optimizer=SGD, pipelined=False),
}


@pytest.mark.parametrize("case", in_turn(OLD_GRAPHS))
def test_backward_on_an_old_graph_after_step_raises(on_ranks, case: Case) -> None:
    check_case(case, on_ranks)


def _autocast_and_clip(run: Run) -> Iterator[Any]:
    parameters = list(run.model.parameters())
    for x, y in run.batches():
        with torch.autocast("cpu", torch.bfloat16):
            run.optimizer.zero_grad()
            loss = run.loss(run.model(x).float(), y)
            loss.backward()
            run.optimizer.step()
            for p in parameters:
                p.data.clamp_(-LIMIT, LIMIT)
            product = parameters[0] @ x.T
            yield loss, product.detach()


CONTEXTS = {
    **{
        f"checkpoint_{how}_{name}": Case(model=partial(CheckpointedMatricesNet, how), optimizer=made)
        for how in ("selective", "reentrant", "nonreentrant")
        for name, made in [("sgd", SGD), ("muon", MUON)]
    },
    "autocast": Case(_autocast_and_clip, model=MatrixNet, pipelined=False),
    "autocast_muon": Case(_autocast_and_clip, model=MatrixNet, optimizer=MUON, pipelined=False),
    "compiled_closure": Case(model=partial(CompiledClosureNet, fullgraph=False), pipelined=False),
    "compiled_closure_fullgraph": Case(model=partial(CompiledClosureNet, fullgraph=True), pipelined=False),
    "compiled_closure_clipped": Case(
        _clip_and_evaluate, model=partial(CompiledClosureNet, fullgraph=True), pipelined=False
    ),
}


@pytest.mark.parametrize("case", in_turn(CONTEXTS, quick=("checkpoint_selective_sgd", "autocast")))
def test_forwards_in_unusual_contexts_are_exact(on_ranks, case: Case) -> None:
    check_case(case, on_ranks)


def _subclass_parameters(run: Run) -> Iterator[Any]:
    parameters = list(run.model.parameters())
    for seen in _clip_and_evaluate(run):
        yield seen, snapshot(parameters), [isinstance(p, MyParameter) and p.tag for p in parameters]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("of_all", [False, True])
def test_parameters_of_a_subclass_stay_what_they_are(on_ranks, of_all, strict) -> None:
    model = partial(SubclassParameterNet, of_all)
    case = Case(_subclass_parameters, model=model, strict=strict, pipelined=False)
    check_case(case, on_ranks)
    check_case(replace(case, loop=plain_loop), on_ranks)


class ShiftedNet(DeepNet):
    """Adds its last parameter to the output only if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = torch.nn.Parameter(torch.zeros(OUTPUTS))

    def forward(self, x: torch.Tensor, shifts: bool = True) -> torch.Tensor:
        return super().forward(x) + self.shift if shifts else super().forward(x)


def _differentiate_other_graphs(run: Run) -> Iterator[Any]:
    """Of a parameter that DDP's last forward has left out, gradients come from an earlier graph and past DDP."""
    parameters = list(run.model.parameters())
    earlier = torch.zeros(())
    for index, (x, y) in enumerate(run.batches()):
        if index % 3 == 0:
            past_ddp = torch.autograd.grad(run.model.module(x).square().sum(), parameters)
            yield snapshot(past_ddp)
        run.optimizer.zero_grad()
        loss = run.loss(run.model(x, index % 3 == 0), y)
        if index % 3 == 1:
            yield snapshot(torch.autograd.grad(earlier, run.model.module.shift))
        loss.backward(retain_graph=index % 3 == 0)
        run.optimizer.step()
        earlier = loss
        assert run.state is None or not any("bypasses" in reason for reason in run.state.stats().fallbacks)
        yield loss


def test_gradients_of_other_graphs_tell_nothing_about_a_forward(on_ranks) -> None:
    """Neither before the first plan nor later; graphs that live on keep the updates of other parameters at home."""
    ddp = {"find_unused_parameters": True}
    case = Case(_differentiate_other_graphs, ShiftedNet, SGD, ddp=ddp, strict=False, pipelined=False)
    check_case(case, on_ranks)


def _backward_after_both_forwards(run: Run) -> Iterator[Any]:
    """The first backward gives a gradient to a parameter that the second forward has left out."""
    for x, y in run.batches():
        run.optimizer.zero_grad()
        with run.model.no_sync():
            losses = [run.loss(run.model(x, shifts), y) for shifts in (True, False)]
            for loss in losses:
                loss.backward()
        loss = run.loss(run.model(x), y)
        loss.backward()
        run.optimizer.step()
        yield loss


def test_nor_do_gradients_of_the_forward_before(on_ranks) -> None:
    check_case(Case(_backward_after_both_forwards, ShiftedNet, SGD), on_ranks)
