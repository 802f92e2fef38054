"""The all-gather of a fusion group over gloo, see [Note: legs over gloo], and that of small tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from ddp_crossover.collectives.gloo_leg import GlooCommContext, GlooLeg
from ddp_crossover.collectives.gloo_messages import Message, Slice, message_tag, small_exchange_tag
from ddp_crossover.collectives.gloo_scatter import GATHER_KINDS, GlooScatterLeg
from ddp_crossover.torch_internals.profiling import named_range


class GlooGatherLeg(GlooLeg):
    """An all-gather that starts when its scatter leg is done, and ends when our sends from the buffer are done, too.

    Args:
        context: what all legs of the link share.
        scatter: the scatter leg of the same group.
        urgency: of the legs that are ready, the one with the smallest urgency is posted first; None keeps the order
            of the calls.
        paced: whether to post it only when the link has almost nothing left to send.
        on_done: called when the leg has ended, with its error if it has failed.
    """

    is_gather = True
    is_posted = False

    def __init__(
        self,
        context: GlooCommContext,
        scatter: GlooScatterLeg,
        urgency: int | None = None,
        *,
        paced: bool = True,
        on_done: Callable[[BaseException | None], None] | None = None,
    ) -> None:
        super().__init__(context, f"gather leg of fusion group {scatter.group}")
        self.scatter = scatter
        self.urgency = urgency
        self.paced = paced
        self.group = scatter.group
        self._on_done = on_done

    def start(self) -> None:
        """Queue the leg for the posting thread. Runs on the training thread."""
        context = self._context
        context.failures.check()
        self.times = context.meter.clock.leg_started("gather", self.group)
        context.threads.posting.put_gather(self)
        self._note_open()

    def is_ready(self) -> bool:
        """Whether it can be posted, because its scatter leg is done."""
        return self.scatter.is_done()

    def post(self) -> None:
        """Send our reduced slice to all peers, or with nodes those of the first round. Runs on the posting thread."""
        self.is_posted = True
        try:
            self.scatter.wait()  # already done; raises the scatter leg's error, if any
            self._context.meter.clock.leg_posted(self.times)
            self._post_sends_of(0)
        except Exception as error:
            self._end(error)
        else:
            self._context.threads.wait(self._complete)

    def _post_sends_of(self, number: int) -> None:
        scatter = self.scatter
        tag = message_tag(GATHER_KINDS[number], scatter.iteration, self.group)
        with named_range(f"ddp_crossover::all_gather[{self.group}]"):
            scatter.note_sends(self._context.messages.send(scatter.route.gather[number].sends(), tag))

    def _post_again(self) -> None:
        """Send what the first round has brought. Runs on the posting thread."""
        try:
            self._post_sends_of(1)
        except Exception as error:
            self._end(error)
        else:
            self._context.threads.wait(lambda: self._complete(1), 1)

    def _complete(self, number: int = 0) -> None:
        """Wait for the peers' slices of a round, in the end for our sends. Runs on a waiting thread of its own."""
        context, scatter = self._context, self.scatter
        try:
            context.failures.check()
            context.messages.wait(scatter.gather_receives[number], self.label)
            scatter.route.gather[number].finish()
            if number + 1 < len(scatter.route.gather):
                context.threads.posting.put(self._post_again)
                return
            # After this leg the caller may write into the buffer: scale it, step in place, stage new gradients.
            context.messages.wait(scatter.sends, self.label)
            scatter.route.release()
            self.after_receiving()
        except Exception as error:
            self._end(error)
        else:
            self._end(None)

    def after_receiving(self) -> None:
        """Copy the gathered buffer to where it is needed. Runs on a waiting thread."""

    def finish(self, error: BaseException | None = None) -> None:
        super().finish(error)
        if self._on_done is not None:
            self._on_done(error)
            self._on_done = None  # close() may finish a leg again if a signal handler interrupted its start


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
            posted = messages.receive([Slice(peer, self.rows[peer]) for peer in messages.peers], self._tag)
            posted += messages.send([Slice(peer, own) for peer in messages.peers], self._tag)
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
