"""Training beside which something else looks at the model: another thread, a signal handler, a forked process.

Plain DDP trains as if nobody looked, and shows everybody the same. So must DeAR.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from comparison import snapshot
from equivalence import Case, Run, assert_same, run_arm
from models import INPUTS, OUTPUTS
from rank_process import dump, load

WIDTH = 24
LAYERS = 6
# About one layer: a dozen legs are under way between `step()` and the next forward.
GROUPS_MB = 0.002
# For whatever is bound to hang once a lock or a thread is missing.
CHILD_TIMEOUT_S = 60.0


class StackNet(nn.Sequential):
    """A few equal layers."""

    def __init__(self) -> None:
        layers: list[nn.Module] = [nn.Linear(INPUTS, WIDTH)]
        for _ in range(LAYERS):
            layers += [nn.Tanh(), nn.Linear(WIDTH, WIDTH)]
        super().__init__(*layers, nn.Tanh(), nn.Linear(WIDTH, OUTPUTS))


def stack_case(loop: Callable[[Run], Any] | None = None, view: bool = False, **options: Any) -> Case:
    """`StackNet` with settings that leave much pending between two steps."""
    if loop is not None:
        options["loop"] = loop
    return Case(
        model=StackNet,
        ddp={"gradient_as_bucket_view": view},
        dear={"fusion_mb": GROUPS_MB},
        **{"steps": 40, "strict": False, "pipelined": False} | options,
    )


def train_alone(case: Case) -> dict[str, Any]:
    """What plain DDP shows at the end, with nobody looking on."""
    _, state, _ = run_arm(case, with_dear=False)
    return state


def final_state(run: Run) -> dict[str, Any]:
    """All that can be read after the last step, before anything is detached."""
    state: dict[str, Any] = snapshot(run.visible_state())
    run.detach()
    return state


def assert_same_ends(seen: list[Mapping[str, Any]], expected: list[Mapping[str, Any]]) -> None:
    """Every rank ends where plain DDP does, bit for bit."""
    for rank, (one, other) in enumerate(zip(seen, expected, strict=True)):
        assert_same(one, other, f"rank {rank} at the end")


class Child:
    """A forked process that does `work` and hands the result over, or is killed after a while."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._end, theirs = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                data = dump(work())
                while data:
                    data = data[os.write(theirs, data) :]
            finally:
                os._exit(0)  # the rank's own frames are above: none of them may run twice
        os.close(theirs)

    def result(self) -> Any:
        """What `work` returned."""
        data, deadline = b"", time.monotonic() + CHILD_TIMEOUT_S
        try:
            while select.select([self._end], [], [], max(0.0, deadline - time.monotonic()))[0]:
                if not (read := os.read(self._end, 2**16)):
                    break
                data += read
            else:
                raise AssertionError(f"the forked child has not answered within {CHILD_TIMEOUT_S} s")
        finally:
            os.close(self._end)
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        assert data, "the forked child raised; see stderr"
        return load(data)


def evaluate(module: nn.Module) -> Tensor:
    """The output for an input that is always the same."""
    with torch.no_grad():
        return module(torch.linspace(-1, 1, 4 * INPUTS).reshape(4, INPUTS))
