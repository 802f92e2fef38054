"""The communication hook, and the state that one model and its optimizers share.

DDP calls :func:`dear_hook` once for every gradient bucket. The first backward passes are plain all-reduces, until DDP's
buckets have settled and forwards have shown in which order parameters are used. Then rank 0's plan is shared, and
the pipeline (``dear``) takes over; ``hook.reducer`` has the details.
"""
# No `from __future__ import annotations` here: DDP checks the annotations of hooks, and expects types.

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Unpack

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ddp_crossover.attachment import Attachment
from ddp_crossover.fusion import FusionPlan
from ddp_crossover.hook.reducer import HookState
from ddp_crossover.hook.refusals import copy_as_plain
from ddp_crossover.hook.unwrapping import unwrapped_model, unwrapped_optimizer
from ddp_crossover.options import GivenOptions, Options
from ddp_crossover.pending.pending_values import introduce_pending_values
from ddp_crossover.plan.model_profile import ModelProfile
from ddp_crossover.report.stats import DearStats, about, summary
from ddp_crossover.report.trace import Trace
from ddp_crossover.torch_internals.ddp import GradBucket
from ddp_crossover.torch_internals.optimizers import require_hooks

if TYPE_CHECKING:
    from ddp_crossover.addons.lease.client import GpuLease
    from ddp_crossover.addons.weights.sampler import BalancedSampler
    from ddp_crossover.addons.weights.weighted_training import WeightedTraining


