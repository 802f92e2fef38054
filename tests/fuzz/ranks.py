"""What runs on each rank: all arms of a program, one after another, and what differs between them."""

from __future__ import annotations

import gc
import json
import os
import traceback
import warnings
from typing import Any, NamedTuple

import torch

from .laws import difference, digest, is_finite, law_of, reference_of
from .program import Choices, Program
from .training import Run


class Verdict(NamedTuple):
    """How one arm ended on one rank.

    Attributes:
        kind: `exact`, `differs`, `plain fails`, or `raises`.
        detail: what differs, or the error.
        digest: of parameters and optimizer state; empty if it raised, or plain DDP's ranks need not agree.
        finite: whether parameters are finite, or those of plain DDP are not, either.
        fallbacks: why steps took a slower path, of all models that are attached in the end.
        deferred: of how many steps the update of the main model was deferred.
    """

    kind: str
    detail: str = ""
    digest: str = ""
    finite: bool = True
    plain_digest: str = ""
    fallbacks: tuple[str, ...] = ()
    deferred: int = 0


class _Arm(NamedTuple):
    seen: list[Any]
    final: dict[str, Any]
    error: str
    stats: tuple[Any, ...] = ()


def judge(text: str) -> list[Verdict]:
    """Run a program on this rank: one verdict for each of its arms."""
    program = Program.from_json(text)
    warnings.simplefilter("ignore")
    os.environ.setdefault("LOCAL_WORLD_SIZE", "1")  # for groups="node": each rank a node of its own
    plain: dict[str, _Arm] = {}
    verdicts = []
    for arm in program.arms:
        reference = reference_of(program.script, arm)
        key = json.dumps(reference, sort_keys=True)
        if key not in plain:
            plain[key] = _train(program, None, reference)
        verdicts.append(_compare(program, arm, plain[key]))
    return verdicts


def _compare(program: Program, arm: Choices, expected: _Arm) -> Verdict:
    if expected.error:
        return Verdict("plain fails", expected.error)
    seen = _train(program, arm, {})
    if seen.error:
        return Verdict("raises", seen.error)
    law = law_of(program.script, arm)
    found = difference(seen.seen, expected.seen, law) or difference(seen.final, expected.final, law)
    finite = is_finite(seen.final) or not is_finite(expected.final)
    fallbacks = tuple(reason for stats in seen.stats for reason in stats.fallbacks)
    deferred = seen.stats[0].deferred_steps if seen.stats else 0
    kind = "differs" if found else "exact"
    return Verdict(kind, found, digest(seen.final), finite, digest(expected.final), fallbacks, deferred)


def _train(program: Program, arm: Choices | None, reference: Choices) -> _Arm:
    run = None
    try:
        run = Run(program, arm, reference)
        seen = run.train()
        final = run.final()
        stats = tuple(part.state.stats() for part in run.parts if part.state is not None)
        if not program.script.get("dropped"):
            run.detach()
        return _Arm(seen, final, "", stats)
    except Exception:
        return _Arm([], {}, traceback.format_exc())
    finally:
        torch.set_grad_enabled(True)
        if run is not None:
            run.close()
        del run
        if program.script.get("dropped"):
            gc.collect()
