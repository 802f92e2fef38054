"""The steps of sharded optimizers: each rank updates its shards, and what it has updated goes to all ranks.

``optimizer.step()`` runs as always, with its hooks, its closure and its return value, but on no parameter at all. Then
this rank's shards are updated by a snapshot of the optimizer, and gather legs carry the updated parameters, which
are pending until their first use. Where no gather leg can carry them, before the first plan and in a step whose
gradients were read, they are exchanged at once.

For the terms see [Note: DeAR's terms] in ``pipeline``.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ddp_crossover.addons.optimizers.layer_sums import LayerSumOptimizer
from ddp_crossover.addons.shards.between_ranks import (
    in_chunks,
    number_of,
    redistribute,
    require_same_gradients,
    require_same_parameters,
)
from ddp_crossover.addons.shards.by_element import why_not_by_element, why_state_stays
from ddp_crossover.addons.shards.errors_of_ranks import ErrorsOfRanks
from ddp_crossover.addons.shards.own_shards import OwnShards, ShardCall
from ddp_crossover.addons.shards.ownership import Ownership, ParameterRange, everything, only
from ddp_crossover.addons.shards.parameter_gathers import ParameterGathers
from ddp_crossover.addons.shards.shard_states import ShardedState, ShardStates
from ddp_crossover.addons.shards.table import ShardTable, why_attributes_matter
from ddp_crossover.comm.link import Link
from ddp_crossover.dear import Phase, Pipeline
from ddp_crossover.pending.early_reads import EarlyReads
from ddp_crossover.pending.flat import flat_of, shaped
from ddp_crossover.pending.lazy_param import LazyParam
from ddp_crossover.pending.lazy_params import LazyParams
from ddp_crossover.pending.pending_gradient import resolved
from ddp_crossover.pending.slots import Slot
from ddp_crossover.pipeline.gathers import Gathers
from ddp_crossover.report.stats import FallbackLog
from ddp_crossover.step.deferred_updates import DeferredUpdates, Reductions, is_ours
from ddp_crossover.step.run_updates import DeferredUpdate, as_if_called_by_the_user
from ddp_crossover.step.step_call import closure_of, why_call_waits, why_closure_waits
from ddp_crossover.step.update_runner import EarlyAnswers
from ddp_crossover.torch_internals.autograd import unrecorded
from ddp_crossover.watching.at_sight import why_names_matter, why_parameters_repeat
from ddp_crossover.watching.caches import why_no_shards
from ddp_crossover.watching.optimizer_snapshot import OptimizerSnapshot, StandIn, is_of_torch
from ddp_crossover.watching.outside_settings import Outside
from ddp_crossover.watching.state_entries import why_entries_depend
from ddp_crossover.watching.surroundings import Surroundings

_AT_ONCE = (
    "gradients were read or replaced before optimizer.step(), so updated parameters are exchanged at once, and nothing "
    "is deferred",
    "To clip or unscale without a wait, attach with norms='sharded' (under run: --norms sharded)",
)


class ShardedUpdates(DeferredUpdates):
    """Takes over the optimizers of one model, and shares their work and their state between the ranks.

    Args:
        optimizers: the optimizers.
        params: the parameters that DDP manages.
        early_reads: records which line of the script forces pending updates or gradients early.
        fallbacks: records why a step was not deferred.
        reductions: may refuse a step.
        strict: fill pending parameters with NaN until they are updated.
        early_answers: as for :class:`DeferredUpdates`.
        table: how parameters are shared.
        link: link between the ranks.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        params: LazyParams,
        early_reads: EarlyReads,
        fallbacks: FallbackLog,
        reductions: Reductions,
        *,
        strict: bool,
        early_answers: EarlyAnswers | None,
        table: ShardTable,
        link: Link,
    ) -> None:
        if (reason := _why_not_sharded(params.all, table)) is not None:
            raise ValueError(reason)
        super().__init__(
            optimizers,
            params,
            early_reads,
            fallbacks,
            reductions,
            strict=strict,
            early_answers=early_answers,
            write=self._copy_landed,
            gathers=self._parameter_gathers,
        )
        self._strict = strict
        self._gathers: ParameterGathers | None = None
        self._numbers = {optimizer: number for number, optimizer in enumerate(optimizers)}
        self._table = table
        self._link = link
        self._errors = ErrorsOfRanks(link)
        self._device = params.all[0].memory.device
        self._call: ShardCall | None = None
        self._has_begun = False
        self._steps_whole = False
        self._in_slices = {optimizer: {self._optimizers.settings(optimizer)} for optimizer in optimizers}
        self._layouts_seen = -1
        self.states = ShardStates(table, optimizers, link, self._device)
        self._shards = OwnShards(params, table, self.states, link, self._device, self._errors)
        self._whole_since = -1  # the iteration in which all ranks got the whole state of all optimizers

    def remove(self) -> None:
        super().remove()
        self._numbers.clear()
        self._in_slices.clear()
        self._table.drop_references()

    def use(self, pipeline: Pipeline | None) -> None:
        super().use(pipeline)
        self._layouts_seen = -1
        if pipeline is None:
            self._gathers = None

    # What the runner of updates asks for.

    def _parameter_gathers(self, pipeline: Pipeline, memory: Mapping[str, Tensor]) -> Gathers:
        self._gathers = ParameterGathers(pipeline, self._table.owners, memory, self._errors)
        return self._gathers

    def _copy_landed(self, pipeline: Pipeline, claimed: Mapping[Slot, DeferredUpdate]) -> None:
        assert self._gathers is not None
        if claimed:
            with as_if_called_by_the_user():
                torch._foreach_copy_([slot.lazy.memory for slot in claimed], list(map(self._gathers.landed, claimed)))
            for slot in claimed:
                slot.lazy.expect_version()

    def consolidate(self, ranks: Iterable[int]) -> None:
        """Give the optimizers of these ranks their whole state. A collective."""
        if self.pipeline is not None:
            self.pipeline.before_exchange()
        self._params.use_all()
        self._errors.exchange_numbers(0)
        ranks = list(ranks)
        self.states.consolidate(ranks)
        if len(ranks) == self._link.world_size:
            self._whole_since = self._link.iteration

    def is_deferred(self, optimizer: Optimizer) -> bool:
        pipeline = self.pipeline
        return pipeline is not None and pipeline.phase is Phase.REDUCED

    # One call of `optimizer.step()`.

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self._call = None  # left over if the last step raised
        self._has_begun = True
        user_closure = closure_of(args, kwargs)
        self._refuse_step(optimizer, user_closure)
        # Not with a closure, which may run a backward, load another state, or consolidate this one.
        self._steps_whole = user_closure is None and self._is_whole(optimizer)
        if self._steps_whole:
            self._params.use_all()
            return None
        self._optimizers.look_again(optimizer)
        verdict = self._optimizers.verdict(optimizer)
        reason = (
            self._optimizers.why_not(optimizer)
            or why_call_waits(args, kwargs)
            or why_entries_depend(optimizer)
            or why_state_stays(optimizer)
            or why_parameters_repeat(optimizer)
            or why_names_matter(optimizer, verdict.outside)
            or why_attributes_matter(optimizer)
            or self._why_not_in_slices(optimizer)
            or why_no_shards(optimizer, verdict.counters)
            or why_closure_waits(user_closure, verdict)
        )
        if reason is not None:
            raise RuntimeError(f"{type(optimizer).__name__}.step() cannot update shards, because {reason}")
        if self.pipeline is not None:
            self._finish_last_step(optimizer, self.pipeline)
        stand_in = StandIn(args[0], is_ours)
        stand_in.use_state(defaultdict(dict))
        surroundings = Surroundings.now(is_of_torch=is_of_torch(optimizer))

        def closure() -> Any:
            # The last moment before the optimizer reads gradients.
            loss = user_closure() if user_closure is not None else None
            self.states.adopt(self._numbers[optimizer])
            groups = stand_in.original.param_groups
            group_of = {
                self._index_of(parameter, optimizer): index
                for index, group in enumerate(groups)
                for parameter in group["params"]
                if parameter.grad is not None
            }
            verdict = self._optimizers.verdict(optimizer)
            # Before the stand-in gives back what it has counted before it called this: each update counts that itself.
            snapshot = OptimizerSnapshot(
                optimizer, state=self.states.of_ranges, counters=verdict.counters, surroundings=surroundings
            )
            stand_in.take([[] for _ in groups])
            self._call = ShardCall(stand_in, snapshot, verdict.outside, group_of)
            return loss

        if user_closure is None:
            closure()
            return (stand_in.optimizer,), {}
        return (stand_in.optimizer,), {"closure": closure}

    def _why_not_in_slices(self, optimizer: Optimizer) -> str | None:
        """Why it can no longer update slices, because a setting was switched on since attach; None if it can."""
        if self._table.why_whole[self._numbers[optimizer]] is not None or isinstance(optimizer, LayerSumOptimizer):
            return None
        settings = self._optimizers.settings(optimizer)
        if settings not in self._in_slices[optimizer]:
            reason = why_not_by_element(optimizer)
            if reason is not None:
                return f"{reason}, with the settings that it has now: set them before attach"
            self._in_slices[optimizer].add(settings)
        return None

    def _is_whole(self, optimizer: Optimizer) -> bool:
        """Whether to step on whole parameters, with the whole state that every rank has.

        So after :meth:`consolidate`, until the next backward: ``torch.distributed.checkpoint`` makes a step of its own
        to have a state that it can load into.
        """
        return self._whole_since == self._link.iteration and not isinstance(optimizer.state, ShardedState)

    def _index_of(self, parameter: Tensor, optimizer: Optimizer) -> int:
        lazy = self._params.of_id.get(id(parameter))
        if lazy is None or not self._table.give(lazy.index, self._numbers[optimizer]):
            raise RuntimeError(
                f"{type(optimizer).__name__} got a parameter of shape {tuple(parameter.shape)} after attach, and "
                "shard_optimizer=True shares only those that it had then: call state.detach(), and attach again"
            )
        return lazy.index

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call, self._call = self._call, None
        has_begun, self._has_begun = self._has_begun, False
        if not has_begun:  # attached in the closure of this step, which updates whole parameters, as plain DDP does
            return
        if self._steps_whole:
            self._tell_of_step(optimizer, [])
            return
        if call is None:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() did not call its closure, in which shard_optimizer=True divides "
                "the step: leave out shard_optimizer"
            )
        self.runner.note_written()  # of the state
        later: list[LazyParam] = []
        call.stand_in.give_back()
        call.snapshot.leave_alone()
        lazies = [self._params.all[index] for index in call.group_of]
        self._params.follow_moved(lazies)
        if (reason := _why_not_sharded(lazies, self._table)) is not None:
            raise RuntimeError(reason)
        written = self._written(lazies)
        if self._are_legs_ready(call, written):
            later = lazies
            self._step_between_legs(call, later)
        else:
            self._step_at_once(call, lazies, written)
        self._tell_of_step(optimizer, later)

    def _written(self, lazies: Sequence[LazyParam]) -> dict[str, Tensor]:
        """What the script may have written, by name. See [Note: parameters that a script has written]."""
        written: dict[str, Tensor] = {lazy.name: lazy.memory for lazy in lazies if self._strict or lazy.is_edited}
        if written and self.pipeline is not None:
            self.pipeline.order.join()  # protects sums from updates that another stream is still writing
        return written

    def _require_same(self, written: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
        """Raise RuntimeError on all ranks unless they hold the same. A collective."""
        numbers = self._errors.exchange_numbers(number_of(written) << 32 | number_of(gradients))
        if len(set(numbers)) > 1:
            every = {lazy.name: lazy.memory for lazy in self._params.all}
            require_same_parameters(self._link, self._device, written, every)
            require_same_gradients(self._link, self._device, gradients)

    def _are_legs_ready(self, call: ShardCall, written: Mapping[str, Tensor]) -> bool:
        """Whether gather legs can carry this step's parameters."""
        pipeline, gathers = self.pipeline, self._gathers
        if pipeline is None or gathers is None or pipeline.phase is not Phase.REDUCED:
            return False
        slots = [pipeline.slots[index] for index in call.group_of]
        # A gradient that no reduction has written may differ between ranks, which a step at once finds out.
        wants_gradients = not all(map(pipeline.gradients.is_reduced, slots))
        was_decided = gathers.is_decided  # in the step of another optimizer, about its parameters only
        gathers.decide(wants_gradients=wants_gradients, written=written)
        for slot in slots:
            if not pipeline.gradients.is_pending(slot):
                resolved(slot.parameter.grad)  # it may wait for a gather leg of gradients
        if not gathers.can_update_between_legs(slots):
            self._fallbacks.note(*_AT_ONCE)
            return False
        if was_decided:
            self._require_same(written, {})
        if self._layouts_seen != pipeline.layout.changes:
            self.states.move_to(gathers.ownership())
            self._layouts_seen = pipeline.layout.changes
        return True

    def _step_between_legs(self, call: ShardCall, lazies: Sequence[LazyParam]) -> None:
        pipeline, gathers = self.pipeline, self._gathers
        assert pipeline is not None and gathers is not None
        slots = [pipeline.slots[index] for index in call.group_of]
        gradients = {
            slot: None if pipeline.gradients.is_pending(slot) else resolved(slot.parameter.grad) for slot in slots
        }
        groups = gathers.in_order_of_updates(gradients)
        if call.needs_all_shards:
            shards = [gathers.begin_update(group, gradients) for group in groups]
            # No local name for the others, which are views of parameters: it would count as an alias of these.
            self._shards.update(
                call, [*itertools.chain.from_iterable(shards), *self._shards.without_elements(call.group_of)]
            )
            for group in groups:
                gathers.send_update(group)
        else:
            for group in groups:
                self._shards.update(call, gathers.begin_update(group, gradients))
                gathers.send_update(group)
            self._shards.update(call, self._shards.without_elements(call.group_of))
        self._unscale(call)
        self.runner.make_pending(
            pipeline, [(lazies, DeferredUpdate(call.snapshot, 0, edits_gradient=False, outside=Outside()))]
        )

    def _step_at_once(self, call: ShardCall, lazies: Sequence[LazyParam], written: Mapping[str, Tensor]) -> None:
        """Update this rank's shards from whole gradients, and exchange the updated parameters at once."""
        gradients = {lazy.index: resolved(lazy.parameter.grad) for lazy in lazies}
        self._require_same(written, {lazy.name: gradients[lazy.index] for lazy in lazies})
        updates = self._shards.of(gradients)
        self._shards.update(call, updates)
        self._unscale(call)
        with unrecorded():
            mine = {each: flat_of(memory.detach(), memory.stride()) for each, memory in updates}
            by_dtype = sorted(lazies, key=lambda lazy: str(lazy.memory.dtype))
            for some in in_chunks(by_dtype, lambda lazy: lazy.memory.dtype, lambda lazy: lazy.memory.nbytes):
                have = only(self.states.ownership, [lazy.index for lazy in some])
                self._write(some, have, mine)

    def _write(self, lazies: Sequence[LazyParam], have: Ownership, mine: Mapping[ParameterRange, Tensor]) -> None:
        """Exchange updated elements, and put them into the parameters."""
        whole = {lazy.index: self._shards.flat(lazy.index, lazy.memory) for lazy in lazies}
        want = everything(have, range(self._link.world_size))
        for part, values in redistribute(self._link, have, want, mine, lazies[0].memory.detach()):
            whole[part.parameter][part.start : part.stop] = values
        with torch.no_grad():
            for lazy in lazies:
                one = self._table.parameters[lazy.index]
                # Also if that is the same memory, for the version.
                lazy.memory.copy_(shaped(whole[lazy.index], one.parameter.shape, one.stride))
                lazy.expect_version()

    def _unscale(self, call: ShardCall) -> None:
        """Do with whole gradients what an optimizer has done that unscales gradients in place."""
        factor = call.unscaling()
        if factor is None or not self._table.unscales[self._numbers[call.snapshot.optimizer]]:
            return
        pipeline = self.pipeline
        with torch.no_grad():
            for index in call.group_of:
                if pipeline is not None and pipeline.gradients.is_pending(slot := pipeline.slots[index]):
                    slot.scale_by(factor)
                else:
                    resolved(self._params.all[index].parameter.grad).mul_(factor)


def _why_not_sharded(lazies: Sequence[LazyParam], table: ShardTable) -> str | None:
    """Name two parameters in the same memory, whose shards different ranks may update, in any order; None without."""
    names = [lazy.name for lazy in lazies if lazy.overlaps and table.parameters[lazy.index].optimizer is not None]
    if len(names) < 2:
        return None
    return (
        f"shard_optimizer=True cannot update {names[0]} and {names[1]}, because parameters overlap in memory "
        "(q.data = p.data). Use one parameter for both (layer.weight = other.weight), or leave out shard_optimizer"
    )
