"""The moments of a model's training: one object hears of them, and tells its followers in a fixed order.

Only this module hooks a model's forward and its optimizers' ``step()`` in order to see, while somebody follows; models
that are not attached to have ``launch/process_moments.py``. Hooks of others decide something: they take the place of a
step, a gradient or a read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddp_crossover.hooks import Hook
from ddp_crossover.torch_internals.compiled import call_around_compiled, is_compiled
from ddp_crossover.torch_internals.dispatch import parts_of_output
from ddp_crossover.torch_internals.optimizers import has_hooks
from ddp_crossover.walks import walk

# Takes what is to be called whenever a backward comes to the output of a forward.
BeforeBackward = Callable[[Callable[[], None]], object]

_NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


class Follower:
    """Is told of the moments of one model's training. What it does not override is not told, and costs nothing."""

    def forward_begins(self, ddp: DistributedDataParallel) -> None:
        """A forward of the model begins."""

    def compute_begins(self) -> None:
        """The forward of the module inside of DDP begins, behind DDP's broadcast of buffers."""

    def forward_ends(self, ddp: DistributedDataParallel, output: Any, before_backward: BeforeBackward) -> None:
        """A forward of the model has ended; ``output`` is None if it has raised."""

    def bucket_arrives(self, parameters: Sequence[Tensor], *, is_first: bool) -> None:
        """DDP hands over the gradients of these parameters, ``is_first`` of a backward."""

    def backward_ends(self) -> None:
        """All gradients of a backward that reduces have been computed."""

    def step_begins(self, optimizer: Optimizer) -> None:
        """An optimizer's ``step()`` begins."""

    def step_ends(self, optimizer: Optimizer) -> None:
        """An optimizer's ``step()`` has returned."""

    def waiting(self, what: Hashable) -> contextlib.AbstractContextManager[None]:
        """The context in which compute waits for other ranks or for another job; ``what`` is the same in each step."""
        return _NOTHING


_MOMENTS = [name for name in vars(Follower) if not name.startswith("_")]


class Followers(Follower):
    """Tells several. They nest: the first is told of what begins before the others, and of what ends after them."""

    def __init__(self) -> None:
        self._all: tuple[Follower, ...] = ()
        self._tell: dict[str, tuple[Callable[..., Any], ...]] = dict.fromkeys(_MOMENTS, ())

    def wrap(self, follower: Follower) -> None:
        """Tell this one as well, around the others."""
        self._use((follower, *self._all))

    def fill(self, follower: Follower) -> None:
        """Tell this one as well, inside of the others."""
        self._use((*self._all, follower))

    def remove(self, follower: Follower) -> None:
        """Tell this one no more; nothing happens if it is not told."""
        self._use(tuple(one for one in self._all if one is not follower))

    def hears(self, moment: str) -> bool:
        """Whether anybody is told of this moment."""
        return bool(self._tell[moment])

    def _use(self, followers: tuple[Follower, ...]) -> None:
        self._all = followers
        for moment in _MOMENTS:
            unheard = getattr(Follower, moment)
            order = reversed(followers) if moment.endswith("_ends") else followers
            self._tell[moment] = tuple(
                getattr(one, moment) for one in order if getattr(type(one), moment) is not unheard
            )

    def forward_begins(self, ddp: DistributedDataParallel) -> None:
        for tell in self._tell["forward_begins"]:
            tell(ddp)

    def compute_begins(self) -> None:
        for tell in self._tell["compute_begins"]:
            tell()

    def forward_ends(self, ddp: DistributedDataParallel, output: Any, before_backward: BeforeBackward) -> None:
        for tell in self._tell["forward_ends"]:
            tell(ddp, output, before_backward)

    def bucket_arrives(self, parameters: Sequence[Tensor], *, is_first: bool) -> None:
        for tell in self._tell["bucket_arrives"]:
            tell(parameters, is_first=is_first)

    def backward_ends(self) -> None:
        for tell in self._tell["backward_ends"]:
            tell()

    def step_begins(self, optimizer: Optimizer) -> None:
        for tell in self._tell["step_begins"]:
            tell(optimizer)

    def step_ends(self, optimizer: Optimizer) -> None:
        for tell in self._tell["step_ends"]:
            tell(optimizer)

    def waiting(self, what: Hashable) -> contextlib.AbstractContextManager[None]:
        return self._waiting(what) if self._tell["waiting"] else _NOTHING

    @contextlib.contextmanager
    def _waiting(self, what: Hashable) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for context in self._tell["waiting"]:
                stack.enter_context(context(what))
            yield


