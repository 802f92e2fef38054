"""The state of a model whose ranks share their parameters now and then: local steps, snapshots, merges.

All that ranks do together is counted by backward passes that DDP reduces, of which all ranks have equally many: whether
a rank has skipped its ``optimizer.step()`` does not matter. What is due after a step is done at the beginning of the
next training forward, when all of the step's updates are there.
"""
# No `from __future__ import annotations` here: DDP checks the annotations of hooks, and expects types.

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddp_crossover.addons.norms.grad_scaler import GradScaler, agree_on_overflow
from ddp_crossover.addons.relaxed.delta_merge import DeltaMerge
from ddp_crossover.addons.relaxed.partners import Partners
from ddp_crossover.addons.relaxed.policy import Policy
from ddp_crossover.addons.relaxed.refusals import refuse_options, refuse_talk_in_local_steps
from ddp_crossover.addons.relaxed.stats import RelaxedStats, summary
from ddp_crossover.attaching import attach
from ddp_crossover.comm_hook import DearState
from ddp_crossover.hook.refusals import allow_methods, refuse_methods, refuse_model, refuse_optimizers
from ddp_crossover.hook.unwrapping import unwrapped_model, unwrapped_optimizer
from ddp_crossover.options import SWITCH, switched_off
from ddp_crossover.report.stats import about
from ddp_crossover.torch_internals.ddp import (
    GradBucket,
    forget_comm_hooks,
    managed_parameters,
    rebuild_buckets,
)
from ddp_crossover.torch_internals.loss_scale import LossScale
from ddp_crossover.watching.same_state import take_state_of_rank_0