class DearState(HookState):
    """State of the hook for one DDP model and its optimizers: the first argument of ``register_comm_hook``.

    Args:
        ddp: the model, also as ``torch.compile`` and frameworks wrap it, see ``hook.unwrapping``.
        optimizer: its optimizer, or a list of all its optimizers, also as frameworks wrap them.
        process_group: process group for our traffic, over the same ranks as ``ddp.process_group``. Default: a
            new one with the same backend and timeout, so that DDP's own traffic never queues behind ours. One of gloo
            under a model on NCCL stages gradients through the host.
        lease: a :class:`GpuLease`, with which jobs share this device: other jobs compute while this one waits for
            communication, see ``docs/lease.md``. It affects speed only; ranks need not agree.
        options: any of :class:`Options`.

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
        lease: "GpuLease | None" = None,
        **options: Unpack[GivenOptions],
    ) -> None:
        asked = Options.given(options)
        ddp = unwrapped_model(ddp)
        every_optimizer = optimizer if isinstance(optimizer, Sequence) else [optimizer]
        self._optimizers = list(map(unwrapped_optimizer, every_optimizer))
        self._attachment = Attachment(ddp, self._optimizers, asked, process_group=process_group, lease=lease)
        self._parts = parts = self._attachment.parts
        self._every_parameter = list(ddp.parameters())
        self._link, self._planning = parts.link, parts.planning
        self._updates, self._reducer = parts.updates, parts.reducer
        self._about = about(ddp, parts.link.rank)
        if asked.trains_as_plain and not self.detached:
            copy_as_plain(ddp, self.synchronize)
        introduce_pending_values()

    @property
    def detached(self) -> bool:
        """Whether DDP trains by itself, as it was before attach but perhaps for smaller buckets.

        Because :meth:`detach` was called, the model was dropped, ``DDP_CROSSOVER=off`` is set, or there is nothing to
        gain: with one rank, or because the tuner has found that DDP's own all-reduces are as fast.
        """
        return self._attachment.is_ended

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
        return self._parts.plan

    @property
    def tuning(self) -> bool:
        """Whether the plan may still change, because times are being measured or plans tried."""
        return self._parts.plain_reason is None and not self.detached and not self._planning.settled

    def tuning_progress(self) -> str:
        """Return one line about what is being measured or tried now, or what was found and what it gains."""
        return self._attachment.progress()

    def __repr__(self) -> str:
        """Show model, plan in force, how far tuning has come, and the latest step. Waits for nothing."""
        return summary(self._about, self.plan, self.tuning_progress(), self.stats(), is_detached=self.detached)

    def profile(self) -> ModelProfile | None:
        """Return measured compute times and link, for ``python -m ddp_crossover simulate``; None until known."""
        return self._planning.model_profile()

    def synchronize(self) -> None:
        """Apply all pending updates now, then give up the lease if this job holds it.

        Needed only before code reads or writes the memory of parameters in a way that torch does not report, for
        example through an address that it stored earlier. Any use of a parameter from Python applies its update.
        """
        self._parts.params.use_all()
        self._parts.compute_waits.others.release()

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
        from ddp_crossover.addons.norms.sharded_norms import clip_grad_norm

        return clip_grad_norm(self._parts.plan_in_force.pipeline, self._every_parameter, max_norm, norm_type)

    def batch(self, samples: int) -> contextlib.AbstractContextManager[None]:
        """With ``weighted=True``, the context of forward and backward of a batch of ``samples`` samples on this rank.

        The loss of each rank is a mean over its samples; gradients are those of the mean over the samples of all ranks.
        For a loss that is a sum, divide it by ``samples``. To weight tokens instead of samples, give their number.

        One batch is the data of one reduced backward. With ``no_sync()``, either put all micro-batches into one
        ``batch()``, or each into its own, whose sizes add up; in both cases add up losses to the mean over all of
        them, as always. Enter ``no_sync()`` before ``batch()``.

        A rank without samples calls ``batch(0)``, and either does nothing in it, or runs a forward and backward with
        any sample, whose gradients count for nothing, NaN included. Under ``torch.no_grad()`` it does nothing. On a
        state that is detached, it raises unless all ranks have as many samples: DDP weights ranks equally.

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
        return self._weighted_training().batch(samples)

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """With ``weighted=True``, yield the batches of ``loader``, then None while other ranks still have some.

        Every rank must iterate to the end. Use it where ranks have different numbers of batches, for which DDP has
        ``join()``. Ranks tell each other one step ahead, so it takes one batch ahead of the loader. On a state that is
        detached, it raises unless all ranks have as many batches: DDP would wait for the others.

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
        return self._weighted_training().batches(loader)

    def balance(self, sampler: "BalancedSampler") -> None:
        """With ``weighted=True``, have ``sampler`` share batches by how fast ranks compute. Every rank must call it.

        It follows the times of :meth:`batch`, of batches whose sizes are the sampler's. A layer that waits for other
        ranks in forward hides which rank is slow. With ``DDP_CROSSOVER=off`` in the environment shares stay equal.

        Raises:
            RuntimeError: without ``weighted=True``; if it was called before.
            ValueError: if the sampler is for other ranks.
        """
        self._weighted_training().balance(sampler)

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
        codes, where = self._parts.plan_in_force.codes, {"rank": self._link.rank, "world_size": self._link.world_size}
        return where | codes.state_dict(self._reducer.end_iteration)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` has returned on the same rank.

        With another number of ranks it is dropped, with a message: gradients then travel as in a new run.

        Raises:
            ValueError: if it comes from another rank or another model.
            RuntimeError: in the middle of a backward.
        """
        self._parts.plan_in_force.codes.load_state_dict(state, self._reducer.end_iteration)

    def after_update(self, function: Callable[[list[Tensor]], object]) -> RemovableHandle:
        """Call ``function(parameters)`` right after parameters were updated, once for each parameter and ``step()``.

        Deferred updates are followed by a call for each fusion group, mostly in the next forward; then the parameters
        of a step that were not deferred, or have no gradient, come in one call at the end of ``step()``. The function
        runs without gradients, on any thread, and may read these parameters and write them in place: keep averages,
        clamp weights. It must not communicate, because ranks update their groups in different orders. What it raises
        comes out of the code that has caused the update. A step that a GradScaler skips causes no call. It is also
        called where nothing is deferred, and still after :meth:`detach`.

        Args:
            function: called with a list of parameters.

        Returns:
            A handle; after ``handle.remove()`` the function is no longer called, also for updates that are pending.

        Raises:
            TypeError: if an optimizer takes no hooks, because its class skips ``Optimizer.__init__``.

        Example::

            state.after_update(lambda parameters: [p.clamp_(-1, 1) for p in parameters])
        """
        require_hooks(self._optimizers, "after_update()", ": call the function yourself after optimizer.step()")
        return self._updates.after_update.add(function)

    def after_step(self, function: Callable[[Optimizer, Sequence[Tensor]], object]) -> RemovableHandle:
        """Call ``function(optimizer, pending)`` at the end of each ``step()``, with the parameters that are pending."""
        return self._updates.after_update.add_at_steps(function)

    def after_leaving(self, function: Callable[[], object]) -> None:
        """Call ``function()`` when DDP is left as it was because nothing can be gained, before the next forward."""
        self._attachment.after_leaving(function)

    def stats(self) -> DearStats:
        """Return the figures of this rank since attach."""
        return self._parts.stats()

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
        self._attachment.consolidate(to)

    def trace(self) -> contextlib.AbstractContextManager[Trace]:
        """Record every forward, backward, leg, wait and update of this rank in the context, see :class:`Trace`.

        Any rank may trace alone. Costs nothing outside of a trace.

        Raises:
            RuntimeError: if this model is being traced already.
            TypeError: if the ``step()`` of an optimizer takes no hooks.
        """
        return self._parts.traced()

    def detach(self) -> None:
        """Apply what is pending and remove all hooks; the script continues as plain DDP, or attaches anew.

        Every rank must call it. If called between a forward and its backward, or once ``register_parametrization()``,
        ``set_()`` or a cast has had DDP lose a parameter, DDP keeps the hook, which does plain all-reduces from then
        on; otherwise DDP can take another hook. With ``shard_optimizer=True``, the optimizers get
        their whole state back.
        """
        self._attachment.end()

    def _weighted_training(self) -> "WeightedTraining":
        from ddp_crossover.addons.weights.weighted_training import WeightedTraining

        parts = self._parts
        return WeightedTraining(parts.reducer, parts.batches, parts.link, parts.moments, parts.device)

    def __deepcopy__(self, memo: dict) -> NoReturn:  # type: ignore[type-arg]
        raise TypeError("a DearState belongs to one model: copy ddp.module, and attach to the copy")

    def __reduce__(self) -> NoReturn:
        raise TypeError("a DearState cannot be pickled: save the state_dict() of model and optimizer instead")

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Reduce one bucket; the implementation of :func:`dear_hook`."""
        return self._reducer.reduce(bucket)


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