class Moments(Hook):
    """Hears of the moments of one model's training.

    A forward has an outside, a call of the model with the user's hooks, and an inside, in which it computes; so has a
    backward. Followers *around* are told of the whole. Those *inside* see compute alone: what reduces the gradients
    tells them, which knows when its own part in a forward or a backward begins and ends.

    Args:
        ddp: the model.
        optimizers: its optimizers.

    Attributes:
        around: tells those around.
        inside: tells those inside.
    """

    def __init__(self, ddp: DistributedDataParallel, optimizers: Sequence[Optimizer]) -> None:
        # Weak: DDP's C++ reducer, which is opaque to the garbage collector, may hold this object.
        self._ddp = weakref.ref(ddp)
        self._optimizers = list(optimizers)
        self.around = Followers()
        self.inside = Followers()
        self._undo: dict[str, list[Callable[[], None]]] = {}

    @property
    def model_if_there(self) -> DistributedDataParallel | None:
        """The model; None if it is gone."""
        return self._ddp()

    @property
    def model(self) -> DistributedDataParallel:
        """The model. Raises RuntimeError if it is gone."""
        ddp = self._ddp()
        if ddp is None:
            raise RuntimeError("the model of this state is gone: keep it for as long as you use its state")
        return ddp

    @property
    def unheard(self) -> list[Optimizer]:
        """The optimizers of whose steps nobody can be told, because they do not call ``Optimizer.__init__()``."""
        return [optimizer for optimizer in self._optimizers if not has_hooks(optimizer)]

    def follow(self, follower: Follower, *, inside: bool = False) -> None:
        """Tell ``follower`` from now on: around all others, or with ``inside``, inside of all others."""
        if inside:
            self.inside.fill(follower)
        else:
            self.around.wrap(follower)
        self._listen()

    def leave(self, follower: Follower) -> None:
        """Tell ``follower`` no more; nothing happens if it is not told."""
        self.inside.remove(follower)
        self.around.remove(follower)
        self._listen()

    def bucket_arrives(self, parameters: Sequence[Tensor], *, is_first: bool) -> None:
        """Tell all of a bucket."""
        self.around.bucket_arrives(parameters, is_first=is_first)
        self.inside.bucket_arrives(parameters, is_first=is_first)

    def watch_forwards(self, on_begin: Callable[[], None], on_end: Callable[[bool, Any], None]) -> ForwardWatch:
        """Call these for what reduces the gradients, which has to know of each forward, however it is called."""
        return ForwardWatch(self.model, on_begin, on_end)

    # Hooks, each for as long as somebody follows.

    def _listen(self) -> None:
        """Have the hooks that are needed."""
        around, inside = self.around, self.inside
        self._have("call", around.hears("forward_begins") or around.hears("forward_ends"), self._hear_calls)
        self._have("compute", around.hears("compute_begins") or inside.hears("compute_begins"), self._hear_compute)
        self._have("steps", around.hears("step_begins") or around.hears("step_ends"), self._hear_steps)

    def _have(self, hooks: str, are_needed: bool, install: Callable[[], list[Callable[[], None]]]) -> None:
        if are_needed and hooks not in self._undo:
            self._undo[hooks] = install()
        elif not are_needed:
            for undo in self._undo.pop(hooks, ()):
                undo()

    def _hear_calls(self) -> list[Callable[[], None]]:
        # Prepended, because the user's pre-hooks may touch parameters, whose updates are part of the whole.
        begins, ends = torch.compiler.disable(self._call_begins), torch.compiler.disable(self._call_ends)
        return [
            self.model.register_forward_pre_hook(begins, prepend=True).remove,
            self.model.register_forward_hook(ends, always_call=True).remove,
        ]

    def _hear_compute(self) -> list[Callable[[], None]]:
        return [call_before_module(self.model.module, self._compute_begins)]

    def _hear_steps(self) -> list[Callable[[], None]]:
        undo: list[Callable[[], None]] = []
        for optimizer in filter(has_hooks, self._optimizers):
            undo.append(optimizer.register_step_pre_hook(self._step_begins).remove)
            undo.append(optimizer.register_step_post_hook(self._step_ends).remove)
        return undo

    def _call_begins(self, ddp: nn.Module, args: Any) -> None:
        assert isinstance(ddp, DistributedDataParallel)
        self.around.forward_begins(ddp)

    def _call_ends(self, ddp: nn.Module, args: Any, output: Any) -> None:
        assert isinstance(ddp, DistributedDataParallel)
        self.around.forward_ends(ddp, output, functools.partial(call_before_backward, output))

    def _compute_begins(self) -> None:
        self.around.compute_begins()
        self.inside.compute_begins()

    def _step_begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.around.step_begins(optimizer)

    def _step_ends(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.around.step_ends(optimizer)


def call_before_backward(output: Any, callback: Callable[[], None]) -> bool:
    """Call ``callback`` whenever a backward comes to a tensor in a forward's output.

    A backward may come to the model in another way, through a tensor that the script has found elsewhere.

    Returns:
        Whether there is such a tensor.
    """

    def call(gradients: tuple[Tensor, ...]) -> None:
        callback()

    nodes = set(_nodes(output))
    for node in nodes:
        node.register_prehook(call)
    return bool(nodes)


def _nodes(output: Any) -> Iterator[Node]:
    for leaf in walk(output, _parts_of):
        if isinstance(leaf, Tensor):
            # An operator that works in place on a view gives it another node, but not what it is a view of.
            for tensor in (leaf, leaf._base if leaf._is_view() else None):
                if tensor is not None and tensor.grad_fn is not None:
                    yield tensor.grad_fn


def _parts_of(output: Any) -> list[Any]:
    found = parts_of_output(output)
    if not found and dataclasses.is_dataclass(output) and not isinstance(output, type):
        return [getattr(output, field.name, None) for field in dataclasses.fields(output)]
    return found


def call_before_module(module: nn.Module, run: Callable[[], None]) -> Callable[[], None]:
    """Run ``run`` before each forward of a module, ahead of the user's hooks; returns the undo function."""
    if is_compiled(module):
        return call_around_compiled(module, run)
    return module.register_forward_pre_hook(_BeforeModule(run), prepend=True).remove


class _BeforeModule(Hook):
    """Forward pre-hook; breaks the graph if its module is compiled as part of another."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run
        self._run_eagerly = torch.compiler.disable(run)

    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            self._run_eagerly()
        else:
            self._run()


class ForwardWatch(Hook):
    """Replaces the DDP module's ``forward`` to report when it begins and ends, even if module hooks do not run.

    Args:
        ddp: the model.
        on_begin: called before each forward.
        on_end: called after each forward, with whether it returned, and what it returned.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        on_begin: Callable[[], None],
        on_end: Callable[[bool, Any], None],
    ) -> None:
        self._ddp = weakref.ref(ddp)
        # Keep both out of compiled graphs, because what they decide changes from one forward to the next.
        self._on_begin = torch.compiler.disable(on_begin)
        self._on_end = torch.compiler.disable(on_end)
        self._forward = vars(ddp).get("forward")  # set if other code has replaced it on the instance
        vars(ddp)["forward"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward."""
        ddp = self._ddp()
        assert ddp is not None  # the model is running
        self._on_begin()
        returned, output = False, None
        try:
            output = self._forward(*args, **kwargs) if self._forward else type(ddp).forward(ddp, *args, **kwargs)
            returned = True
            return output
        finally:
            self._on_end(returned, output)

    def remove(self) -> None:
        """Restore the model's own forward."""
        if (ddp := self._ddp()) is not None and vars(ddp).get("forward") is self:
            del ddp.forward
            if self._forward is not None:
                vars(ddp)["forward"] = self._forward
        self._on_begin, self._on_end = _nothing, _nothing  # other code may have wrapped this object and still call it


def _nothing(*_: object) -> None:
    pass
