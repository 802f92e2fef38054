"""The gradients of a model, as the planner sees them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from ddp_crossover.comm.wire import Wire
from ddp_crossover.fusion import GradientSpec


class ShardKind(NamedTuple):
    """How the shards of a parameter differ from those of others, which then never share a fusion group with it.

    Attributes:
        label: the same for parameters that may share a group.
        is_whole: whether one rank has all of the parameter.
    """

    label: str
    is_whole: bool


def gradient_specs(
    named: Sequence[tuple[str, torch.nn.Parameter]], wire: Wire, kinds: Sequence[ShardKind] = ()
) -> list[GradientSpec]:
    """One entry per parameter.

    Args:
        named: names and parameters.
        wire: what gradients are on the wire.
        kinds: with a sharded optimizer, how the shards of each parameter differ from those of others.
    """
    specs = [_spec(name, parameter, wire) for name, parameter in named]
    if not kinds:
        return specs
    return [
        replace(spec, arena=f"{spec.arena}, {kind.label}", is_whole=kind.is_whole)
        for spec, kind in zip(specs, kinds, strict=True)
    ]


def as_codes(specs: Sequence[GradientSpec], wire: Wire) -> list[GradientSpec]:
    """The same gradients if all of them were coded; one-dimensional ones are not, but are few."""
    return [_coded(spec.name, spec.numel, spec.arena, wire) for spec in specs]


def _coded(name: str, numel: int, arena: str, wire: Wire) -> GradientSpec:
    scatter, gather = wire.leg_bytes()
    larger = max(scatter, gather)
    return GradientSpec(
        name,
        numel,
        larger,
        arena,
        is_coded=True,
        align_numel=wire.align_numel,
        scatter_part=scatter / larger,
        gather_part=gather / larger,
    )


def _spec(name: str, parameter: torch.nn.Parameter, wire: Wire) -> GradientSpec:
    where = f"on {parameter.device.type}"
    own = str(parameter.dtype).removeprefix("torch.")
    if wire.is_coded(parameter):
        return _coded(name, parameter.numel(), f"{own} coded {where}", wire)
    dtype = wire.travels_as(parameter.dtype)
    as_what = "" if dtype is parameter.dtype else f" as {str(dtype).removeprefix('torch.')}"
    return GradientSpec(name, parameter.numel(), dtype.itemsize, f"{own}{as_what} {where}")
