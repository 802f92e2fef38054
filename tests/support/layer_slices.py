"""Training with an optimizer that takes norms over layers: on whole layers, and on slices that several ranks hold.

The ranks are threads that meet once in each step, where their sums are added up in rank order. Gradients are drawn from
a seed, and some layers have none in some steps.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from comparison import snapshot
from equivalence import SEED, assert_same

STEPS = 7
TIMEOUT_S = 20.0
# Odd ones: larger and smaller than a vector register, without dimensions, without elements.
SHAPES = [(17, 13), (13,), (5, 3, 3, 2), (), (1,), (0, 3), (301, 101), (3,)]
# Layers of these indices are in the second param group.
SECOND_GROUP = (1, 3, 7)

Make = Callable[[list[dict[str, Any]]], Optimizer]


class Piece(NamedTuple):
    """A slice of a flattened layer."""

    layer: int
    begin: int
    end: int


def layers(dtypes: Sequence[torch.dtype] = (torch.float32,)) -> list[nn.Parameter]:
    """The layers before training; their dtypes take turns. One is not in the order of its indices in memory."""
    generator = torch.Generator().manual_seed(SEED)
    made = [torch.randn(shape, generator=generator).to(dtypes[i % len(dtypes)]) for i, shape in enumerate(SHAPES)]
    made[2] = made[2].contiguous(memory_format=torch.channels_last)
    return [nn.Parameter(each) for each in made]


def gradients(parameters: list[nn.Parameter], step: int) -> list[Tensor | None]:
    """Gradients for all layers; in every other step in the parameters' order in memory, as autograd has them."""
    generator = torch.Generator().manual_seed(1000 + step)
    drawn = [torch.randn(p.shape, generator=generator).to(p.dtype) * 0.3 for p in parameters]
    if step % 2 == 0:
        drawn = [
            torch.empty_like(p, requires_grad=False).copy_(each) for p, each in zip(parameters, drawn, strict=True)
        ]
    return [None if (step + index) % 5 == 0 else each for index, each in enumerate(drawn)]


def groups(parameters: Sequence[tuple[int, Tensor]]) -> list[dict[str, Any]]:
    """Two param groups, of numbered layers or slices of them."""
    return [
        {"params": [p for layer, p in parameters if layer not in SECOND_GROUP]},
        {"params": [p for layer, p in parameters if layer in SECOND_GROUP]},
    ]


def train_whole(make: Make, dtypes: Sequence[torch.dtype] = (torch.float32,)) -> dict[str, list[Any]]:
    """Train on whole layers; returns the layers and their states."""
    parameters = layers(dtypes)
    optimizer = make(groups(list(enumerate(parameters))))
    for step in range(STEPS):
        for parameter, gradient in zip(parameters, gradients(parameters, step), strict=True):
            parameter.grad = gradient
        optimizer.step()
    return _seen(parameters, optimizer)


def train_on_slices(
    make: Make, ranks: int, seed: int, dtypes: Sequence[torch.dtype] = (torch.float32,)
) -> dict[str, list[Any]]:
    """Train on slices that are cut and dealt out at random; returns the layers and their states, put together."""
    whole = layers(dtypes)
    dealt = _deal(whole, ranks, random.Random(seed))
    exchange = _Exchange(ranks, len(whole))
    own = [[nn.Parameter(_cut(whole[piece.layer], piece)) for piece in pieces] for pieces in dealt]
    optimizers = [
        make(groups([(piece.layer, p) for piece, p in zip(pieces, own[rank], strict=True)]))
        for rank, pieces in enumerate(dealt)
    ]

    def train(rank: int) -> None:
        layer_of = {p: piece.layer for piece, p in zip(dealt[rank], own[rank], strict=True)}
        vars(optimizers[rank])["layer_sums"] = exchange.of(rank, layer_of)
        for step in range(STEPS):
            drawn = gradients(whole, step)
            for piece, parameter in zip(dealt[rank], own[rank], strict=True):
                gradient = drawn[piece.layer]
                parameter.grad = None if gradient is None else _cut(gradient, piece)
            optimizers[rank].step()

    exchange.run(train)
    assert exchange.calls == [STEPS] * ranks
    states: list[dict[str, Any]] = [{} for _ in whole]
    with torch.no_grad():
        for rank, pieces in enumerate(dealt):
            for piece, parameter in zip(pieces, own[rank], strict=True):
                _paste(whole[piece.layer], piece, parameter)
                for name, value in optimizers[rank].state.get(parameter, {}).items():
                    if value.shape == parameter.shape:
                        value = _paste(
                            states[piece.layer].setdefault(name, torch.zeros_like(whole[piece.layer])), piece, value
                        )
                    states[piece.layer].setdefault(name, value)
    return {"layers": snapshot(whole), "states": states}


def _seen(parameters: list[nn.Parameter], optimizer: Optimizer) -> dict[str, list[Any]]:
    states = [snapshot(optimizer.state.get(parameter, {})) for parameter in parameters]
    return {"layers": snapshot(parameters), "states": states}


