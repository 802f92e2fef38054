"""One call of ``optimizer.step()``: which parameters it updates now, and which ones are deferred."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ddp_crossover.dear import Phase, Pipeline
from ddp_crossover.pending.early_reads import EarlyReads
from ddp_crossover.pending.lazy_param import LazyParam
from ddp_crossover.pending.lazy_params import LazyParams
from ddp_crossover.report.stats import FallbackLog
from ddp_crossover.torch_internals.autograd import keeps_overwritten_values
from ddp_crossover.torch_internals.compiled import called_by_compiled_code
from ddp_crossover.torch_internals.dispatch import is_inside_of_modes
from ddp_crossover.watching.lazy_state import make_state_lazy
from ddp_crossover.watching.optimizer_snapshot import OptimizerSnapshot, StandIn, is_of_torch
from ddp_crossover.watching.separability import Verdict
from ddp_crossover.watching.state_entries import entries_of_state
from ddp_crossover.watching.surroundings import Surroundings

_KEPT = (
    "has a gradient whose memory the script keeps over backward (the tensor itself, a view of it, or a flat buffer). "
    "Keep a clone instead, or drop it and set gradients to None, to have the update deferred"
)
_HELD = (
    "has an object in its entry of optimizer.state to which something else refers, as a variable does. "
    "Read optimizer.state anew each time, or copy what you put there or take from it"
)


def why_call_waits(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """Return why this call of ``step()`` cannot defer its updates, or None: its arguments, or the code around it."""
    if len(args) > 2 or set(kwargs) - {"closure"}:
        return "it was called with other arguments than a closure"
    if called_by_compiled_code():
        return (
            "it is called by compiled code, which rounds sums in another way. Call optimizer.step() outside of "
            "torch.compile"
        )
    if keeps_overwritten_values():
        return (
            "it is called inside of torch.autograd.graph.allow_mutation_on_saved_tensors(), which clones what an "
            "update overwrites. Call it outside of that context"
        )
    return None


def why_surroundings_wait() -> str | None:
    """Return why what this call of ``step()`` computes cannot be computed elsewhere, or None."""
    if is_inside_of_modes() or torch.is_inference_mode_enabled():
        return (
            "it is called inside of torch.inference_mode(), or of a TorchFunctionMode or TorchDispatchMode that may "
            "change what it does. Call it outside of that context"
        )
    return None


def closure_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The closure that ``step()`` was called with, or None."""
    return args[1] if len(args) > 1 else kwargs.get("closure")


def why_closure_waits(closure: Any, verdict: Verdict) -> str | None:
    """Return why a step that was called with this closure cannot be divided in it, or None."""
    if closure is None or verdict.calls_closure:
        return None
    return "it was called with a closure, which its step() does not call exactly once, or goes by what that returns"


class StepCall:
    """A call of ``optimizer.step()`` that is running, on a stand-in.

    Args:
        optimizer: the optimizer that the user called.
        stand_in: the stand-in that runs in its place.
        model: identifies the attached model, see ``lazy_state``.
        counters: what each update changes alike, see ``update_writes``.
        caches: lists and dicts among these, see ``caches``.

    Attributes:
        pipeline: the pipeline that carries the deferred gradients; None if nothing is deferred.
        later: for each param group, the parameters whose updates are deferred.
        snapshot: the optimizer as it is now, for the deferred updates; None if it defers none.
    """

    def __init__(
        self, optimizer: Optimizer, stand_in: StandIn, model: object, counters: Set[str], caches: Set[str]
    ) -> None:
        self.optimizer = optimizer
        self.stand_in = stand_in
        self.model = model
        self.pipeline: Pipeline | None = None
        self.later: list[list[LazyParam]] = []
        self.snapshot: OptimizerSnapshot | None = None
        self._counters = counters
        self._caches = caches
        self._surroundings = Surroundings.now(is_of_torch=is_of_torch(optimizer))

    def divide(self, pipeline: Pipeline | None, deferrable: Deferrable) -> bool:
        """Decide which parameters this call updates now; returns whether there are any.

        Called at the last moment before the optimizer reads the gradients, because a closure may have run a backward,
        which may have changed the pipeline, or loaded another state.
        """
        make_state_lazy(self.optimizer, self.model)
        self.stand_in.use_state(self.stand_in.original.state)
        groups: list[list[Tensor]] = [group["params"] for group in self.stand_in.original.param_groups]
        if pipeline is not None and pipeline.phase is Phase.REDUCED:
            self.pipeline = pipeline
            self.snapshot = OptimizerSnapshot(
                self.optimizer, counters=self._counters, caches=self._caches, surroundings=self._surroundings
            )
            self.later = deferrable.among(groups, pipeline, entries_of_state(self.optimizer).held)
            groups = [_without(group, later) for group, later in zip(groups, self.later, strict=True)]
        self.stand_in.take(groups)
        return any(parameter.grad is not None for group in groups for parameter in group)


