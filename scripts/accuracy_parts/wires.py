"""The wires that are compared: what `attach` is given for each of them, and the shares of the batch that ranks get.

Ways to share parameters now and then, instead of gradients in each step, are compared in the same way.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import ddp_crossover as dx
from ddp_crossover.addons.osp import OSPState

State = dx.DearState | dx.relaxed.RelaxedState | OSPState
DENSITY = 0.01
REFERENCE = "fp32"


@dataclass(frozen=True)
class Wire:
    """A way for gradients to travel.

    Attributes:
        name: as on the command line.
        label: as in the picture.
        options: makes the options of `attach` beside those that all wires share; None trains plain DDP.
        speeds: shares of the global batch that ranks get, in turn; empty: equal ones.
        has_feedback: whether what codes leave out is made up for later.
    """

    name: str
    label: str
    options: Callable[[], dict[str, Any]] | None
    speeds: tuple[int, ...] = ()
    has_feedback: bool = True

    @property
    def is_relaxed(self) -> bool:
        """Whether training is another than exact, but for what the wire rounds."""
        return self.name in _RELAXED


NODE_RANKS = 2
"""With `groups="node"`, so many ranks with consecutive numbers count as one node."""
_RELAXED: dict[str, tuple[str, Callable[[], Any]]] = {
    "local-8": ("local SGD, 8 steps", lambda: dx.relaxed.LocalSGD(every=8)),
    "local-32": ("local SGD, 32 steps", lambda: dx.relaxed.LocalSGD(every=32)),
    "local-8-late-1": ("local SGD, 8 steps, 1 late", lambda: dx.relaxed.LocalSGD(every=8, delay=1)),
    "local-8-late": ("local SGD, 8 steps, 4 late", lambda: dx.relaxed.LocalSGD(every=8, delay=4)),
    "local-8-int8": ("local SGD, 8 steps, int8", lambda: dx.relaxed.LocalSGD(every=8, wire_dtype=torch.int8)),
    "local-8-warm": ("local SGD, 8 steps, 40 exact first", lambda: dx.relaxed.LocalSGD(every=8, warmup=40)),
    "local-8-node": ("local SGD between nodes, 8 steps", lambda: dx.relaxed.LocalSGD(every=8, groups="node")),
    "local-4-pairs": ("local SGD in pairs, 4 steps", lambda: dx.relaxed.LocalSGD(every=4, groups="pairs")),
    "daso-8-late": ("DASO's merge, 8 steps, 4 late", lambda: dx.relaxed.LocalSGD(every=8, delay=4, merge="daso")),
    "adasum-1": ("Adasum, each step", lambda: dx.relaxed.LocalSGD(every=1, reduction="adasum")),
    "adasum-8": ("Adasum, 8 steps", lambda: dx.relaxed.LocalSGD(every=8, reduction="adasum")),
    "diloco-8": ("DiLoCo, 8 steps", lambda: dx.relaxed.DiLoCo(every=8)),
    "selsync": ("local SGD when gradients change", lambda: dx.relaxed.SelSync(threshold=0.05)),
    "osp-50": ("half of the gradients late", lambda: dx.relaxed.OSP(fraction=0.5)),
    "osp-100": ("all gradients late", lambda: dx.relaxed.OSP(fraction=1.0)),
    "diloco-32": ("DiLoCo, 32 steps", lambda: dx.relaxed.DiLoCo(every=32)),
}


def _synced(make_policy: Callable[[], Any]) -> Callable[[], dict[str, Any]]:
    return lambda: {"sync": make_policy()}


# Options are made on the ranks: a version of the package that lacks one of them fails at that wire only.
WIRES = {
    wire.name: wire
    for wire in (
        Wire("ddp", "plain DDP", None),
        Wire(REFERENCE, "fp32", dict),
        Wire("bf16", "bf16", lambda: {"wire_dtype": torch.bfloat16}),
        Wire("int8", "int8", lambda: {"wire_dtype": torch.int8}),
        Wire("topk", "top-k 1%", lambda: {"compress": dx.TopK(density=DENSITY)}),
        Wire("topk+int8", "top-k 1% + int8", lambda: {"compress": dx.TopK(density=DENSITY), "wire_dtype": torch.int8}),
        Wire(
            "topk-noef",
            "top-k 1%, no error feedback",
            lambda: {"compress": dx.TopK(density=DENSITY)},
            has_feedback=False,
        ),
        Wire("unequal", "shares of 3 to 1", lambda: {"weighted": True}, speeds=(3, 1)),
        Wire("int8-noef", "int8, no error feedback", lambda: {"wire_dtype": torch.int8}, has_feedback=False),
        *(Wire(name, label, _synced(make)) for name, (label, make) in _RELAXED.items()),
    )
}
# Plain DDP has the bits of fp32 on two ranks, so it would add nothing; the others are another question.
DEFAULT_WIRES = [name for name in WIRES if name not in ("ddp", "unequal", *_RELAXED)]
