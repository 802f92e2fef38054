"""The communication hook, and the state that one model and its optimizers share.

DDP calls :func:`dear_hook` once for every gradient bucket. The first backward passes are plain all-reduces, until DDP's
buckets have settled and forwards have shown in which order parameters are used. Then rank 0's plan is shared, and
the pipeline (``dear``) takes over; ``ddp.reducer`` has the details.
"""
# No `from __future__ import annotations` here: DDP checks the annotations of hooks, and expects types.

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ddp_crossover.balance.sampler import BalancedSampler
from ddp_crossover.collectives.leg import LegError
from ddp_crossover.composition import compose
from ddp_crossover.ddp.forks import watch_forks
from ddp_crossover.ddp.unwrapping import unwrapped_model, unwrapped_optimizer
from ddp_crossover.figures.stats import DearStats
from ddp_crossover.figures.summary import about, in_force, summary
from ddp_crossover.fusion import FusionPlan, Schedule
from ddp_crossover.lease.client import GpuLease
from ddp_crossover.log import say
from ddp_crossover.optim import sharded_norms as shards
from ddp_crossover.options import Options, switched_off
from ddp_crossover.own_threads import is_own_thread
from ddp_crossover.parameters.pending_gradient import PendingGrad
from ddp_crossover.parameters.pending_parameter import PendingParameter, touch
from ddp_crossover.planning.model_profile import ModelProfile
from ddp_crossover.sharding.sharded_updates import ShardedUpdates
from ddp_crossover.top_k import TopK
from ddp_crossover.torch_internals.ddp import GradBucket
from ddp_crossover.torch_internals.dispatch import allow_foreach, describe_gradients_by, settle_before_use
from ddp_crossover.torch_internals.optimizers import has_hooks
from ddp_crossover.tracing.recording import recording
from ddp_crossover.tracing.trace import Trace