class RelaxedState:
    """What :func:`ddp_crossover.attach` returns with ``sync=``: one model whose ranks train alone between means.

    Parameters differ between ranks. Call :meth:`consolidate` on all ranks before an evaluation or a checkpoint of the
    model; a checkpoint to go on from needs each rank's own parameters, optimizer state and :meth:`state_dict`.

    Args:
        ddp: the model.
        optimizer: its optimizer, or a list of all of them. Their state stays each rank's own.
        policy: when to share what.
        options: options of :class:`ddp_crossover.DearState` for the exact steps of the warm-up.

    Raises:
        ValueError: for a setup in which ranks would talk in local steps, or see gradients that are not theirs.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        optimizer: Optimizer | Sequence[Optimizer],
        policy: Policy,
        **options: Any,
    ) -> None:
        refuse_options(options, has_warmup=policy.warmup > 0)
        ddp = unwrapped_model(ddp)
        refuse_model(ddp)
        optimizers = [unwrapped_optimizer(o) for o in (optimizer if isinstance(optimizer, Sequence) else [optimizer])]
        refuse_optimizers(ddp, optimizers)
        refuse_talk_in_local_steps(ddp, optimizers)
        self.policy = policy
        self._optimizers = optimizers
        self._ddp = weakref.ref(ddp)  # DDP's reducer, which the garbage collector does not see into, holds this object
        named = managed_parameters(ddp)
        self._parameters = [parameter for _, parameter in named]
        self._about = about(ddp, dist.get_rank(ddp.process_group))
        self._is_switched_off = self._detached = switched_off()
        # Exact steps at first, then local ones; both are counted.
        self._warmup: DearState | None = None
        self._is_plain = False  # the warm-up goes on as plain DDP
        self._loaded_steps = self._warmup_steps = self._steps = self._seen = 0
        self._due = 0
        self._loss_scale = LossScale(is_watched=True)
        self._partners = Partners(ddp, named, policy)
        self._when_dropped = weakref.finalize(self, self._partners.shut_down)
        self._rule = policy.rule(self._partners.link.exchange_numbers)
        self._merge = DeltaMerge(self._parameters, policy, self._partners.exchanges, self._partners.replicas)
        if self._detached:
            self._when_dropped()
            return
        agree_on_overflow(optimizers, self._partners.link, self._steps_done)
        if policy.warmup:
            self._warmup = attach(ddp, optimizer, **options)
            self._warmup.after_leaving(self._go_on_plainly)
        else:
            self._begin_local_steps()
        self._handle = ddp.register_forward_pre_hook(self._on_forward)

    # What users call.

    @property
    def detached(self) -> bool:
        """Whether :meth:`detach` was called."""
        return self._detached

    def stats(self) -> RelaxedStats:
        """Figures of this rank."""
        merge = self._merge
        return RelaxedStats(self._steps_done(), merge.means, merge.divergence, merge.sent_bytes)

    def __repr__(self) -> str:
        """Show model, policy, what is done now, and the figures. Waits for the latest divergence."""
        return summary(self._about, self.policy, self._doing(), self.stats())

    def _doing(self) -> str:
        if self._is_switched_off:
            return f"{SWITCH}=off in the environment: the model trains as plain DDP does"
        if self._detached:
            return "detached: the model trains as plain DDP does"
        if self._warmup is not None:
            return f"exact steps until step {self.policy.warmup}, the end of the warm-up"
        return "each rank trains alone between means"

    @torch.no_grad()
    def consolidate(self) -> None:
        """Give all ranks the mean of their parameters, bit for bit the same, and rank 0's buffers. A collective.

        Call it on all ranks after ``optimizer.step()``, before an evaluation or a checkpoint. Training goes on from
        the mean; the period of the policy does not change, and an outer optimizer does nothing.
        """
        if self._warmup is not None:
            self._warmup.synchronize()
        elif not self._detached:
            self._catch_up()
            self._merge.consolidate()
        for buffer in self._model.module.buffers():
            dist.broadcast(buffer, group=self._model.process_group, group_src=0)

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of a checkpoint to go on from, beside its parameters and its optimizer's state.

        It waits for what is under way, which all ranks have sent. No collective, and nothing changes.
        """
        state: dict[str, Any] = {"policy": None if self._detached else self.policy.kind}
        if self._warmup is not None:
            self._follow_warmup()
        state["warmup_steps"] = self._warmup_steps
        if self._warmup is not None:
            return state | {"exact": self._warmup.state_dict()}
        if self._detached:
            return state
        return state | {
            "steps": self._steps,
            "seen": self._seen,
            "due": self._due,
            "rule": self._rule.state_dict(),
            "merge": self._merge.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where :meth:`state_dict` was called; load this rank's parameters and optimizer state as well.

        A state that was saved with ``DDP_CROSSOVER=off`` begins anew; with the switch, nothing is loaded.

        Raises:
            ValueError: for the state of another kind of policy.
        """
        if self._detached or state["policy"] is None:
            return
        if state["policy"] != self.policy.kind:
            raise ValueError(
                f"this state was saved with {state['policy']}, and the policy is {self.policy.kind}: attach with the "
                "policy of the run that has saved it, or load the mean of all ranks and leave out this state"
            )
        if "exact" in state:
            if self._warmup is None:
                raise ValueError("this state was saved in the warm-up, and this run is past its own: load it at first")
            self._loaded_steps = state["warmup_steps"] - self._warmup.stats().iterations
            self._warmup_steps = state["warmup_steps"]
            self._warmup.load_state_dict(state["exact"])
            return
        if self._warmup is not None:
            self._end_warmup()
        self._warmup_steps, self._due = state["warmup_steps"], state["due"]
        self._steps, self._seen = state["steps"], state["seen"]
        self._rule.load_state_dict(state["rule"])
        self._merge.load_state_dict(state["merge"])

    def detach(self) -> None:
        """Give all ranks the mean, and rank 0's optimizer state, and leave DDP as it was before attach. A collective.

        Call it after ``optimizer.step()``: gradients that a backward has left are each rank's own.

        Raises:
            RuntimeError: on all ranks, if some have optimizer state that others lack; parameters are the mean then.
        """
        if self._detached:
            return
        self.consolidate()
        if self._warmup is None:
            take_state_of_rank_0(self._optimizers, self._parameters, self._model.process_group)
        self._detached = True
        self._handle.remove()
        if self._warmup is not None:
            self._warmup.detach()
        if self._warmup is None or self._is_plain:
            allow_methods(self._model)
            forget_comm_hooks(self._model)
            rebuild_buckets(self._model)
        self._when_dropped.detach()
        self._partners.close()

    @property
    def _model(self) -> DistributedDataParallel:
        ddp = self._ddp()
        assert ddp is not None  # the model is running
        return ddp

    # From exact steps to local ones.

    def _follow_warmup(self) -> None:
        """Count exact steps. Those without the pipeline are counted by our own hook."""
        assert self._warmup is not None
        if not self._is_plain:
            self._warmup_steps = self._loaded_steps + self._warmup.stats().iterations

    def _steps_done(self) -> int:
        if self._warmup is not None:
            self._follow_warmup()
        return self._warmup_steps + self._steps

    def _go_on_plainly(self) -> None:
        """Count exact steps, now that the pipeline has left DDP as it was."""
        if self._warmup is not None:
            self._follow_warmup()
            self._is_plain = True
            self._model.register_comm_hook(self, relaxed_hook)

    def _begin_local_steps(self) -> None:
        if not self._is_plain:
            self._model.register_comm_hook(self, relaxed_hook)
        refuse_methods(self._model)

    def _end_warmup(self) -> None:
        assert self._warmup is not None
        self._warmup.detach()
        self._warmup = None
        self._begin_local_steps()
        self._merge.begin()

    # Steps.

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Leave a bucket's gradients as they are, and count the backward pass; the implementation of the hook."""
        if self._warmup is not None:
            self._warmup_steps += bucket.is_last()
            return allreduce_hook(self._model.process_group, bucket)
        self._rule.note(bucket.buffer(), self._loss_scale.now)
        if bucket.is_last():
            self._steps += 1
            scaler = self._loss_scale.scaler()
            if scaler is not None and not isinstance(scaler, GradScaler):
                raise RuntimeError(
                    "in local steps each rank has gradients of its own, and torch.amp.GradScaler would skip steps on "
                    "some ranks only: use ddp_crossover.GradScaler, with which all ranks skip the same steps"
                )
        if self._partners.node is not None:
            return allreduce_hook(self._partners.node, bucket)
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def _on_forward(self, module: torch.nn.Module, inputs: object) -> None:
        self._before_forward()

    def _before_forward(self) -> None:
        if not torch.is_grad_enabled() or self._detached:
            return
        if self._warmup is not None:
            self._follow_warmup()
            if self._warmup_steps >= self.policy.warmup:
                self._end_warmup()
        else:
            self._catch_up()

    def _catch_up(self) -> None:
        """Do what is due after the last step."""
        self._merge.begin()
        if self._seen == self._steps:
            return
        self._seen = self._steps
        is_due = self._rule.is_due(self._steps)
        if self._merge.is_under_way and (is_due or self._steps >= self._due):
            self._merge.merge()
        if is_due:
            self._merge.send()
            self._due = self._steps + self.policy.delay
            if not self.policy.delay:
                self._merge.merge()


def relaxed_hook(state: RelaxedState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP communication hook of :class:`RelaxedState`."""
    return state.reduce(bucket)
