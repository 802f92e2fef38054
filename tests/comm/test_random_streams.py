"""Random programs on several streams and threads: whatever is ordered with plain DDP is ordered with the package.

A program says on which stream, and in which of two threads, each layer is used and each gradient read. The script does
what CUDA asks of it with plain DDP, and no more: streams fork behind what they read, and are joined afterwards. Only
the host keeps the threads in order. The virtual GPU (`fake_streams`) reports each access that no stream orders.
"""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ddp_crossover as dx
from ddp_crossover.comm.stream_order import StreamOrder
from ddp_crossover.pending.reduced_gradients import ReducedGradients
from fake_streams import FakeStream, Gpu, fake_gpu

STREAMS, THREADS, LAYERS, WIDTH = 3, 2, 3, 6
WARM_STEPS, STEPS = 4, 3


# What is taken out, one at a time: then some program must show it.
CONTROLS = {
    "all_waits": (StreamOrder, "_order", lambda *args: None),
    "waits_of_switches": (StreamOrder, "switched_to", lambda *args: None),
    "waits_of_other_threads": (StreamOrder, "publish", StreamOrder.mark),
    "marks": (StreamOrder, "mark", lambda *args: None),
}


@dataclass(frozen=True)
class Use:
    """A layer, or the gradient of its weight, and where it is used."""

    layer: int
    stream: int
    thread: int


@dataclass(frozen=True)
class Step:
    uses: tuple[Use, ...]
    reads: tuple[Use, ...]
    clips: str
    steps_on: int


@dataclass(frozen=True)
class Program:
    steps: tuple[Step, ...]
    momentum: float
    bucket_view: bool
    fusion_mb: float
    schedule: str
    home: int  # the stream that the other thread is on when nothing else is said


def draw(seed: int) -> Program:
    rng = random.Random(seed)
    streams, threads = rng.randint(1, STREAMS), rng.randint(1, THREADS)
    home = rng.randrange(streams)

    def use() -> Use:
        thread = rng.randrange(threads)
        return Use(rng.randrange(LAYERS), rng.choice((rng.randrange(streams), thread * home)), thread)

    # Who reads gradients before step() has nothing deferred: only some programs do.
    most_reads, clippings = rng.choice((0, 0, 4)), rng.choice((("",), ("",), ("", "stock"), ("own",)))

    def step() -> Step:
        reads = tuple(use() for _ in range(rng.randint(0, most_reads)))
        clips = rng.choice(clippings)
        return Step(tuple(use() for _ in range(rng.randint(1, 8))), reads, clips, rng.randrange(streams))

    return Program(
        tuple(step() for _ in range(STEPS)),
        rng.choice((0.0, 0.9)),
        rng.choice((False, True)),
        rng.choice((1e-4, 1.0)),
        rng.choice(("auto", "dear")),
        home,
    )


class Places:
    """The streams and the threads of one program."""

    def __init__(self, gpu: Gpu, home: int) -> None:
        self._gpu = gpu
        self._streams = [gpu.main, *(FakeStream() for _ in range(STREAMS - 1))]
        self._other = ThreadPoolExecutor(1)
        if home:  # a thread that is on the default stream has never switched
            self._other.submit(gpu.streams.switch, self._streams[home]).result()

    def fork(self) -> None:
        for stream in self._streams[1:]:
            stream.wait_stream(self._gpu.main)

    def join(self) -> None:
        for stream in self._streams[1:]:
            self._gpu.main.wait_stream(stream)

    def on(self, stream: int) -> Any:
        wanted = self._streams[stream]
        return nullcontext() if self._gpu.current is wanted else self._gpu.stream(wanted)

    def run(self, use: Use, job: Any) -> Any:
        def placed() -> Any:
            with nullcontext() if not use.thread else self._gpu, self.on(use.stream):
                return job()

        return self._other.submit(placed).result() if use.thread else placed()

    def close(self) -> None:
        self._other.shutdown()


class Layers(nn.Module):
    def __init__(self, places: Places) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self._places = places
        self.uses: tuple[Use, ...] = tuple(Use(layer, 0, 0) for layer in range(LAYERS))

    def plan(self, uses: tuple[Use, ...]) -> None:
        self.uses = uses

    def forward(self, x: Tensor) -> Tensor:
        self._places.fork()
        outs = [self._places.run(use, lambda use=use: self.layers[use.layer](x)) for use in self.uses]
        self._places.join()
        for layer in self.layers:  # DDP wants each parameter used
            outs.append(layer(x) * 0.0)
        return torch.stack(outs).sum(0)


def _train(gpu: Gpu, program: Program) -> None:
    places = Places(gpu, program.home)
    model = Layers(places)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=program.bucket_view)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=program.momentum)
    state = dx.attach(ddp, optimizer, fusion_mb=program.fusion_mb, schedule=program.schedule)
    for parameter in ddp.parameters():
        gpu.watch(parameter)
    for index in range(WARM_STEPS + len(program.steps)):
        step = program.steps[index - WARM_STEPS] if index >= WARM_STEPS else Step(model.uses, (), "", 0)
        model.plan(step.uses)
        optimizer.zero_grad()
        ddp(torch.randn(2, WIDTH)).square().mean().backward()
        places.fork()
        for read in step.reads:
            places.run(read, lambda read=read: model.layers[read.layer].weight.grad.sum())
        places.join()
        if step.clips == "own":
            state.clip_grad_norm_(0.1)
        elif step.clips:
            nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)
        places.fork()
        with places.on(step.steps_on):
            optimizer.step()
        places.join()
    assert state.stats().deferred_steps > 0
    state.detach()
    places.close()


def races_of(seeds: range, without: str = "") -> dict[int, Any]:
    """The programs that had races, and what raced; none is expected."""
    found = {}
    copy_out = ReducedGradients._copy_out
    for seed in seeds:
        program = draw(seed)
        with ExitStack() as stack:
            owns = any(step.clips == "own" for step in program.steps)
            gpu = stack.enter_context(fake_gpu(gather_writes=not owns))

            def copy_watched(gradients: Any, slot: Any, memory: Tensor, gpu: Gpu = gpu) -> None:
                gpu.watch(memory)
                copy_out(gradients, slot, memory)

            stack.enter_context(mock.patch.object(ReducedGradients, "_copy_out", copy_watched))
            if without:
                stack.enter_context(mock.patch.object(*CONTROLS[without]))
            _train(gpu, program)
            if gpu.races:
                found[seed] = dict(gpu.races), asdict(program)
        assert threading.active_count() < 20
    return found


@pytest.mark.quick
def test_what_plain_ddp_orders_is_ordered(on_ranks) -> None:
    assert on_ranks(races_of, 1, range(60)) == [{}]


@pytest.mark.nightly
def test_what_plain_ddp_orders_is_ordered_in_two_thousand_programs(on_ranks) -> None:
    assert on_ranks(races_of, 1, range(1000, 3000), timeout=1500) == [{}]


@pytest.mark.parametrize("missing", CONTROLS)
def test_a_missing_order_is_noticed(on_ranks, missing) -> None:
    (found,) = on_ranks(races_of, 1, range(60), missing)
    assert found
