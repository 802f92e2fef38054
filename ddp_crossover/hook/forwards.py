"""Notices in which order a model's forward uses parameters. Applies updates before compiled code runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from ddp_crossover.pending.early_reads import EarlyReads
from ddp_crossover.pending.lazy_param import LazyParam
from ddp_crossover.pending.lazy_params import LazyParams
from ddp_crossover.report.stats import FallbackLog
from ddp_crossover.torch_internals.compiled import (
    call_around_compiled,
    called_by_compiled_code,
    is_compiled,
    on_compile_start,
)


class UseOrder:
    """Keeps the order of the latest forward that used at least as many parameters as the one kept before.

    Args:
        parameters: number of parameters.
    """

    def __init__(self, parameters: int) -> None:
        self._parameters = parameters
        self._now: list[LazyParam] = []
        self._latest: list[LazyParam] = []
        self.is_known = False

    def begin_forward(self) -> Callable[[LazyParam], None]:
        """Begin a forward; returns the callback for each parameter's first use since the last step."""
        self._now = []
        return self._now.append

    def end_forward(self) -> bool:
        """End the forward; returns whether it has used parameters in a new order.

        A forward that used fewer parameters, such as the second one of a step, does not change the order.
        """
        self.is_known = True
        if len(self._now) < len(self._latest) or self._now == self._latest:
            return False
        self._latest = self._now
        return True

    def sorted(self, lazies: Sequence[LazyParam]) -> list[LazyParam]:
        """Return all parameters in the order, or as they are given while it is not known."""
        if not self.is_known:
            return list(lazies)
        ranks = self.ranks()
        return sorted(lazies, key=lambda lazy: ranks[lazy.index])

    def ranks(self) -> list[int]:
        """Return each parameter's place in the order; -1, before all others, for a parameter not seen in use."""
        ranks = [-1] * self._parameters
        for place, lazy in enumerate(self._latest):
            ranks[lazy.index] = place
        return ranks


# Number of compilations after which parameters are taken for the cause: dynamo also compiles anew when shapes change,
# so a single compilation means nothing. It gives up after eight.
_COMPILED_AGAIN = 3


class CompiledCode:
    """Brings parameters up to date before compiled code uses them.

    Compiled code does not touch parameters, and dynamo would compile it once more for a ``PendingParameter``. So the
    parameters of a compiled module are brought up to date before it is called, and all parameters before a forward
    that is compiled as a whole. Other compiled functions are noticed when dynamo starts to compile them, which it does
    again and again because the class of a parameter changes.

    Args:
        model: the module inside of DDP.
        params: its parameters.
        early_reads: knows whether the model's forward is running.
        fallbacks: notified when compiled functions cost overlap.
        finish_gradients: waits for all pending gradients; returns whether any was pending.

    Attributes:
        needs_gradients: whether a compiled function, such as ``torch.compile(optimizer.step)``, reads gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        params: LazyParams,
        early_reads: EarlyReads,
        fallbacks: FallbackLog,
        finish_gradients: Callable[[], bool],
    ) -> None:
        self._model = model
        self._params = params
        self._early_reads = early_reads
        self._fallbacks = fallbacks
        self._known: dict[nn.Module, Callable[[], None]] = {}
        self._depth = 0  # number of nested calls of compiled modules under way
        self._finish_gradients = finish_gradients
        self._compiled_inside = self._compiled_outside = self._compiled_before_step = 0
        self.needs_gradients = False
        self._stop = on_compile_start(self._compiling)
        self._find()

    def before_forward(self) -> None:
        """Apply all updates before a forward with gradients, if compiled code may use parameters without a touch."""
        if self._compiled_inside >= _COMPILED_AGAIN or called_by_compiled_code():
            for lazy in self._params.armed():
                lazy.use()

    def remove(self) -> None:
        """Remove the wrappers of compiled modules, and the callback of dynamo."""
        self._stop()
        del self._stop, self._model
        for undo in reversed(self._known.values()):
            undo()
        self._known.clear()

    def _find(self) -> None:
        for module in self._model.modules():
            if module not in self._known and is_compiled(module):
                self._known[module] = self._touch_before(module)

    def _touch_before(self, module: nn.Module) -> Callable[[], None]:
        own = {id(parameter) for parameter in module.parameters()}
        lazies = [lazy for lazy in self._params.all if id(lazy.parameter) in own]

        def before() -> None:
            self._depth += 1
            for lazy in lazies:
                lazy.use()

        def after() -> None:
            self._depth -= 1

        return call_around_compiled(module, before, after)

    def _compiling(self) -> None:
        if not self._early_reads.is_inside_forward and self._finish_gradients():
            self._compiled_before_step += 1
            if self._compiled_before_step == _COMPILED_AGAIN:
                self.needs_gradients = True
                self._fallbacks.note(
                    "a compiled function runs between backward and optimizer.step() and may read gradients, so "
                    "backward waits for all of them. To overlap them, leave optimizer.step() and clipping uncompiled"
                )
        if not self._params.armed():
            return
        if self._early_reads.is_inside_forward:
            if not self._depth:
                self._find()
                self._compiled_inside += 1
                if self._compiled_inside == _COMPILED_AGAIN:
                    self._fallbacks.note(
                        "forward calls a compiled function, outside of compiled modules, that uses parameters, so all "
                        "updates are applied before forward begins. To overlap them, compile the modules instead"
                    )
        else:
            self._compiled_outside += 1
            if self._compiled_outside == _COMPILED_AGAIN:
                self._params.make_none_lazy(
                    "may be used by a compiled function between optimizer.step() and the next forward. Leave that "
                    "function uncompiled to have updates deferred"
                )
        self._params.use_all()