class DearState:
    """State of the hook for one DDP model and its optimizers: the first argument of ``register_comm_hook``.

    Args:
        ddp: the model, also as ``torch.compile`` and frameworks wrap it, see ``ddp.unwrapping``.
        optimizer: its optimizer, or a list of all its optimizers, also as frameworks wrap them.
        process_group: process group for our traffic, over the same ranks as ``ddp.process_group``. Default: a
            new one with the same backend and timeout, so that DDP's own traffic never queues behind ours. One of gloo
            under a model on NCCL stages gradients through the host.
        fusion_mb: size of a fusion group on the wire, in MiB. Larger groups cost less latency, smaller ones overlap
            more finely. Default: the fastest size, found from measured times and by trials; with
            ``schedule="dear"`` a sixteenth of the model, from 0.25 to 8 MiB.
        schedule: ``"auto"``: reduce-scatters in backward; all-gathers whenever the link would be idle, in
            backward and in the next forward. ``"dear"``: as in the paper: all reduce-scatters, then all-gathers in
            use order. ``"allreduce"``: plain all-reduce in the hook, nothing deferred.
        wire_dtype: ``torch.bfloat16`` or ``torch.float16``: gradients of a wider dtype are cast to it, after the
            division by the world size, and cast back when they are used. Gloo adds 16-bit gradients up in fp32, in
            rank order, and rounds the sum once; NCCL adds in the wire dtype. This halves the bytes of fp32, and the
            parameters are no longer those of plain fp32 DDP. float16 ends at 65504: use it with a loss scaler.
            ``torch.int8``: gradients travel as 8-bit codes in blocks of 64 with a 16-bit scale, 1.03 bytes per element,
            and what a code leaves out is added to later gradients. Gradients of one-dimensional parameters travel as
            they are. Default: gradients are sent in their own dtype. See ``docs/compression.md``.
        compress: a :class:`TopK`: reduce-scatters send only the largest part of the gradients, all-gathers the sums as
            ``wire_dtype`` says.
        groups: ``"node"``: over gloo, a scatter leg first adds up inside of each node, then across nodes between the
            ranks with the same place on theirs; a gather leg goes the other way. Fewer messages and bytes of a rank
            cross between nodes. Gradients are added up in rank order on each node, then in the order of the nodes'
            lowest ranks, so from three ranks on the last bits are not those without it; 16-bit sums are rounded once
            in each round. Codes travel across nodes only. Nodes are torchrun's, else hosts, and need equally many
            ranks. NCCL chooses by itself. Default: all ranks exchange with all others.
        norms: ``"exact"``: ``torch.nn.utils.clip_grad_norm_`` and ``torch.amp.GradScaler`` give the bits of plain DDP,
            and wait for all gradients, so that no update is deferred in a step that clips. ``"sharded"``: they take
            norms from the ranks' shards and leave the factor pending, so the overlap is kept; the last bits of the norm
            may differ. Then every rank must make the same calls of these functions, in the same order.
        tune: with ``schedule="auto"`` and no ``fusion_mb``: try group sizes, plain all-reduce, and DDP as it was, on
            at most 68 training steps, 104 where their times are spread (results stay exact), and keep the fastest. If
            that is DDP as it was, it is left alone, see :attr:`detached`. False: use what the measured times predict.
        tuned_file: path of a JSON file in which rank 0 stores the result of tuning, for the next run to load.
        lease: a :class:`GpuLease`, with which jobs share this device: other jobs compute while this one waits for
            communication, and the other way round. It is held from forward to the end of backward, given away in
            waits that are long enough while another job waits for it, and never held between steps. It affects
            speed only; ranks need not agree. See ``docs/lease.md``.
        shard_optimizer: each rank updates its share of the parameters and keeps their optimizer state only, which then
            takes 1/world_size of the memory; gather legs carry updated parameters instead of gradients. For optimizers
            whose updates can be deferred; one that works on whole matrices or tensors (Muon) updates each on one rank.
            ``optimizer.state_dict()`` needs :meth:`consolidate` first, and a read of ``.grad`` becomes a collective,
            which every rank must make: clip with ``norms="sharded"``. See ``docs/sharded.md``.
        weighted: ranks may have batches of different sizes, which :meth:`batch` tells; gradients are those of the mean
            over all samples of all ranks. With equal sizes they have the bits of plain DDP.
        strict: debugging aid. Parameters hold NaN while their update is pending, so that a read which was not
            intercepted shows in the results. Costs a copy of the parameters.

    Raises:
        TypeError, ValueError: for a setup that cannot be trained exactly; the message says what to do instead.
        DisagreementError: if ranks were set up differently.

    Example::

        state = DearState(ddp, optimizer)
        ddp.register_comm_hook(state, dear_hook)
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        process_group: dist.ProcessGroup | None = None,
        fusion_mb: float | None = None,
        schedule: str = "auto",
        wire_dtype: torch.dtype | None = None,
        compress: TopK | None = None,
        groups: str | None = None,
        norms: str = "exact",
        tune: bool = True,
        tuned_file: str | os.PathLike[str] | None = None,
        lease: GpuLease | None = None,
        strict: bool = False,
        shard_optimizer: bool = False,
        weighted: bool = False,
    ) -> None:
        asked = Options(
            fusion_mb=fusion_mb,
            schedule=schedule,  # type: ignore[arg-type]  # a string is as good
            wire_dtype=wire_dtype,
            compress=compress,
            groups=groups,
            norms=norms,  # type: ignore[arg-type]
            tune=tune,
            tuned_file=tuned_file,
            strict=strict,
            shard_optimizer=shard_optimizer,
            weighted=weighted,
        )
        ddp = unwrapped_model(ddp)
        self._optimizers = [
            unwrapped_optimizer(one) for one in (optimizer if isinstance(optimizer, Sequence) else [optimizer])
        ]
        self._parts = parts = compose(
            ddp,
            self._optimizers,
            Options(schedule=Schedule.ALLREDUCE) if switched_off() else asked,
            process_group=process_group,
            lease=lease,
            on_leave=_weakly(weakref.WeakMethod(self._leave)),
        )
        self._every_parameter = list(ddp.parameters())
        self._link = parts.link
        self._planning = parts.planning
        self._updates = parts.updates
        self._reducer = parts.reducer
        self._turns = parts.turns
        self._about = about(ddp, parts.link.rank)
        self._detached = False
        self._is_in_child = False
        self._left_because: str | None = None
        self._after_leaving: Callable[[], object] = lambda: None
        # Detach when the DDP object is dropped, not this state: a variable may hold the state while the network is
        # wrapped and attached again.
        self._when_model_is_dropped: weakref.finalize[..., object] = weakref.finalize(ddp, self._model_is_dropped)
        self._when_model_is_dropped.atexit = False  # code that runs at exit still gets pending updates and gradients
        # These run at the end of the program.
        self._finalizers: list[weakref.finalize[..., object]] = [
            weakref.finalize(self, parts.link.shut_down),
            weakref.finalize(self, parts.turns.release),
            self._when_model_is_dropped,
        ]
        settle_before_use(_settled)
        describe_gradients_by(_like)
        allow_foreach(PendingParameter)
        watch_forks(self)

    # What users call.

    @property
    def detached(self) -> bool:
        """Whether DDP trains as it was before attach.

        Because :meth:`detach` was called, the model was dropped, ``DDP_CROSSOVER=off`` is set, or there is nothing to
        gain: with one rank, or because the tuner has found that DDP as it was is as fast.
        """
        return self._detached

    @property
    def module(self) -> torch.nn.Module:
        """The module inside of DDP."""
        module: torch.nn.Module = self._reducer.model.module
        return module

    @property
    def optimizers(self) -> list[Optimizer]:
        """The attached optimizers."""
        return list(self._optimizers)

    @property
    def plan(self) -> FusionPlan | None:
        """The fusion plan in force; None in the first iterations and with plain all-reduce."""
        pipeline = self._reducer.pipeline
        return pipeline.plan if pipeline is not None else None

    @property
    def tuning(self) -> bool:
        """Whether the plan may still change, because times are being measured or plans tried."""
        return self._parts.plain_reason is None and not self._detached and not self._planning.settled

    def tuning_progress(self) -> str:
        """Return one line about what is being measured or tried now, or what was found and what it gains."""
        if self._detached:
            return self._left_because or "detached: the model trains as plain DDP does"
        return self._parts.plain_reason or self._planning.progress()

    def __repr__(self) -> str:
        """Show model, plan in force, how far tuning has come, and the latest step. Waits for nothing."""
        return summary(self._about, self.plan, self.tuning_progress(), self.stats())

    def profile(self) -> ModelProfile | None:
        """Return measured compute times and link, for ``python -m ddp_crossover simulate``; None until known."""
        return self._planning.model_profile()

    def synchronize(self) -> None:
        """Apply all pending updates now, then give up the lease if this job holds it.

        Needed only before code reads or writes the memory of parameters in a way that torch does not report, for
        example through an address that it stored earlier. Any use of a parameter from Python applies its update.
        """
        self._updates.flush()
        self._turns.release()

    @contextlib.contextmanager
    def synchronized(self) -> Iterator[None]:
        """Context in which no update is pending, so that parameters may be read and written in any way."""
        self.synchronize()
        try:
            with self._updates.at_once():
                yield
        finally:
            self.synchronize()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the norm of all gradients of the model, as ``torch.nn.utils.clip_grad_norm_`` does.

        Every rank must call it, because each contributes the norm of its shards. The factor is applied when gradients
        are used. Torch's function does the work in the first iterations, in ``no_sync()``, and with parameters that
        DDP ignores. Gradients of a backward past DDP, as through ``ddp.module``, are taken for those of all ranks.

        Args:
            max_norm: norm to clip to.
            norm_type: p of the p-norm; may be ``inf``.

        Returns:
            The norm before clipping, 0-dim, on the parameters' device, fp32 (fp64 with fp64 gradients).
        """
        pipeline = self._reducer.pipeline
        gradients = shards.shared_gradients(pipeline, self._every_parameter)
        if pipeline is not None and gradients is not None and norm_type > 0:
            norm = shards.total_norm(pipeline, gradients, float(norm_type))
            shards.scale(gradients, torch.clamp(float(max_norm) / (norm + 1e-6), max=1.0))
            return norm
        return torch.nn.utils.clip_grad_norm_(self._every_parameter, max_norm, norm_type)

    # Batches of different sizes.

    def batch(self, samples: int) -> contextlib.AbstractContextManager[None]:
        """With ``weighted=True``, the context of forward and backward of a batch of ``samples`` samples on this rank.

        The loss of each rank is a mean over its samples; gradients are those of the mean over the samples of all ranks.
        For a loss that is a sum, divide it by ``samples``. To weight tokens instead of samples, give their number.

        One batch is the data of one reduced backward. With ``no_sync()``, either put all micro-batches into one
        ``batch()``, or each into its own, whose sizes add up; in both cases add up losses to the mean over all of
        them, as always. Enter ``no_sync()`` before ``batch()``.

        A rank without samples calls ``batch(0)``, and either does nothing in it, or runs a forward and backward with
        any sample, whose gradients count for nothing, NaN included. Under ``torch.no_grad()`` it does nothing.

        On a state that is detached, it raises unless all ranks have as many samples: DDP weights ranks equally.

        Args:
            samples: number of samples, 0 or more.

        Raises:
            RuntimeError: without ``weighted=True``; in another ``batch()``.
            TypeError, ValueError: unless it is a whole number from 0.

        Example::

            state = attach(ddp, optimizer, weighted=True)
            for x, y in loader:
                with state.batch(len(x)):
                    loss_fn(ddp(x), y).backward()
                optimizer.step()
        """
        return self._parts.weighted.batch(samples)

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """With ``weighted=True``, yield the batches of ``loader``, then None while other ranks still have some.

        Every rank must iterate to the end. Use it where ranks have different numbers of batches, for which DDP has
        ``join()``. Ranks tell each other one step ahead, so it takes one batch ahead of the loader.

        On a state that is detached, it raises unless all ranks have as many batches: DDP would wait for the others.

        Args:
            loader: this rank's batches.

        Raises:
            RuntimeError: without ``weighted=True``.

        Example::

            for batch in state.batches(loader):
                with state.batch(0 if batch is None else len(batch[0])):
                    if batch is not None:
                        loss_fn(ddp(batch[0]), batch[1]).backward()
                optimizer.step()
        """
        return self._parts.weighted.batches(loader)

    def balance(self, sampler: BalancedSampler) -> None:
        """With ``weighted=True``, have ``sampler`` share batches by how fast ranks compute. Every rank must call it.

        It follows the times of :meth:`batch`, of batches whose sizes are the sampler's. A layer that waits for other
        ranks in forward hides which rank is slow. With ``DDP_CROSSOVER=off`` in the environment shares stay equal.

        Raises:
            RuntimeError: without ``weighted=True``; if it was called before.
            ValueError: if the sampler is for other ranks.
        """
        self._parts.weighted.balance(sampler)

    def state_dict(self) -> dict[str, Any]:
        """What codes of gradients have left out on this rank, for a checkpoint; next to nothing without codes.

        Every rank has its own. Save it for each rank, and load it after attach; if it is left out, what was left out
        is lost, once. It waits for gradients under way and applies pending updates.

        Returns:
            ``rank``, ``world_size``, and with ``wire_dtype=torch.int8`` or ``compress=`` tensors on the CPU, fp32, as
            large as the gradients.

        Raises:
            RuntimeError: in the middle of a backward.

        Example::

            torch.save(state.state_dict(), f"wire-{dist.get_rank()}.pt")
            state.load_state_dict(torch.load(f"wire-{dist.get_rank()}.pt"))
        """
        where = {"rank": self._link.rank, "world_size": self._link.world_size}
        feedback = self._reducer.end_iteration_of_codes()
        if feedback is None:
            return where
        with self._link.beside_legs():
            return where | feedback.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` has returned on the same rank.

        With another number of ranks it is dropped, with a message: gradients then travel as in a new run.

        Raises:
            ValueError: if it comes from another rank or another model.
            RuntimeError: in the middle of a backward.
        """
        feedback = self._reducer.end_iteration_of_codes()
        if "steps" not in state or feedback is None:
            return
        if state["world_size"] != self._link.world_size:
            if self._link.rank == 0:
                say(
                    f"what codes of gradients have left out was saved by {state['world_size']} ranks, and there are "
                    f"{self._link.world_size}: it is dropped, and later codes will not make up for it"
                )
            return
        if state["rank"] != self._link.rank:
            raise ValueError(
                f"rank {self._link.rank} was given the state of rank {state['rank']}: save one file for each rank, and "
                "load the rank's own"
            )
        with self._link.beside_legs():
            feedback.load_state_dict(state)

    def after_update(self, function: Callable[[list[Tensor]], object]) -> RemovableHandle:
        """Call ``function(parameters)`` right after parameters were updated, once for each parameter and ``step()``.

        Deferred updates are followed by a call for each fusion group, mostly in the next forward; then the parameters
        of a step that were not deferred, or have no gradient, come in one call at the end of ``step()``. The function
        runs without gradients, on any thread, and may read these parameters and write them in place: keep averages,
        clamp weights. It must not communicate, because ranks update their groups in different orders. What it raises
        comes out of the code that has caused the update. A step that a GradScaler skips causes no call.

        It is also called where nothing is deferred, and still after :meth:`detach`.

        Args:
            function: called with a list of parameters.

        Returns:
            A handle; after ``handle.remove()`` the function is no longer called, also for updates that are pending.

        Raises:
            TypeError: if an optimizer takes no hooks, because its class skips ``Optimizer.__init__``.

        Example::

            state.after_update(lambda parameters: [p.clamp_(-1, 1) for p in parameters])
        """
        for optimizer in self._optimizers:
            if not has_hooks(optimizer):
                raise TypeError(
                    f"after_update() cannot follow {type(optimizer).__name__}, whose class skips Optimizer.__init__ "
                    "and takes no hooks: call the function yourself after optimizer.step()"
                )
        return self._updates.after_update.add(function)

    def after_step(self, function: Callable[[Optimizer, Sequence[Tensor]], object]) -> RemovableHandle:
        """Call ``function(optimizer, pending)`` at the end of each ``step()``, with the parameters that are pending."""
        return self._updates.after_update.add_at_steps(function)

    def after_leaving(self, function: Callable[[], object]) -> None:
        """Call ``function()`` when DDP is left as it was because nothing can be gained, before the next forward."""
        self._after_leaving = function

    def stats(self) -> DearStats:
        """Return the figures of this rank since attach."""
        sums = self._link.clock.sums()
        return DearStats(
            iterations=self._reducer.iterations,
            pipelined_iterations=self._reducer.pipelined_iterations,
            overlapped_steps=self._reducer.steps.overlapped,
            finished_steps=self._reducer.steps.finished,
            looks=dict(self._parts.early_reads.counts),
            deferred_steps=self._updates.deferred_steps,
            elapsed_s=self._reducer.steps.elapsed_s(),
            communication_s=sums.communication_s,
            exposed_s=sums.exposed_s,
            sent_bytes=self._link.sent_bytes,
            fallbacks=dict(self._parts.fallbacks.counts),
            advice=dict(self._parts.fallbacks.advice),
            last_steps=self._reducer.steps.figures(),
            lease=self._turns.stats(),
        )

    def consolidate(self, to: int | None = None) -> None:
        """With ``shard_optimizer=True``, put the optimizers' state together; a collective, so every rank must call it.

        Afterwards ``optimizer.state_dict()`` and ``optimizer.state`` are those of an ordinary optimizer, until the next
        ``step()``, which shares the state again: save a checkpoint right after it. Until it is called they raise.
        Without ``shard_optimizer=True`` it does nothing. To load, call ``optimizer.load_state_dict()`` on every rank as
        always, with a state that any number of ranks, or plain DDP, has saved.

        Args:
            to: the only rank that gets the state, which saves the memory of it on the others; by default, every rank.

        Raises:
            ValueError: if there is no rank ``to``.

        Example::

            state.consolidate(to=0)
            if dist.get_rank() == 0:
                torch.save(optimizer.state_dict(), path)
        """
        world_size = self._link.world_size
        if to is not None and not 0 <= to < world_size:
            raise ValueError(f"to={to}: the model has ranks 0 to {world_size - 1} in its process group")
        if isinstance(self._updates, ShardedUpdates) and not self._detached:
            self._updates.consolidate(range(world_size) if to is None else (to,))

    def optimizer_state_bytes(self) -> int:
        """Return how many bytes of optimizer state this rank holds: with ``shard_optimizer=True``, of its shards."""
        if isinstance(self._updates, ShardedUpdates) and not self._detached:
            return self._updates.states.nbytes()
        self._updates.flush()
        states = (state for optimizer in self._optimizers for state in optimizer.state.values())
        return sum(value.nbytes for state in states for value in state.values() if isinstance(value, Tensor))

    @contextlib.contextmanager
    def trace(self) -> Iterator[Trace]:
        """Record every forward, backward, leg, wait and update of this rank in the context, see :class:`Trace`.

        Any rank may trace alone. Costs nothing outside of a trace.

        Raises:
            RuntimeError: if this model is being traced already.
            TypeError: if the ``step()`` of an optimizer takes no hooks.
        """
        trace = Trace(self._link.rank, in_force(self.plan), self._parts.device)
        with recording(trace, self._link.clock, self._reducer.model, self._optimizers):
            yield trace
        if (now := in_force(self.plan)) != trace.title:
            trace.title = f"{trace.title}, then {now}"

    def detach(self) -> None:
        """Apply what is pending and remove all hooks; the script continues as plain DDP, or attaches anew.

        Every rank must call it. If called between a forward and its backward, DDP keeps the hook, which does plain
        all-reduces from then on; otherwise DDP can take another hook. With ``shard_optimizer=True``, the optimizers get
        their whole state back.
        """
        self.consolidate()
        try:
            self._detach()
        finally:
            if not self._is_in_child:
                # Also if this rank's model was dropped before, as other ranks may not have found theirs yet.
                self._link.close()

    def _detach(self) -> None:
        """Detach, without the other ranks."""
        if self._detached:
            return
        self._detached = True
        try:
            self._reducer.detach()
        finally:
            if self._parts.turn_points is not None:
                self._parts.turn_points.remove()
            self._turns.release()
            self._link.shut_down()
        self._when_model_is_dropped.detach()  # it keeps this state alive, and a model may be attached many times

    def _leave(self, why: str) -> None:
        """Detach because nothing can be gained. Every rank does, at its next forward."""
        self._left_because = f"DDP trains as it was before attach: {why}"
        self._parts.fallbacks.note(self._left_because, is_said=self._planning.settled)  # then the planner has said it
        self.detach()
        self._after_leaving()

    def _model_is_dropped(self) -> None:
        """Detach when the DDP object is collected: its network may stay in use, or be wrapped again."""
        if is_own_thread():
            # The garbage collector runs on a thread of the link, which must not wait for legs that it has to run.
            threading.Thread(target=self._take_apart, name="ddp_crossover-close", daemon=True).start()
        else:
            self._take_apart()

    def _take_apart(self) -> None:
        self._link.shut_down()  # every leg has succeeded or failed after this, so nothing below waits for peers
        for step in (self._updates.flush, self._detach):
            with contextlib.suppress(LegError):
                step()

    def before_fork(self) -> None:
        """Finish pending updates and gradients, because a forked child has none of our threads; take the lock."""
        self._parts.params.lock.acquire()
        self._updates.flush()
        self._reducer.deliver_gradients()

    def after_fork_in_parent(self) -> None:
        """Release the lock that :meth:`before_fork` has taken."""
        self._parts.params.lock.release()

    def after_fork_in_child(self) -> None:
        """Leave a plain model in the child: without hooks, and without finalizers, which need the parent's threads."""
        self._parts.params.lock.release()
        for finalizer in self._finalizers:
            finalizer.detach()
        self._is_in_child = True
        if self._detached:
            return
        self._reducer.finish_gradients_in_child()
        self._reducer.become_plain()
        if self._parts.turn_points is not None:
            self._parts.turn_points.remove()
        self._detached = True

    def __deepcopy__(self, memo: dict) -> NoReturn:  # type: ignore[type-arg]
        raise TypeError("a DearState belongs to one model: copy ddp.module, and attach to the copy")

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a DearState cannot be pickled: save the state_dict() of the model and of the optimizer instead"
        )

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Reduce one bucket; the implementation of :func:`dear_hook`."""
        return self._reducer.reduce(bucket)


def _weakly(method: weakref.WeakMethod[Callable[[str], None]]) -> Callable[[str], None]:
    """Call the method while its object is there: a cycle of references would keep the model's memory for long."""

    def call(why: str) -> None:
        if (bound := method()) is not None:
            bound(why)

    return call


def _settled(tensor: Tensor) -> Tensor:
    """Return the tensor with its up-to-date value, after a wait if a gradient or an update is pending."""
    if isinstance(tensor, PendingGrad):
        return tensor.resolve()
    touch(tensor)
    return tensor


def _like(gradient: Tensor) -> Tensor:
    """Return a plain tensor that looks like the gradient, whose value may be pending."""
    return gradient.like() if isinstance(gradient, PendingGrad) else gradient


def dear_hook(state: DearState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP communication hook: reduce-scatter now, all-gather during the next forward.

    Use it as ``ddp.register_comm_hook(state, dear_hook)`` with a :class:`DearState`. Trains exactly as DDP does.
    Source: DeAR, arXiv 2302.12445.

    Raises:
        TypeError: if ``state`` is not a :class:`DearState`.
    """
    if not isinstance(state, DearState):
        raise TypeError(
            f"the state of dear_hook must be a DearState, not {type(state).__name__}: state = DearState(ddp, "
            "optimizer); ddp.register_comm_hook(state, dear_hook), or both at once: attach(ddp, optimizer). In "
            "Lightning, leave out DDPStrategy(ddp_comm_hook=...), and use "
            "Trainer(callbacks=[ddp_crossover.integrations.lightning.DearCallback()])"
        )
    return state.reduce(bucket)
