"""What an attached model holds on to, and what is left of it after `detach()`."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ddp_crossover as dx
from equivalence import Case, Run, check_case, plain_loop
from models import DeepNet
from stack_net import Child, evaluate

pytestmark = pytest.mark.quick


def _trained_run(with_dear: bool) -> Run:
    run = Run(Case(model=DeepNet, steps=6), with_dear)
    for _ in plain_loop(run):
        pass
    return run


def _threads_left_by_detach() -> list[str]:
    before = {thread.ident for thread in threading.enumerate()}
    _trained_run(with_dear=True).detach()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        left = [t.name for t in threading.enumerate() if t.ident not in before]
        if not left:
            break
        time.sleep(0.05)
    return left


def test_detach_leaves_no_thread_behind(on_ranks) -> None:
    assert on_ranks(_threads_left_by_detach, 2) == [[], []]


def _is_freed(with_dear: bool) -> bool:
    run = _trained_run(with_dear)
    run.detach()
    module = weakref.ref(run.model.module)
    del run
    gc.collect()
    return module() is None


def test_a_detached_model_is_freed_as_a_plain_one(on_ranks) -> None:
    """Else every model that a notebook or a sweep builds stays in memory, with the sockets of its
    group.
    """
    assert on_ranks(_is_freed, 2, False) == [True, True], "plain DDP leaks: this test cannot tell"
    assert on_ranks(_is_freed, 2, True) == [True, True]


def _state_is_freed_before_its_model() -> bool:
    run = _trained_run(with_dear=True)
    run.detach()
    state = weakref.ref(run.state)
    run.state = None
    gc.collect()
    return state() is None


def test_a_detached_state_is_freed_while_its_model_lives(on_ranks) -> None:
    """Else a script that detaches and attaches anew every epoch keeps every state that it ever had."""
    assert on_ranks(_state_is_freed_before_its_model, 2) == [True, True]


def _hooks_left_by_detach() -> list[str]:
    def hooks(module: torch.nn.Module) -> int:
        return sum(
            len(m._forward_pre_hooks) + len(m._forward_hooks) + len(m._state_dict_pre_hooks) for m in module.modules()
        )

    plain, run = Run(Case(), with_dear=False), _trained_run(with_dear=True)
    run.detach()
    left = [] if hooks(run.model) == hooks(plain.model) else ["module hooks"]
    if "step" in vars(run.optimizer) and "step" not in vars(plain.optimizer):
        left.append("optimizer.step")
    left += [n for n, p in run.model.named_parameters() if type(p.grad) is not torch.Tensor]
    return left


def test_detach_removes_every_hook_and_wrapper(on_ranks) -> None:
    assert on_ranks(_hooks_left_by_detach, 2) == [[], []]


def _forks_after_detach() -> list[str]:
    run = _trained_run(with_dear=True)
    run.detach()
    raised: list[str] = []
    before, sys.unraisablehook = sys.unraisablehook, lambda error: raised.append(str(error.exc_value))
    try:
        return Child(lambda: raised + [] * evaluate(run.model.module).numel()).result()
    finally:
        sys.unraisablehook = before


def test_a_detached_model_can_be_forked(on_ranks) -> None:
    assert on_ranks(_forks_after_detach, 2) == [[], []]


def _forks_beside_garbage() -> bool:
    run = _trained_run(with_dear=True)
    gc.disable()
    try:
        holder: dict[str, Any] = {"group": dist.new_group()}
        holder["itself"] = holder
        dist.barrier(holder["group"])
        dist.destroy_process_group(holder["group"])
        del holder
        return Child(lambda: gc.collect() >= 0).result()
    finally:
        gc.enable()
        run.detach()


def test_a_forked_child_does_not_collect_what_needs_threads_of_its_parent(on_ranks) -> None:
    assert on_ranks(_forks_beside_garbage, 2) == [True, True]


def _zeroes_gradients_of_a_dropped_state() -> bool:
    run = _trained_run(with_dear=True)
    optimizer, link = run.optimizer, run.state._link
    del run
    gc.collect()
    assert link.is_closed
    optimizer.zero_grad(set_to_none=False)
    return all(not p.grad.any() for p in optimizer.param_groups[0]["params"])


def test_gradients_can_be_zeroed_after_model_and_state_were_dropped(on_ranks) -> None:
    assert on_ranks(_zeroes_gradients_of_a_dropped_state, 2) == [True, True]


def _uses_a_state_whose_model_is_gone() -> bool:
    run = _trained_run(with_dear=True)
    state, run.model = run.state, None
    gc.collect()
    for use in (lambda: state.module, lambda: state.batch(1).__enter__()):
        with pytest.raises(RuntimeError, match="the model of this state is gone"):
            use()
    return state.detached


def test_a_state_says_that_its_model_is_gone(on_ranks) -> None:
    assert on_ranks(_uses_a_state_whose_model_is_gone, 2) == [True, True]


def _threads_left_by_a_refused_attach() -> list[str]:
    before = {thread.ident for thread in threading.enumerate()}
    run = Run(Case(dear={"fusion_mb": 1.0 + dist.get_rank()}), with_dear=True)
    with contextlib.suppress(dx.DisagreementError):
        run.attach()
    return [t.name for t in threading.enumerate() if t.ident not in before]


def test_a_refused_attach_leaves_no_thread_behind(on_ranks) -> None:
    assert on_ranks(_threads_left_by_a_refused_attach, 2) == [[], []]


def _copy_and_save(run: Run) -> Iterator[Any]:
    yield from plain_loop(run)
    run.detach()
    file = io.BytesIO()
    torch.save(run.model, file)
    file.seek(0)
    for copied in (copy.deepcopy(run.model), torch.load(file, weights_only=False)):
        copied(run.batch(0)[0]).sum().backward()
        yield {name: p.grad for name, p in copied.named_parameters()}


def _time_plain_ddp(run: Run) -> Iterator[Any]:
    yield from plain_loop(run)
    run.detach()
    timer = dx.DdpTimer(run.model, run.optimizer)
    yield from plain_loop(run)
    assert timer.exposed_s > 0


def _attach_with_a_new_optimizer(run: Run) -> Iterator[Any]:
    yield from plain_loop(run)
    run.detach()
    run.optimizers = [torch.optim.SGD(run.model.parameters(), lr=0.1)]
    run.attach()
    yield from plain_loop(run)


def _detach_before_backward(run: Run) -> Iterator[Any]:
    yield from plain_loop(run)
    x, y = run.batch(0)
    loss = run.loss(run.model(x), y)
    run.detach()
    loss.backward()
    yield copy.deepcopy(run.model)(x)
    run.optimizer.step()
    yield from plain_loop(run)


def _detach_in_inference_mode(run: Run) -> Iterator[Any]:
    yield from plain_loop(run)
    with torch.inference_mode():
        run.detach()
    yield from plain_loop(run)


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize(
    "loop",
    [
        _copy_and_save,
        _time_plain_ddp,
        _attach_with_a_new_optimizer,
        _detach_before_backward,
        _detach_in_inference_mode,
    ],
)
def test_a_detached_model_is_plain_ddp(on_ranks, loop, static) -> None:
    if loop is _copy_and_save and static:
        pytest.skip("a copy of a plain model with a static graph does not reduce gradients")
    ddp = {"gradient_as_bucket_view": True, "static_graph": static}
    check_case(Case(loop, model=DeepNet, steps=6, ddp=ddp, pipelined=False), on_ranks)


def _copies_after_ddp_is_gone(detach_first: bool) -> bool:
    run = _trained_run(with_dear=True)
    module, expected = run.model.module, run.model.module.state_dict()
    if detach_first:
        run.detach()
    run.model = None
    gc.collect()
    copied = copy.deepcopy(module)
    run.detach()
    copied = copy.deepcopy(copied)
    assert all(torch.equal(value, expected[name]) for name, value in copied.state_dict().items())
    return {type(p) for p in module.parameters()} == {torch.nn.Parameter}


@pytest.mark.parametrize("detach_first", [True, False])
def test_a_module_can_be_copied_when_its_ddp_is_gone(on_ranks, detach_first) -> None:
    assert on_ranks(_copies_after_ddp_is_gone, 2, detach_first) == [True, True]


def _break_off_in_ddp(detaches: bool, late_rank: int) -> tuple[float, Exception | None]:
    """With a static graph DDP does not take a first backward in `no_sync()`: an assertion of its own."""
    net = torch.nn.Sequential(torch.nn.Linear(8, 1000), torch.nn.Linear(1000, 1000))
    model = torch.nn.parallel.DistributedDataParallel(net, static_graph=True)
    state = dx.attach(model, torch.optim.SGD(net.parameters(), lr=0.1))
    link = state._link
    with model.no_sync():
        loss = model(torch.ones(2, 8)).sum()
    if dist.get_rank() == late_rank:
        time.sleep(0.3)
    with pytest.raises(RuntimeError, match="INTERNAL ASSERT"), model.no_sync():
        loss.backward()
    start_s = time.monotonic()
    if detaches:
        state.detach()
    del model, state, loss
    gc.collect()
    assert link.is_closed
    return time.monotonic() - start_s, link._context.failures.first


@pytest.mark.parametrize("late_rank", [0, 1])
@pytest.mark.parametrize("detaches", [True, False])
def test_legs_of_a_backward_that_ddp_broke_off_end_before_the_link_closes(on_ranks, detaches, late_rank) -> None:
    """A peer in the middle of one would wait for the rest until the group's timeout."""
    for seconds, failure in on_ranks(_break_off_in_ddp, 2, detaches, late_rank):
        assert failure is None
        assert seconds < 5
