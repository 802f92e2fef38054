"""An all-gather of a few numbers over gloo, as of norms, beside the legs of fusion groups."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ddp_crossover.comm.gloo_leg import GlooCommContext, GlooLeg
from ddp_crossover.comm.gloo_messages import Message, small_exchange_tag


class GlooSmallGather(GlooLeg):
    """An all-gather of small tensors, which overtakes all other legs."""

    def __init__(self, context: GlooCommContext, number: int, value: Tensor, label: str = "exchange of norms") -> None:
        super().__init__(context, label)
        messages = context.messages
        self.rows = value.new_empty((messages.world_size, *value.shape))
        self.rows[messages.rank] = value
        self._tag = small_exchange_tag(number)

    def start(self) -> None:
        """Queue the exchange for the posting thread. Runs on the training thread."""
        self._context.failures.check()
        self._context.threads.posting.put_urgent(self._post)
        self._note_open()

    def _post(self) -> None:
        """Post all messages. Runs on the posting thread."""
        messages = self._context.messages
        own = self.rows[messages.rank]
        try:
            posted = messages.receive([(peer, self.rows[peer]) for peer in messages.peers], self._tag)
            posted += messages.send([(peer, own) for peer in messages.peers], self._tag)
        except Exception as error:
            self.finish(error)
            return
        self._context.threads.wait_for_exchange(lambda: self._complete(posted))

    def _complete(self, posted: Sequence[Message]) -> None:
        """Wait for all messages. Runs on a waiting thread of its own."""
        try:
            self._context.messages.wait(posted, self.label)
        except Exception as error:
            self.finish(error)
        else:
            self.finish()
