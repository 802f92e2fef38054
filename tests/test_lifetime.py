"""What an attached model holds on to, and what is left of it after `detach()`."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import time
import weakref

import torch
import torch.distributed as dist
from bystanders import Child, evaluate
from equivalence import Case, Run, plain_loop
from models import DeepNet

import ddp_crossover as dx


def _trained_run(with_dear: bool) -> Run:
    run = Run(Case(model=DeepNet, steps=6), with_dear)
    for _ in plain_loop(run):
        pass
    return run


def _threads_left_by_detach() -> list[str]:
    before = {thread.ident for thread in threading.enumerate()}
    _trained_run(with_dear=True).detach()
    deadline = time.monotonic() + 5
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


def test_detach_twice_is_harmless(on_ranks) -> None:
    assert on_ranks(_detach_twice, 1) == [True]


def _detach_twice() -> bool:
    run = _trained_run(with_dear=True)
    run.detach()
    run.detach()
    return run.state is not None


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


def _zeroes_gradients_of_a_dropped_state() -> bool:
    run = _trained_run(with_dear=True)
    optimizer, link = run.optimizer, run.state._link
    del run
    gc.collect()
    assert link.is_closed
    optimizer.zero_grad(set_to_none=False)
    return all(not p.grad.any() for p in optimizer.param_groups[0]["params"])


def test_gradients_can_be_zeroed_after_model_and_state_were_dropped(on_ranks) -> None:
    assert on_ranks(_zeroes_gradients_of_a_dropped_state, 2, timeout_s=20) == [True, True]


def _threads_left_by_a_refused_attach() -> list[str]:
    before = {thread.ident for thread in threading.enumerate()}
    run = Run(Case(dear={"fusion_mb": 1.0 + dist.get_rank()}), with_dear=True)
    with contextlib.suppress(dx.DisagreementError):
        run.attach()
    return [t.name for t in threading.enumerate() if t.ident not in before]


def test_a_refused_attach_leaves_no_thread_behind(on_ranks) -> None:
    assert on_ranks(_threads_left_by_a_refused_attach, 2) == [[], []]
