"""An exponential moving average of a model's weights, which is taken where the deferred updates run."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ddp_crossover.comm_hook import DearState
from ddp_crossover.hooks import Hook
from ddp_crossover.pending.pending_parameter import arm, disarm, is_armed, is_armed_by, touch
from ddp_crossover.torch_internals.ddp import comm_hooks_of
from ddp_crossover.watching.optimizer_snapshot import optimizer_parameters


class Ema(AveragedModel):
    """Exponential moving average of an attached model that keeps the overlap.

    It has the same bits as ``AveragedModel(ddp.module, multi_avg_fn=get_ema_multi_avg_fn(decay))`` whose
    ``update_parameters()`` is called after every ``step()``, and either loads the other's ``state_dict()``. But
    ``update_parameters()`` reads all parameters, which applies all deferred updates at once. This average is taken of
    each fusion group right after its update, so there is nothing to call. Steps that a GradScaler skips do not count.

    Averages of parameters whose update is pending are pending, too: reading them (``ema(x)``, ``ema.module``,
    ``ema.state_dict()``) applies these updates first. Call ``state.synchronize()`` before code uses them that bypasses
    PyTorch's dispatch, such as a compiled copy.

    With several optimizers, each parameter is averaged after the steps of its own optimizer; buffers, parameters that
    no attached optimizer has, and ``n_averaged`` follow the first one. Averaging ends when this object is dropped. It
    goes on after ``state.detach()``, at the end of each step; after a new ``attach()``, make a new one and load the old
    one's state.

    Args:
        attached: what :func:`attach` returned, or the attached DDP model.
        decay: weight of the old average, 0 to 1.
        use_buffers: average buffers, too, as ``AveragedModel`` does; False copies them after each step.
        device: where to keep the average; default: where the parameters are.

    Raises:
        TypeError: if the model is not attached, or one of its optimizers takes no hooks.
        ValueError: if ``decay`` is not between 0 and 1.

    Example::

        state = dx.attach(ddp, optimizer)
        ema = dx.Ema(state, decay=0.999)
        train(ddp, optimizer)
        evaluate(ema.module)
    """

    def __init__(
        self,
        attached: DearState | DistributedDataParallel,
        decay: float = 0.999,
        *,
        use_buffers: bool = False,
        device: int | torch.device | None = None,
    ) -> None:
        if not 0.0 <= decay <= 1.0:
            raise ValueError(f"decay must be between 0 and 1, got {decay}")
        state = _state_of(attached)
        multi_avg_fn = get_ema_multi_avg_fn(decay)
        super().__init__(state.module, device, multi_avg_fn=multi_avg_fn, use_buffers=use_buffers)
        self._averaging: Hook = _Averaging(self, state)

    def update_parameters(self, model: nn.Module) -> NoReturn:
        """Raise RuntimeError: the average is taken without a call."""
        raise RuntimeError("dx.Ema takes the average by itself whenever parameters are updated: remove this call")

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        if isinstance(self._averaging, _Averaging):
            self._averaging.restart(has_average=bool(self.n_averaged))


class _AverageOwner:
    """Brings one average up to date when it is read: applies the update of its parameter, which averages it."""

    __slots__ = ("_averaging", "average", "has_average", "source")

    def __init__(self, source: Tensor, average: Tensor, averaging: _Averaging, *, has_average: bool) -> None:
        self.source = source
        self.average = average
        self.has_average = has_average
        self._averaging = averaging

    def restart(self, *, has_average: bool) -> None:
        """Go on with an average, or without one, so that the next value is copied."""
        self.has_average = has_average

    def use(self) -> None:
        touch(self.source)
        if is_armed(self.average):
            disarm(self.average)

    def use_all(self) -> None:
        self._averaging.use_all()


class _Averaging(Hook):
    """Follows one model; a copy of the :class:`Ema` that has it does not."""

    def __init__(self, ema: Ema, state: DearState) -> None:
        self._ema = weakref.ref(ema)
        self._model = state.module
        self._optimizers = state.optimizers
        self._has_average = False
        self._owners: dict[int, _AverageOwner] = {}
        self._elsewhere: set[int] = set()
        self._multi_avg_fn: Any = ema.multi_avg_fn
        self._pair()
        self._handles = [state.after_update(self._updated), state.after_step(self._stepped)]
        # Weak: a model that has this average as an attribute could never be collected.
        end = weakref.WeakMethod(self._end)
        weakref.finalize(ema, lambda: (call := end()) and call()).atexit = False

    def __reduce__(self) -> NoReturn:
        raise TypeError("dx.Ema cannot be pickled while it follows a model: save ema.state_dict(), or ema.module")

    def restart(self, *, has_average: bool) -> None:
        """Go on from a state that was loaded; without an average, the next values are copied."""
        self._has_average = has_average
        for owner in self._owners.values():
            owner.restart(has_average=has_average)

    def use_all(self) -> None:
        for owner in list(self._owners.values()):
            owner.use()

    def _end(self) -> None:
        """The average was dropped: stop once its last step is taken, because its module may stay in use."""
        if not any(is_armed_by(owner.average, owner) for owner in list(self._owners.values())):
            for handle in self._handles:
                handle.remove()

    def _updated(self, parameters: list[Tensor]) -> None:
        owners = self._owners_of(parameters)
        if is_dropped := self._ema() is None:
            owners = [owner for owner in owners if is_armed_by(owner.average, owner)]
        # Out of sight of `__torch_function__`: the averages may be pending, and are written here.
        with torch._C.DisableTorchFunctionSubclass():
            self._average((owner.average, owner.source, owner.has_average) for owner in owners)
        for owner in owners:
            owner.restart(has_average=True)
            if is_armed(owner.average):
                disarm(owner.average)
        if is_dropped:
            self._end()

    def _stepped(self, optimizer: Optimizer, pending: Sequence[Tensor]) -> None:
        ema = self._ema()
        if ema is None:
            return
        if optimizer is self._optimizers[0]:
            self._follow_the_rest(ema)
        for owner in self._owners_of(pending):
            if type(owner.average) is nn.Parameter:
                arm(owner.average, owner)
            elif not is_armed(owner.average):  # replaced by something that cannot be pending
                touch(owner.source)

    def _follow_the_rest(self, ema: Ema) -> None:
        trained = {id(parameter) for each in self._optimizers for parameter in optimizer_parameters(each)}
        self._updated([owner.source for owner in self._owners.values() if id(owner.source) not in trained])
        with torch.no_grad():
            if ema.use_buffers:
                pairs = zip(ema.module.buffers(), self._model.buffers(), strict=True)
                self._average((average, source, self._has_average) for average, source in pairs)
            else:
                for copied, source in zip(ema.module.buffers(), self._model.buffers(), strict=True):
                    copied.copy_(source)
            ema.n_averaged += 1
        self._has_average = True

    def _owners_of(self, parameters: Iterable[Tensor]) -> list[_AverageOwner]:
        parameters = list(parameters)
        if strange := {id(each) for each in parameters} - self._owners.keys() - self._elsewhere:
            self._pair()  # a parameter was added or replaced
            self._elsewhere |= strange - self._owners.keys()  # the optimizer has parameters of another model, too
        return [self._owners[id(each)] for each in parameters if id(each) in self._owners]

    def _pair(self) -> None:
        if (ema := self._ema()) is None:
            return
        before, self._owners = self._owners, {}
        for source, average in zip(self._model.parameters(), ema.module.parameters(), strict=True):
            known = before.get(id(source))
            if known is None or known.average is not average:
                known = _AverageOwner(
                    source, average, self, has_average=known.has_average if known else self._has_average
                )
            self._owners[id(source)] = known

    def _average(self, values: Iterable[tuple[Tensor, Tensor, bool]]) -> None:
        """Move averages towards new values as ``AveragedModel.update_parameters`` does, or copy the first values."""
        by_kind: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        for average, source, has_average in values:
            average, source = average.detach(), source.detach().to(average.device)
            if not has_average:
                average.copy_(source)
                continue
            averages, sources = by_kind.setdefault((average.device, average.dtype), ([], []))
            averages.append(average)
            sources.append(source)
        for averages, sources in by_kind.values():
            self._multi_avg_fn(averages, sources, 1)  # takes no count


def _state_of(attached: object) -> DearState:
    if isinstance(attached, DistributedDataParallel):
        attached = next((state for _, state in comm_hooks_of(attached) if isinstance(state, DearState)), attached)
    if isinstance(attached, DearState):
        return attached
    raise TypeError(
        "dx.Ema follows a model that is attached: pass what attach(ddp, optimizer) returned, without sync=, with which "
        f"ranks have parameters of their own; got {type(attached).__name__}"
    )
