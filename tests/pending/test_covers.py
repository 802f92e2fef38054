"""While a parameter waits for its update, C++ that asks nobody cannot use it: an error names the parameter."""

from __future__ import annotations

import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from equivalence import Case, Run, check_case, plain_loop
from models import DeepNet
from torch_features import HAS_COVERS

NAME = "14.weight"  # of the last layer, whose update is the last one to be applied
STEP = 5

pytestmark = pytest.mark.skipif(not HAS_COVERS, reason="torch was built for CPUs only")


@torch.jit.script
def scripted_norm(weight: Tensor) -> Tensor:
    return weight.norm()


def _norm_in_script(parameter: Tensor) -> Tensor:
    return scripted_norm(parameter)


def _new_tensor(parameter: Tensor) -> Tensor:
    return torch.zeros(1).new_tensor(parameter)


def _nested(parameter: Tensor) -> Tensor:
    return torch.nested.nested_tensor([parameter])


def _past_overrides(parameter: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.sum()


def _as_data_of_another(parameter: Tensor) -> Tensor:
    other = torch.zeros(3)
    other.data = parameter
    return other.sum()


def _written(parameter: Tensor) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        parameter.zero_()


def _reduced(parameter: Tensor) -> None:
    dist.group.WORLD.allreduce([parameter]).wait()


USES: dict[str, Callable[[Tensor], Any]] = {
    "tensor": torch.tensor,
    "new_tensor": _new_tensor,
    "as_tensor": partial(torch.as_tensor, dtype=torch.float64),
    "asarray": partial(torch.asarray, copy=True),
    "nested": _nested,
    "script": _norm_in_script,
    "past_overrides": _past_overrides,
    "data_of_another": _as_data_of_another,
    "written": _written,
    "process_group": _reduced,
}


def _parameter_with_a_pending_update(run: Run) -> torch.nn.Parameter:
    for index, _ in enumerate(plain_loop(run)):
        if index == STEP:
            break
    return run.model.module.get_parameter(NAME)


def _error_of(use: Callable[[Tensor], Any]) -> str:
    run = Run(Case(model=DeepNet, strict=False), with_dear=True)
    parameter = _parameter_with_a_pending_update(run)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch.tensor(p)
            use(parameter)
    except RuntimeError as error:
        return str(error)
    finally:
        run.detach()
    return "nothing was noticed"


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_who_asks_nobody_gets_an_error_that_names_the_parameter_and_the_way_out(on_ranks, use) -> None:
    for message in on_ranks(_error_of, 2, use):
        assert f"{NAME} is used while ddp_crossover has its update pending" in message
        assert "state.synchronize()" in message


def _catches_it_and_goes_on(use: Callable[[Tensor], Any], run: Run) -> Iterator[Any]:
    parameter = run.model.module.get_parameter(NAME)
    for loss in plain_loop(run):
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                seen = use(parameter)
            except RuntimeError:
                seen = use(parameter.detach().requires_grad_(parameter.requires_grad))
        yield loss, seen


@pytest.mark.parametrize("use", [torch.tensor, _norm_in_script], ids=["tensor", "script"])
def test_after_the_error_the_way_out_shows_what_plain_ddp_shows(on_ranks, use) -> None:
    check_case(Case(partial(_catches_it_and_goes_on, use), model=DeepNet, strict=False, pipelined=False), on_ranks)


def _is_covered_beside(bystander: str) -> bool:
    run = Run(Case(model=DeepNet, strict=False), with_dear=True)
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    before = signal.getsignal(signal.SIGTERM)
    if bystander == "thread":
        thread.start()
    elif bystander == "handler":
        signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        parameter = _parameter_with_a_pending_update(run)
        try:
            _past_overrides(parameter)
        except RuntimeError:
            return True
        return False
    finally:
        signal.signal(signal.SIGTERM, before)
        over.set()
        if thread.ident is not None:
            thread.join()
        run.detach()


@pytest.mark.parametrize("bystander", ["nobody", "thread", "handler"])
def test_parameters_are_covered_beside_threads_that_wait_and_handlers(on_ranks, bystander) -> None:
    assert on_ranks(_is_covered_beside, 2, bystander) == [True] * 2
