"""Measures one case in one process: starts all arms, lets them take turns, hands over figures after each round."""

import gc
import itertools
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from bench_kit.device_time import between_s, now, synchronize
from bench_kit.rounds import best_ddp, turns
from bench_kit.training import ArmRefused
from ddp_crossover.report.trace import Trace
from gpu_bench_parts.arms import GpuArm
from gpu_bench_parts.cpu_wire import CpuWire
from gpu_bench_parts.emulation import emulated_wire
from gpu_bench_parts.settings import AUTO, DEAR_NO_WIRE, NOOP, USUAL_FUSION_MB, ArmSettings, CaseSettings
from gpu_bench_parts.summary import headline, summarize
from gpu_bench_parts.wire import GBIT, GpuWire
from gpu_bench_parts.workloads import make_workload


def measure(device: torch.device, settings: CaseSettings) -> Iterator[dict[str, Any]]:
    """The check of one case: yields what it knows so far, as `summary.summarize` puts it."""
    torch.set_flush_denormal(True)  # gradients of a network that has learned its one batch would slow a CPU down
    torch.backends.cudnn.benchmark = True
    with emulated_wire(settings.ranks, device) as wire:
        bench = GpuBench(settings, device, wire)
        for measured in bench.run():
            case = summarize(settings, measured)
            yield case | {"noticed": headline(case)}
        bench.close()


class GpuBench:
    """All arms of one case.

    Args:
        settings: the case.
        device: the device.
        wire: what gradients travel over.
    """

    def __init__(self, settings: CaseSettings, device: torch.device, wire: GpuWire | CpuWire) -> None:
        self._settings, self._device, self._wire = settings, device, wire
        self._start_s = time.monotonic()
        self._workload = make_workload(settings, device)
        self._arms: dict[str, GpuArm] = {}
        sizes = [(parameter.numel(), parameter.nbytes) for parameter in self._workload.build().parameters()]
        self._flat = torch.zeros(sum(size for size, _ in sizes), device=device)
        self._measured: dict[str, Any] = {
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU: a rehearsal",
            "parameters": self._flat.numel(),
            "tensors": len(sizes),
            "gradient_bytes": sum(size for _, size in sizes),
            "flat_s": [],
            "cycles_per_s": [],
            "rounds_s": {},
            "host_s": {},
            "memory_bytes": {},
            "warm_up_steps": {},
            "refused": {},
            "facts": {},
            "traced_exposed_s": {},
        }

    def run(self) -> Iterator[dict[str, Any]]:
        for arm in self._settings.arms():
            self._start(arm)
            yield self._measured
        # All objects of now stay alive: the garbage collector need not look through them during a turn.
        gc.collect()
        gc.freeze()
        yield from self._rounds()
        self._trace()
        yield self._measured

    def close(self) -> None:
        gc.unfreeze()
        for arm in self._arms.values():
            arm.close()

    def _start(self, settings: ArmSettings) -> None:
        name, is_cuda = settings.name, self._device.type == "cuda"
        if is_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)
            before_bytes = torch.cuda.memory_allocated(self._device)
        try:
            arm = GpuArm(settings, self._settings, self._workload, self._wire, self._device, self._fusion_mb(name))
            self._measured["warm_up_steps"][name] = arm.warm_up(self._settings.warm_up_limit)
        except (ArmRefused, torch.OutOfMemoryError) as error:
            if name == NOOP:
                raise
            self._measured["refused"][name] = str(error).splitlines()[0]
            return
        synchronize(self._device)
        if is_cuda:
            # The other arms only keep what they own, which is not counted.
            self._measured["memory_bytes"][name] = torch.cuda.max_memory_allocated(self._device) - before_bytes
        self._measured["facts"][name] = arm.facts()
        self._measured["rounds_s"][name] = []
        self._measured["host_s"][name] = arm.host_s
        self._arms[name] = arm

    def _fusion_mb(self, name: str) -> float | None:
        if name != DEAR_NO_WIRE:
            return None
        auto = self._arms.get(AUTO)
        return (auto.fusion_mb if auto is not None else None) or USUAL_FUSION_MB

    def _rounds(self) -> Iterator[dict[str, Any]]:
        names = list(self._arms)
        longest_s = 0.0
        for _, turns_of_round in itertools.groupby(
            turns(len(names), self._settings.rounds), key=lambda turn: turn.round
        ):
            begin_s = time.monotonic()
            if begin_s - self._start_s + longest_s > self._settings.limit_s:
                return
            self._measure_wire()
            for turn in turns_of_round:
                name = names[turn.index]
                self._measured["rounds_s"][name].append(self._arms[name].turn_s(self._settings.steps))
            longest_s = max(longest_s, time.monotonic() - begin_s)
            yield self._measured

    def _measure_wire(self) -> None:
        """How long one all-reduce of all gradients takes, with nothing else to do; calibrates the sleeps first."""
        if isinstance(self._wire, GpuWire):
            self._wire.sleeper.calibrate()
            self._measured["cycles_per_s"].append(self._wire.sleeper.cycles_per_s)
        self._wire.bytes_per_s = self._settings.gbit_per_s * GBIT
        self._wire.latency_s = self._settings.latency_s
        synchronize(self._device)
        begin = now(self._device)
        self._wire.all_reduce(self._flat)
        self._measured["flat_s"].append(between_s(begin, now(self._device)))

    def _trace(self) -> None:
        """Trace DDP at its best, and our arm; draw both if a picture is wanted."""
        best = best_ddp({name: times for name, times in self._measured["rounds_s"].items() if times})
        if best is None or AUTO not in self._arms:
            return
        traces = [trace for name in (best, AUTO) if (trace := self._arms[name].trace()) is not None]
        for trace in traces:
            # Not of plain DDP on a GPU: it waits inside of what counts as its backward, so nothing seems exposed.
            if self._device.type == "cpu" or self._arms[trace.title].timer is None:
                exposed_s = [step.exposed_s for step in trace.steps()]
                self._measured["traced_exposed_s"][trace.title] = statistics.median(exposed_s)
        if self._settings.timeline:
            self._measured["timeline"] = _draw(traces, Path(self._settings.timeline))


def _draw(traces: list[Trace], picture: Path) -> str:
    """The traces as files for Perfetto, and as a picture; says where, or what kept it from being drawn."""
    from ddp_crossover.report.timeline import draw

    picture.parent.mkdir(parents=True, exist_ok=True)
    for trace in traces:
        trace.save(picture.with_name(f"{picture.stem}-{trace.title}.json"))
    try:
        draw(traces, picture)
    except (ImportError, ValueError) as error:
        return f"not drawn: {error}"
    return str(picture)
