"""What one rank's parameters and the mean over ranks become when ranks share what they have learned.

[Note: delta merge]
shared: the parameters as all ranks had them after the last merge, kept by each rank.
sent: this rank's parameters when it sent how far it had come from ``shared``. The mean of that arrives some steps
    later. A merge moves ``shared`` by the mean, and this rank's parameters to ``shared`` plus what it has learned since
    it sent: x <- shared + (x - sent). So the mean over ranks loses nothing that was learned while the mean was on the
    way.

Where only some ranks share in a round, no parameters are those of all, and ``shared`` stays where it is: it is what
all ranks subtract before they send, and add again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from ddp_crossover.addons.codes.feedback import Feedback
from ddp_crossover.addons.relaxed.policy import Policy


class Exchange(Protocol):
    """Brings one tensor for each parameter, made of those of several ranks."""

    @property
    def feedback(self) -> Feedback | None:
        """Memory for what codes leave out; None without codes."""

    @property
    def sent_bytes(self) -> int:
        """What this rank has sent."""

    def start(self, tensors: Iterable[Tensor]) -> None:
        """Send this rank's tensors, which may be overwritten. All ranks must call it."""

    def finish(self) -> Sequence[Tensor]:
        """Wait for the result, which is the same on all ranks, and valid until the next start."""

    def bring(self, means: Sequence[Tensor]) -> None:
        """Have :meth:`finish` return what an earlier run has received."""


class DeltaMerge:
    """Sends a rank's parameters, and merges what comes.

    Args:
        parameters: the parameters.
        policy: what is done with a mean.
        exchanges: with whom this rank shares, in turn.
        ranks: number of independent sets of parameters in a mean.

    Attributes:
        means: how often this rank has merged.
    """

    def __init__(
        self, parameters: Sequence[Parameter], policy: Policy, exchanges: Sequence[Exchange], ranks: int
    ) -> None:
        self._parameters = parameters
        self._policy = policy
        self._exchanges = exchanges
        self._ranks = ranks
        self.means = 0
        # Sums of squares of each parameter. Who wants to know the divergence waits for them, and no merge does.
        self._far: list[Tensor] = []
        self._norm: list[Tensor] = []
        self._shared: list[Tensor] = []
        self._memories: list[list[Tensor]] = []
        self._sent: list[Tensor] | None = None

    def begin(self) -> None:
        """Take the parameters for those that all ranks share, the first time."""
        if self._shared:
            return
        self._shared = [parameter.detach().clone() for parameter in self._parameters]
        self._memories = [[torch.zeros_like(shared) for _ in range(self._policy.memories)] for shared in self._shared]

    @property
    def is_under_way(self) -> bool:
        """Whether a mean has been sent and not merged."""
        return self._sent is not None

    @property
    def sent_bytes(self) -> int:
        """What this rank has sent for means."""
        return sum(exchange.sent_bytes for exchange in self._exchanges)

    @property
    def _exchange(self) -> Exchange:
        return self._exchanges[self.means % len(self._exchanges)]

    @torch.no_grad()
    def send(self) -> None:
        """Send how far this rank has come. A collective of the ranks that share in this round."""
        self._sent = [parameter.detach().clone() for parameter in self._parameters]
        self._exchange.start(sent - shared for sent, shared in zip(self._sent, self._shared, strict=True))

    @torch.no_grad()
    def merge(self) -> None:
        """Wait for the mean, and move this rank's parameters."""
        assert self._sent is not None
        far: list[Tensor] = []
        norm: list[Tensor] = []
        for parameter, sent, shared, mean, memories in zip(
            self._parameters, self._sent, self._shared, self._exchange.finish(), self._memories, strict=True
        ):
            mean = mean.to(shared.dtype)
            base = shared + mean
            far.append((sent - base).square().sum())
            norm.append(base.square().sum())
            if not self._is_partial:
                self._policy.advance(shared, mean, memories)
                base = shared
            parameter.copy_(self._policy.merged(parameter, sent, base, self._ranks))
        self._far, self._norm = far, norm
        self._sent = None
        self.means += 1

    @property
    def divergence(self) -> float:
        """How far its parameters were from the last mean, relative to its norm. Waits for the device."""
        far, norm = (sum(map(float, squares)) for squares in (self._far, self._norm))
        return float((far / norm) ** 0.5) if norm else 0.0

    @torch.no_grad()
    def consolidate(self) -> None:
        """Give all ranks the mean, bit for bit the same. A collective of all ranks.

        What they share stays where it is, so the next merge moves it by the same mean as without this.
        """
        if self._sent is not None:
            self.merge()
        for _ in self._exchanges:  # once along each dimension of a grid, beginning with any, is the mean of all
            self.send()
            for parameter, shared, mean in zip(self._parameters, self._shared, self._exchange.finish(), strict=True):
                parameter.copy_(shared + mean.to(shared.dtype))
            self._sent = None
            self.means += 1
        if self._is_partial:  # differences from it shall not grow for ever
            for parameter, shared in zip(self._parameters, self._shared, strict=True):
                shared.copy_(parameter)

    @property
    def _is_partial(self) -> bool:
        return len(self._exchanges) > 1

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """This rank's part. Waits for what is under way, which all ranks have sent; no collective."""
        self.begin()
        arrived = [mean.clone() for mean in self._exchange.finish()] if self._sent is not None else []
        feedback = self._exchange.feedback
        return {
            "means": self.means,
            "shared": [tensor.clone() for tensor in self._shared],
            "memories": [[tensor.clone() for tensor in memories] for memories in self._memories],
            "sent": None if self._sent is None else [tensor.clone() for tensor in self._sent],
            "arrived": arrived,
            "feedback": None if feedback is None else feedback.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` has returned on the same rank."""
        if self._sent is not None:
            self._exchange.finish()
        self.begin()
        self.means = state["means"]
        for own, saved in zip(self._shared, state["shared"], strict=True):
            own.copy_(saved)
        for own_memories, saved_memories in zip(self._memories, state["memories"], strict=True):
            for own, saved in zip(own_memories, saved_memories, strict=True):
                own.copy_(saved)
        self._sent = None if state["sent"] is None else [tensor.clone() for tensor in state["sent"]]
        if self._sent is not None:
            self._exchange.bring(state["arrived"])
        if self._exchange.feedback is not None:
            self._exchange.feedback.load_state_dict(state["feedback"])
