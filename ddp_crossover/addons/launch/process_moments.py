"""The moments of all training in this process, whoever builds its models and optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ddp_crossover.moments import Follower, Followers


class ProcessMoments:
    """Hears of every optimizer's ``step()``; has hooks only while somebody follows.

    Attributes:
        followers: who is told. What watches models tells them of a model's first training forwards.
    """

    def __init__(self) -> None:
        self.followers = Followers()
        self._handles: dict[str, RemovableHandle] = {}

    def follow(self, follower: Follower) -> None:
        """Tell ``follower`` from now on, around the others."""
        self.followers.wrap(follower)
        self._listen()

    def leave(self, follower: Follower) -> None:
        """Tell ``follower`` no more; nothing happens if it is not told. Not to be called in a ``step()``."""
        self.followers.remove(follower)
        self._listen()

    def _listen(self) -> None:
        self._have("step_begins", lambda: register_optimizer_step_pre_hook(self._step_begins))
        self._have("step_ends", lambda: register_optimizer_step_post_hook(self._step_ends))

    def _have(self, moment: str, register: Callable[[], RemovableHandle]) -> None:
        if self.followers.hears(moment) and moment not in self._handles:
            self._handles[moment] = register()
        elif not self.followers.hears(moment) and moment in self._handles:
            self._handles.pop(moment).remove()

    def _step_begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.followers.step_begins(optimizer)

    def _step_ends(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.followers.step_ends(optimizer)


PROCESS_MOMENTS = ProcessMoments()
