"""Hooks on a model take the lease and give it back, and change nothing else."""

from __future__ import annotations

import copy
import io
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddp_crossover.addons.lease.client import GpuLease
from lease_processes import LeaseProcesses, eventually

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(1))


class Probe(nn.Module):
    """A layer that notes whether the lease is held when it runs forward and backward."""

    def __init__(self, lease: GpuLease, seen: list[bool], pause_s: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.look = lambda: seen.append(lease.holding)
        self.pause_s = pause_s

    def forward(self, x: Tensor) -> Tensor:
        self.look()
        time.sleep(self.pause_s)
        y = self.linear(x)
        if y.requires_grad:
            y.register_hook(lambda _: self.look())
        return y


@pytest.fixture
def seen() -> list[bool]:
    return []


@pytest.fixture
def model(lease: GpuLease, seen: list[bool]) -> nn.Module:
    return nn.Sequential(Probe(lease, seen), nn.ReLU(inplace=True), Probe(lease, seen), nn.Tanh())


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


# ---- when it is held


def test_it_is_held_from_forward_to_the_end_of_backward(lease: GpuLease, model: nn.Module, seen: list[bool]) -> None:
    lease.instrument(model)
    for _ in range(2):
        loss = model(X).sum()
        assert lease.holding
        loss.backward()
        assert not lease.holding
    assert seen == [True] * 8


def test_with_an_optimizer_it_is_held_to_the_end_of_its_step(lease: GpuLease, model: nn.Module) -> None:
    optimizer = sgd(model)
    lease.instrument(model, optimizer)
    for _ in range(2):
        model(X).sum().backward()
        assert lease.holding
        optimizer.step()
        assert not lease.holding
    assert lease.stats().grants == 2


def test_without_gradients_it_is_held_for_the_forward(lease: GpuLease, model: nn.Module, seen: list[bool]) -> None:
    lease.instrument(model)
    with torch.inference_mode():
        model(X)
    assert not lease.holding
    model.eval()
    loss = model(X).sum()
    assert not lease.holding
    loss.backward()
    assert not lease.holding
    assert seen == [True] * 6


def test_while_gradients_are_accumulated_it_is_given_up_before_each_batch(lease: GpuLease, model: nn.Module) -> None:
    optimizer = sgd(model)
    lease.instrument(model, optimizer)
    held_after_backward = []
    for batch in range(12):
        model(X).sum().backward()
        held_after_backward.append(lease.holding)
        if batch % 3 == 2:
            optimizer.step()
            assert not lease.holding
    # The first cycle shows how many there are.
    assert held_after_backward == [True, False, False] + 3 * [False, False, True]


def test_forwards_that_no_backward_follows_are_noticed(lease: GpuLease, model: nn.Module) -> None:
    lease.instrument(model)
    held = []
    for _ in range(4):
        model(X)
        held.append(lease.holding)
    assert held == [True, False, False, False]


def test_a_forward_that_raises_gives_it_up(lease: GpuLease) -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert lease.holding
            raise MemoryError("CUDA out of memory")

    model = nn.Sequential(nn.Linear(4, 4), Broken())
    lease.instrument(model)
    with pytest.raises(MemoryError):
        model(X)
    assert not lease.holding


def test_a_backward_that_raises_does_not_keep_it_for_longer_than_to_the_next(lease: GpuLease, model: nn.Module) -> None:
    lease.instrument(model)
    out = model(X)
    out.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        out.sum().backward()
    with torch.no_grad():
        model(X)
    assert not lease.holding
    model(X).sum().backward()
    assert not lease.holding


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_does_not_end_it_early(lease: GpuLease, seen: list[bool], reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Probe(lease, seen) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            return x

    model = Checkpointed()
    lease.instrument(model)
    x = X.clone().requires_grad_()
    for _ in range(2):
        model(x).sum().backward()
        assert not lease.holding
    assert len(seen) >= 2 * 9 and all(seen)
    assert lease.stats().grants == 2

    # The whole of it, from outside.
    seen.clear()
    checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    assert all(seen)
    assert not lease.holding


def test_a_copy_of_the_model_takes_part_until_the_hooks_are_removed(
    lease: GpuLease, model: nn.Module, seen: list[bool]
) -> None:
    with lease.instrument(model) as instrument:
        average = torch.optim.swa_utils.AveragedModel(model)
        with torch.no_grad():
            average(X)
        assert seen == [True, True]
        with pytest.raises(TypeError, match="remove"):
            torch.save(model, io.BytesIO())
        model(X)
        assert lease.holding
    assert not lease.holding
    instrument.remove()
    average(X)
    model(X).sum().backward()
    assert seen[4:] == [False] * 6
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_what_cannot_be_instrumented_is_refused(lease: GpuLease) -> None:
    compiled = nn.Linear(4, 4)
    compiled.compile()
    with pytest.raises(ValueError, match=r"torch.compile\(model\)"):
        lease.instrument(compiled)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="while DDP communicates"):
            lease.instrument(nn.parallel.DistributedDataParallel(nn.Linear(4, 4)))
    finally:
        dist.destroy_process_group()
    for name in ("quantum_ms", "run_ahead_ms"):
        with pytest.raises(ValueError, match=name):
            lease.instrument(nn.Linear(4, 4), **{name: 0.0})


# ---- others


def test_a_filler_yields_in_the_middle_of_a_forward_and_goes_on_when_the_peer_is_done(
    processes: LeaseProcesses, make_lease: Callable[..., GpuLease], seen: list[bool]
) -> None:
    processes.broker()
    lease = make_lease(role="filler")
    layers = [Probe(lease, seen, pause_s=0.02) for _ in range(10)]
    model = nn.Sequential(*layers)
    lease.instrument(model, quantum_ms=1e6)
    main = processes.actor("main")
    main.start("hold_for", 0.05)
    eventually(lambda: main.has_answered() or lease.contended)  # connected and about to ask
    assert main.result()["leased"]
    layers[4].register_forward_pre_hook(lambda *_: main.start("hold_for", 0.05))
    model(X)
    ended = time.monotonic()
    hold = main.result()
    assert hold["leased"] and hold["end"] < ended
    assert lease.stats().grants == 2
    assert seen == [True] * 10


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_peer_yields_to_a_peer_once_it_has_held_for_its_quantum(
    processes: LeaseProcesses, lease: GpuLease, seen: list[bool], phase: str
) -> None:
    class SlowBackward(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            y.register_hook(lambda _: time.sleep(0.02))
            return y

    def layer() -> nn.Module:
        return Probe(lease, seen, 0.02) if phase == "forward" else SlowBackward()

    model = nn.Sequential(*(layer() for _ in range(10)))
    lease.instrument(model, quantum_ms=50.0)
    other = processes.actor("other")
    started = time.monotonic()  # a forward that expects a backward begins the turn
    loss = model(X).sum() if phase == "backward" else None
    lease.acquire()
    other.start("hold_for", 0.0)
    eventually(lambda: lease.pressed)
    if loss is None:
        loss = model(X).sum()
    loss.backward()
    ended = time.monotonic()
    hold = other.result()
    assert hold["leased"]
    assert started + 0.05 <= hold["start"] < ended - 0.02


def test_a_peer_does_not_yield_to_a_filler(processes: LeaseProcesses, lease: GpuLease, seen: list[bool]) -> None:
    model = nn.Sequential(*(Probe(lease, seen, 0.005) for _ in range(10)))
    lease.instrument(model, quantum_ms=0.001)
    filler = processes.actor("filler", role="filler")
    lease.acquire()
    fence = lease.fence
    filler.start("hold_for", 0.0)
    eventually(lambda: lease.contended)
    assert not lease.pressed
    loss = model(X).sum()
    assert lease.fence == fence
    assert not filler.has_answered()
    loss.backward()
    assert filler.result()["leased"]


def test_a_job_whose_broker_dies_trains_on(processes: LeaseProcesses, make_lease: Callable[..., GpuLease]) -> None:
    broker = processes.broker()
    lease = make_lease()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def end_broker(*_: object) -> None:
        broker.kill()
        broker.wait()

    with lease.instrument(model):
        model[0].register_forward_hook(end_broker)
        for _ in range(3):
            model(X).sum().backward()
    assert not lease.holding


# ---- nothing else changes


def _plain() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.LayerNorm(8), nn.Linear(8, 4))


class _InPlace(nn.Module):
    """Everything in place, also what a submodule has returned."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x += 1
        x = self.second(x.tanh_())
        return x.mul_(2)


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"out": self.last(checkpoint(self.frozen, self.first(x), use_reentrant=True))}


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def _train(model: nn.Module) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        out = model(X.unsqueeze(0))
        out = out["out"] if isinstance(out, dict) else out
        out.mul_(3)
        out.square().sum().backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        out = model(X.unsqueeze(0))
    out = out["out"] if isinstance(out, dict) else out
    return [out, *(p.detach() for p in model.parameters())]


@pytest.mark.parametrize("make", [_plain, _InPlace, _Tied, _encoder])
def test_numbers_are_those_of_a_job_without_it(
    processes: LeaseProcesses, lease: GpuLease, make: Callable[[], nn.Module]
) -> None:
    torch.manual_seed(0)
    model = make()
    expected = _train(copy.deepcopy(model))
    other = processes.actor("other")
    other.start("take_turns", 0.5, 0.0, 0.0)
    with lease.instrument(model, quantum_ms=1e-3):
        actual = _train(model)
    assert lease.stats().grants > 0
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))
    other.result()


def test_encoder_layers_keep_their_fast_path(lease: GpuLease) -> None:
    model = _encoder().eval()

    def operations() -> set[str]:
        with torch.autograd.profiler.profile() as profile, torch.inference_mode():
            model(X.unsqueeze(0))
        return {event.name for event in profile.function_events}

    before = operations()
    assert "aten::_transformer_encoder_layer_fwd" in before
    with lease.instrument(model):
        assert operations() == before


def test_compiled_models_are_held_from_outside_and_compiled_once(lease: GpuLease, seen: list[bool]) -> None:
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    torch.manual_seed(0)
    model = _plain()
    expected = _train(copy.deepcopy(model))
    # Hooks inside and outside of what is compiled, before and after.
    inner = lease.instrument(model)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with inner, lease.instrument(compiled) as outer:
        actual = _train(compiled)
        loss = compiled(X).sum()
        assert not lease.holding  # in eval mode
        outer.remove()
        loss.backward()
    assert lease.stats().grants >= 3
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))
    assert len(graphs) <= 4  # training, without gradients, another shape: no graph was broken


def test_a_compiled_block_inside_of_a_model_stays_one_graph(lease: GpuLease, seen: list[bool]) -> None:
    graphs: list[Any] = []
    block = _InPlace()  # torch 2.11 does not compile a Sequential
    block.compile(backend=lambda graph, _: graphs.append(graph) or graph, fullgraph=True)
    model = nn.Sequential(Probe(lease, seen), block)
    lease.instrument(model)
    for _ in range(2):
        model(X).sum().backward()
        assert not lease.holding
    assert len(graphs) == 1
    assert seen == [True] * 4
