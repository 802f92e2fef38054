"""Gradients that come one step late: which, when, and that nothing of them is lost."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ddp_crossover as dx
from ddp_crossover.relaxed import OSP
from relaxed_reference import backward_of, flat, net, samples, sgd, step_of

STEPS = 12
ALL = 10**9


def _model() -> DistributedDataParallel:
    return DistributedDataParallel(net(), bucket_cap_mb=1e-3)


def _train(fraction: float | None, every: int = 4) -> Tensor:
    ddp = _model()
    optimizer = sgd(ddp.parameters())
    state = None if fraction is None else dx.attach(ddp, optimizer, sync=OSP(fraction=fraction, every=every))
    for step in range(STEPS):
        step_of(ddp, optimizer, step, dist.get_rank())
    if state is not None:
        state.detach()
    return flat(ddp.module)


@pytest.mark.quick
@pytest.mark.parametrize("world_size", [2, 3])
def test_with_nothing_late_it_has_the_bits_of_plain_ddp(on_ranks, world_size) -> None:
    plain, ours = on_ranks(_train, world_size, None), on_ranks(_train, world_size, 0.0)
    assert all(torch.equal(one, plain[0]) for one in ours)


@pytest.mark.parametrize("fraction", [0.3, 0.6, 1.0])
def test_ranks_stay_the_same(on_ranks, fraction) -> None:
    results = on_ranks(_train, 3, fraction)
    assert all(torch.equal(one, results[0]) for one in results)
    assert not torch.equal(results[0], on_ranks(_train, 3, 0.0)[0])


def _late_in_one_process(world_size: int) -> Tensor:
    """All gradients are one step late from the fourth step on."""
    model = net()
    optimizer = sgd(model.parameters())
    before = None
    for step in range(STEPS):
        sums = [torch.zeros_like(p) for p in model.parameters()]
        for rank in range(world_size):
            backward_of(model, optimizer, step, rank)
            for total, parameter in zip(sums, model.parameters(), strict=True):
                total.add_(parameter.grad / world_size)
        is_late = step >= 3
        for index, parameter in enumerate(model.parameters()):
            now = sums[index] if not is_late else torch.zeros_like(parameter) if before is None else before[index]
            parameter.grad.copy_(now)
        before = sums if is_late else None
        optimizer.step()
    return flat(model)


def test_all_gradients_may_be_late(on_ranks) -> None:
    expected = _late_in_one_process(2)
    for ours in on_ranks(_train, 2, 1.0, ALL):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


def _sums(fraction: float) -> tuple[list[int], float]:
    """What is late, and the sum of what all steps deliver, where gradients do not depend on parameters."""
    ddp = _model()
    state = dx.attach(ddp, sgd(ddp.parameters()), sync=OSP(fraction=fraction, every=3))
    late, total = [], 0.0
    x = torch.ones(2, net()[0].in_features, dtype=torch.float64)
    for number in range(12):
        if number == 6:
            state.policy = OSP(fraction=0.0, every=3)  # from the look after that on, nothing is late any more
        ddp.zero_grad()
        (ddp(x).sum() * (dist.get_rank() + 1)).backward()
        total += sum(float(p.grad.sum()) for p in ddp.parameters())
        late.append(len(state.late))
    state.detach()
    alone = net()
    alone(x).sum().backward()
    return late, total / sum(float(p.grad.sum()) for p in alone.parameters())


def test_what_was_late_comes_once(on_ranks) -> None:
    for late, total in on_ranks(_sums, 2, 0.7):
        assert late[:2] == [0, 0] and late[2] > 0 and late[-1] == 0
        assert total == pytest.approx(12 * 1.5, rel=1e-12)


def _scaled() -> str:
    ddp = _model()
    dx.attach(ddp, sgd(ddp.parameters()), sync=OSP(fraction=0.5))
    scaler = dx.GradScaler("cpu")
    try:
        scaler.scale(ddp(torch.ones(2, net()[0].in_features, dtype=torch.float64)).sum()).backward()
    except RuntimeError as error:
        return str(error)
    return "nothing"


def test_scaled_losses_are_refused(on_ranks) -> None:
    assert all("train in bfloat16" in said for said in on_ranks(_scaled, 2))


def _late_then_plain() -> bool:
    ddp, other = _model(), _model()
    optimizer = sgd(ddp.parameters())
    state = dx.attach(ddp, optimizer, sync=OSP(fraction=1.0))
    for step in range(6):
        step_of(ddp, optimizer, step, dist.get_rank())
    state.detach()
    other.module.load_state_dict(ddp.module.state_dict())
    for model in (ddp, other):
        model.zero_grad()
        x, y = samples(7, dist.get_rank())
        nn.functional.mse_loss(model(x), y).backward()
    dx.attach(ddp, optimizer).detach()
    return all(torch.equal(p.grad, q.grad) for p, q in zip(ddp.parameters(), other.parameters(), strict=True))


def test_late_gradients_end_with_detach(on_ranks) -> None:
    assert on_ranks(_late_then_plain, 2) == [True, True]


def _refused(options: dict, **ddp_options: bool) -> str:
    ddp = DistributedDataParallel(net(), **ddp_options)
    with pytest.raises(ValueError) as refused:
        dx.attach(ddp, sgd(ddp.parameters()), sync=OSP(fraction=0.5), **options)
    return str(refused.value)


def test_what_it_cannot_do_is_refused(on_ranks) -> None:
    assert "find_unused_parameters" in _on_both(on_ranks, {}, find_unused_parameters=True)
    assert "fusion_mb" in _on_both(on_ranks, {"fusion_mb": 1.0})


def _on_both(on_ranks, options: dict, **ddp_options: bool) -> str:
    first, second = on_ranks(functools.partial(_refused, **ddp_options), 2, options)
    assert first == second
    return first


@pytest.mark.parametrize("options", [{"fraction": -0.1}, {"fraction": 1.5}, {"fraction": 0.5, "every": 0}])
def test_wrong_numbers_are_refused(options) -> None:
    with pytest.raises(ValueError, match=r"OSP: (fraction|every) must be"):
        OSP(**options)