class _Exchange:
    """Adds up the sums of all ranks, in rank order."""

    def __init__(self, ranks: int, layers: int) -> None:
        self.calls = [0] * ranks
        self._given = [torch.zeros(layers, 2, dtype=torch.float64) for _ in range(ranks)]
        self._meeting = threading.Barrier(ranks, timeout=TIMEOUT_S)
        self._errors: list[BaseException] = []

    def of(self, rank: int, layer_of: Mapping[Any, int]) -> Callable[[list[Tensor], Tensor], Tensor]:
        """What replaces `layer_sums` on this rank."""

        def layer_sums(parameters: list[Tensor], sums: Tensor) -> Tensor:
            assert sums.shape == (len(parameters), 2) and sums.dtype is torch.float64 and sums.is_contiguous()
            self.calls[rank] += 1
            rows = torch.tensor([layer_of[parameter] for parameter in parameters], dtype=torch.int64)
            self._given[rank].zero_().index_add_(0, rows, sums)
            self._meeting.wait()
            total = torch.zeros_like(self._given[0])
            for given in self._given:
                total += given
            self._meeting.wait()
            return total[rows]

        return layer_sums

    def run(self, train: Callable[[int], None]) -> None:
        """Run all ranks; the first error ends all."""

        def rank_main(rank: int) -> None:
            try:
                train(rank)
            except BaseException as error:
                self._errors.append(error)
                self._meeting.abort()

        threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(len(self.calls))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
        if self._errors:
            raise self._errors[0]


def _deal(whole: list[nn.Parameter], ranks: int, chance: random.Random) -> list[list[Piece]]:
    """Cut each layer at up to 5 places, which may coincide, and deal the pieces out; from 3 ranks on one gets none."""
    dealt: list[list[Piece]] = [[] for _ in range(ranks)]
    holders = ranks if ranks < 3 else ranks - 1
    for layer, parameter in enumerate(whole):
        numel = parameter.numel()
        cuts = [0, *sorted(chance.randint(0, numel) for _ in range(chance.randint(0, 5))), numel]
        for begin, end in pairwise(cuts):
            dealt[chance.randrange(holders)].append(Piece(layer, begin, end))
    for pieces in dealt:
        chance.shuffle(pieces)
    return dealt


def _cut(tensor: Tensor, piece: Piece) -> Tensor:
    return tensor.detach().flatten()[piece.begin : piece.end].clone()


def _paste(tensor: Tensor, piece: Piece, value: Tensor) -> Tensor:
    flat = tensor.flatten()
    flat[piece.begin : piece.end] = value
    return tensor.copy_(flat.view(tensor.shape))


def assert_slices_train_as_whole_layers(make: Make, ranks: int, dtypes: Sequence[torch.dtype]) -> None:
    """Parameters and states, bit for bit, however the layers are cut."""
    expected = train_whole(make, dtypes)
    for seed in range(3):
        assert_same(train_on_slices(make, ranks, seed, dtypes), expected, f"cut with seed {seed}")


def assert_resumes_exactly(make: Make) -> None:
    """A state dict that is saved and loaded in mid-run changes no bit."""
    expected = train_whole(make)
    parameters = layers()
    optimizer = make(groups(list(enumerate(parameters))))
    for step in range(STEPS):
        if step == 3:
            saved = snapshot(optimizer.state_dict())
            parameters = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
            optimizer = make(groups(list(enumerate(parameters))))
            optimizer.load_state_dict(saved)
        for parameter, gradient in zip(parameters, gradients(parameters, step), strict=True):
            parameter.grad = gradient
        optimizer.step()
    assert_same(_seen(parameters, optimizer), expected, "at the end")


def calls_of_layer_sums(make: Make) -> list[int]:
    """How many parameters each call has had, in five steps of different kinds."""
    calls: list[int] = []

    def layer_sums(parameters: list[Tensor], sums: Tensor) -> Tensor:
        assert sums.shape == (len(parameters), 2) and sums.dtype is torch.float64
        calls.append(len(parameters))
        return sums

    parameters = layers([torch.float32, torch.bfloat16])
    optimizer = make(groups(list(enumerate(parameters))))
    vars(optimizer)["layer_sums"] = layer_sums
    optimizer.step()  # no gradient at all
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    parameters[4].grad = None
    optimizer.step(lambda: 0.0)
    optimizer.param_groups[1]["adapt"] = False
    optimizer.step()
    for group in optimizer.param_groups:
        group["params"] = []
    optimizer.step()
    return calls


def assert_nothing_waits_for_the_device(make: Make) -> None:
    """On the device "meta" tensors have no values, so that reading one fails, as does a branch on one."""
    parameters = [nn.Parameter(torch.empty(shape, device="meta")) for shape in SHAPES]
    optimizer = make(groups(list(enumerate(parameters))))
    for lr in (0.1, torch.empty((), device="meta")):
        for group in optimizer.param_groups:
            group["lr"] = lr
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        optimizer.step()
        optimizer.step()
