"""Never an old value in silence: after `step()`, code that asks no override gets the new value or an error that names
the way out, whoever else lives in the process.
"""

from __future__ import annotations

import contextlib
import hashlib
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from equivalence import Case, Run, assert_same, run_arm, train_step
from models import DeepNet
from stack_net import stack_case
from torch_features import HAS_COVERS

NAME = "14.weight"  # of the last layer, whose update is the last one to be applied
BUSY = "thread busy"
IDLE_THREADS = 20


@contextlib.contextmanager
def _threads(work: Callable[[threading.Event], object], count: int = 1, name: str = "idle") -> Iterator[None]:
    over = threading.Event()
    threads = [threading.Thread(target=work, args=(over,), name=name, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(20)


def _poll(over: threading.Event) -> None:
    while not over.is_set():
        time.sleep(0.01)


def _compute(over: threading.Event) -> None:
    while not over.is_set():
        hashlib.pbkdf2_hmac("sha256", b"", b"", 300_000)


@contextlib.contextmanager
def _handler() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


BYSTANDERS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "nobody": contextlib.nullcontext,
    "waiting_threads": partial(_threads, lambda over: over.wait(), IDLE_THREADS),
    "polling_thread": partial(_threads, _poll),
    "busy_thread": partial(_threads, _compute, name="busy"),
    "handler": _handler,
}


class _Seen:
    """What became of the reads of one run."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.fallbacks: dict[str, int] = {}


def _read(parameter: Tensor, seen: _Seen) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return torch.tensor(parameter)
        except RuntimeError as error:
            seen.errors.append(str(error))
            return parameter.detach().clone()


def _read_after_each_step(run: Run, seen: _Seen, bystander: str) -> Iterator[Any]:
    run.attach()
    with BYSTANDERS[bystander]():
        for index in range(run.case.steps):
            loss = train_step(run, *run.batch(index))
            yield loss, _read(run.model.module.get_parameter(NAME), seen)
    if run.state is not None:
        seen.fallbacks = dict(run.state.stats().fallbacks)


def _compare(bystander: str) -> _Seen:
    seen = _Seen()
    case = Case(partial(_read_after_each_step, seen=seen, bystander=bystander), model=DeepNet, strict=False, steps=12)
    expected, expected_state, _ = run_arm(case, with_dear=False)
    assert not seen.errors
    values, state, _ = run_arm(case, with_dear=True)
    assert_same(values, expected, "by step")
    assert_same(state, expected_state, "at the end")
    return seen


def _compare_in_a_thread(bystander: str) -> _Seen:
    """The main thread waits meanwhile."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_compare, bystander).result()


def _check_deferred(seen: _Seen) -> None:
    assert not any(BUSY in reason for reason in seen.fallbacks)
    assert seen.errors
    for message in seen.errors:
        assert NAME in message and "state.synchronize()" in message and "ddp_crossover" in message


@pytest.mark.skipif(not HAS_COVERS, reason="torch was built for CPUs only")
@pytest.mark.parametrize("compare", [_compare, _compare_in_a_thread])
@pytest.mark.parametrize("bystander", ["nobody", "waiting_threads", "polling_thread"])
def test_beside_a_thread_that_uses_no_tensor_parameters_stay_covered(on_ranks, bystander, compare) -> None:
    for seen in on_ranks(compare, 2, bystander):
        _check_deferred(seen)


@pytest.mark.skipif(not HAS_COVERS, reason="torch was built for CPUs only")
def test_beside_a_signal_handler_parameters_stay_covered(on_ranks) -> None:
    for seen in on_ranks(_compare, 2, "handler"):
        _check_deferred(seen)


@pytest.mark.parametrize("compare", [_compare, _compare_in_a_thread])
def test_beside_a_thread_in_a_long_call_updates_are_applied_at_once_and_it_is_named(on_ranks, compare) -> None:
    for seen in on_ranks(compare, 2, "busy_thread"):
        [(reason, times)] = [(why, n) for why, n in seen.fallbacks.items() if BUSY in why]
        assert times > 1 and "another process" in reason
        # It may be between two calls at a step.
        assert len(seen.errors) + times >= 12 - 3


CHUNKS = 400


def _read_all_the_time(run: Run, values: list[list[Tensor]] | None) -> list[list[Tensor]]:
    """Train, while a thread reads in long operators; no number that it reads may be from before the latest step."""
    parameters = list(run.model.module.parameters())
    after: list[list[Tensor]] = [[p.detach().clone() for p in parameters]]
    seen: list[tuple[int, int, int, Tensor]] = []
    errors: list[BaseException] = []
    steps = 0

    def look(over: threading.Event) -> None:
        index = 0
        while not over.is_set():
            index = (index + 1) % len(parameters)
            begin = steps
            try:
                # Looks up the override once, and then takes the memory's address many times.
                many = torch._foreach_add([parameters[index]] * CHUNKS, 0.0)
            except BaseException as error:
                errors.append(error)
                return
            seen.append((index, begin, steps, torch.stack([many[0], many[-1]])))

    with torch.no_grad(), _threads(look, name="reader") if values is not None else contextlib.nullcontext():
        for step in range(run.case.steps):
            with torch.enable_grad():
                train_step(run, *run.batch(step))
            steps = step + 1
            if values is None:
                after.append([p.detach().clone() for p in parameters])
    if errors:
        raise errors[0]
    assert values is None or len(seen) > 3
    for index, begin, end, number in seen:
        of_steps = torch.stack([one[index] for one in values or after])
        is_allowed, is_old = (
            (number.unsqueeze(1) == some).any(1) for some in (of_steps[begin : end + 2], of_steps[:begin])
        )
        # What is neither was read in the middle of a step that defers nothing, as the first ones, and plain DDP's.
        assert not (is_old & ~is_allowed).any(), f"an old value of parameter {index} after step {begin}"
    return after


def _read_beside_training() -> None:
    case = stack_case(steps=60)
    values = _read_all_the_time(Run(case, with_dear=False), None)
    run = Run(case, with_dear=True)
    run.attach()
    _read_all_the_time(run, values)
    run.detach()


def test_a_thread_that_reads_all_the_time_sees_values_of_plain_ddp_and_no_error(on_ranks) -> None:
    on_ranks(_read_beside_training, 2)


def _past_overrides(parameter: Tensor, use: Callable[[Tensor], Any] = Tensor.clone) -> Any:
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        return use(parameter)


PAST: dict[str, Callable[[Tensor], Any]] = {
    "tensor": torch.tensor,
    "asarray": partial(torch.asarray, copy=True),
    "past_overrides": _past_overrides,
}


def _nans_of_a_build_for_cpus(read: Callable[[Tensor], Tensor]) -> tuple[bool, str]:
    case = Case(model=DeepNet, strict=False, steps=6)
    with mock.patch.object(torch._C, "_set_storage_data_ptr_access_error_msg", None), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = Run(case, with_dear=True)
        run.attach()
        parameter = run.model.module.get_parameter(NAME)
        for index in range(case.steps):
            train_step(run, *run.batch(index))
        value = read(parameter)
        try:
            _past_overrides(parameter, Tensor.zero_)
            written = "nothing was raised"
        except RuntimeError as error:
            written = str(error)
        assert not parameter.isnan().any() and parameter.any()
        run.detach()
    return bool(value.isnan().all()), written


@pytest.mark.parametrize("read", PAST.values(), ids=PAST)
def test_a_torch_built_for_cpus_shows_nan_and_refuses_writes(on_ranks, read) -> None:
    for is_nan, written in on_ranks(_nans_of_a_build_for_cpus, 2, read):
        assert is_nan
        assert "Cannot access data pointer" in written


def _train_on_a_build_for_cpus() -> None:
    case = stack_case(steps=12)
    expected, expected_state, _ = run_arm(case, with_dear=False)
    with mock.patch.object(torch._C, "_set_storage_data_ptr_access_error_msg", None):
        values, state, _ = run_arm(case, with_dear=True)
    assert_same(values, expected, "by step")
    assert_same(state, expected_state, "at the end")


def test_a_torch_built_for_cpus_trains_as_plain_ddp(on_ranks) -> None:
    on_ranks(_train_on_a_build_for_cpus, 2)