class Deferrable:
    """Tells which parameters' updates can be deferred, and records why others cannot.

    Args:
        params: the parameters that DDP manages.
        early_reads: told that a fall-back explains why a step was not overlapped.
        fallbacks: records the reasons.
    """

    def __init__(self, params: LazyParams, early_reads: EarlyReads, fallbacks: FallbackLog) -> None:
        self._params = params
        self._early_reads = early_reads
        self._fallbacks = fallbacks

    def among(self, groups: Sequence[Sequence[Tensor]], pipeline: Pipeline, held: Set[int]) -> list[list[LazyParam]]:
        """Return those of each group whose updates can be deferred; why others cannot counts once for all groups.

        Args:
            groups: the parameters of each param group.
            pipeline: the pipeline that carries their gradients.
            held: ids of those whose state the script may change past the optimizer, see ``state_entries``.
        """
        never: dict[LazyParam, str] = {}
        are_read = False
        later: list[list[LazyParam]] = [[] for _ in groups]
        for of_group, parameters in zip(later, groups, strict=True):
            for parameter in parameters:
                grad = parameter.grad
                if grad is None or (lazy := self._params.of_id.get(id(parameter))) is None:
                    continue
                if not parameter.requires_grad:  # frozen since backward; the optimizer may check that
                    continue
                slot = pipeline.slots[lazy.index]
                if slot.is_kept:
                    never[lazy] = _KEPT
                elif not slot.pending.is_current(grad):
                    are_read = True
                elif held and id(parameter) in held:
                    never[lazy] = _HELD
                elif lazy.why_never_lazy is not None:
                    never[lazy] = lazy.why_never_lazy
                else:
                    of_group.append(lazy)
        note_not_deferred(never, self._early_reads, self._fallbacks)
        if are_read:
            self._fallbacks.note(*_why_read(self._early_reads.clipped_by))
        return later


def note_not_deferred(why_not: Mapping[LazyParam, str], early_reads: EarlyReads, fallbacks: FallbackLog) -> None:
    """Record why the updates of these parameters are not deferred."""
    names: dict[str, list[str]] = {}
    for lazy, reason in why_not.items():
        names.setdefault(reason, []).append(lazy.name)
    for reason, (first, *others) in names.items():
        early_reads.explain()
        more = f" (and {len(others)} more)" if others else ""
        fallbacks.note(f"the update of {first}{more} is not deferred, because the parameter {reason}")


def _why_read(clipped_by: str | None) -> tuple[str, str]:
    """Why updates are not deferred, and what would change it."""
    if clipped_by is None:
        return (
            "gradients were read or replaced before optimizer.step(), so their updates are not deferred",
            "To clip or unscale without a wait, attach with norms='sharded' (under run: --norms sharded)",
        )
    return (
        f"{clipped_by} needs all gradients before optimizer.step(), so their updates are not deferred",
        "To keep the overlap, attach with norms='sharded' (under run: --norms sharded): each rank then computes on its "
        "share of the gradients, and only the last bits of the norm change",
    )


def _without(parameters: list[Tensor], lazies: Sequence[LazyParam]) -> list[Tensor]:
    if not lazies:
        return parameters
    if len(lazies) == len(parameters):
        return []
    ids = {id(lazy.parameter) for lazy in lazies}
    return [parameter for parameter in parameters if id(parameter) not in ids]
