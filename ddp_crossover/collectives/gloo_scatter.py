"""The reduce-scatter of a fusion group over gloo, see [Note: legs over gloo]."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ddp_crossover.collectives.fusion_buffer import FusionBuffer
from ddp_crossover.collectives.gloo_leg import GlooCommContext, GlooLeg
from ddp_crossover.collectives.gloo_messages import Message, MessageKind, message_tag
from ddp_crossover.collectives.leg import ScatterLeg
from ddp_crossover.collectives.route import Route
from ddp_crossover.torch_internals.profiling import named_range

SCATTER_KINDS = (MessageKind.SCATTER, MessageKind.SCATTER_AGAIN)
GATHER_KINDS = (MessageKind.GATHER, MessageKind.GATHER_AGAIN)


class GlooScatterLeg(GlooLeg, ScatterLeg):
    """A reduce-scatter, and the receives of the all-gather that will follow it.

    Attributes:
        is_announced: whether ``Link.announce`` announced it; its receives are then posted earlier than its sends.
        route: the rounds of both legs.
        gather_receives: receives of each round of the gather leg.
        sends: sends of both legs.
    """

    is_announced = False

    def __init__(self, context: GlooCommContext, iteration: int, group: int, buffer: FusionBuffer) -> None:
        super().__init__(context, f"scatter leg of fusion group {group}")
        self.iteration = iteration
        self.group = group
        self.route = Route(buffer, context.nodes, context.scratch, sums_in_fp32=context.sums_in_fp32)
        self.gather_receives: list[list[Message]] = []
        self.sends: list[Message] = []
        self._receives: list[list[Message]] = []

    def take_memory(self, buffer: FusionBuffer, landing: FusionBuffer | None) -> None:
        """Use this memory, whose parts have the same sizes as those of the buffer that it was made for."""
        self.route.memory.move(buffer, landing)

    def note_sends(self, sends: Sequence[Message]) -> None:
        """Note sends from the buffer, of either leg, which end before it is written to again."""
        self.sends += sends

    def shards(self) -> list[Tensor]:
        messages = self._context.messages
        return self.route.memory.buffer.slices(self._context.nodes.shard_of[messages.rank], messages.world_size)

    def start(self) -> None:
        """Queue the leg for the posting thread. Runs on the training thread."""
        context = self._context
        context.failures.check()
        self.times = context.meter.clock.leg_started("scatter", self.group)
        context.threads.posting.put(self.post)
        self._note_open()

    def post_receives(self) -> None:
        """Post the receives of the first round. Runs on the posting thread."""
        try:
            self._context.failures.check()
            self._receives = [self._post_receives_of(0)]
        except Exception as error:
            self._context.failures.record(self.label, error)

    def post(self) -> None:
        """Post the other receives of both legs and the sends of the first round. Runs on the posting thread."""
        if not self.is_announced:
            self.post_receives()
        context = self._context
        try:
            context.failures.check()
            with named_range(f"ddp_crossover::reduce_scatter[{self.group}]"):
                self.before_posting()
                # Safe before our sends: a peer sends its reduced slice only after it has received our slice.
                self._receives += [self._post_receives_of(number) for number in range(1, len(self.route.scatter))]
                self.gather_receives = [
                    context.messages.receive(one.receives(), message_tag(kind, self.iteration, self.group))
                    for kind, one in zip(GATHER_KINDS, self.route.gather, strict=False)
                ]
                slices = self.route.scatter[0].sends()
                context.meter.clock.leg_posted(self.times)
                self.sends = context.messages.send(slices, message_tag(SCATTER_KINDS[0], self.iteration, self.group))
        except Exception as error:
            self._end(error)
        else:
            context.threads.reduce(self._reduce)

    def before_posting(self) -> None:
        """Make the buffer ready to be sent. Runs on the posting thread."""

    def _post_receives_of(self, number: int) -> list[Message]:
        tag = message_tag(SCATTER_KINDS[number], self.iteration, self.group)
        return self._context.messages.receive(self.route.scatter[number].receives(), tag)

    def _post_again(self) -> None:
        """Post the sends of the second round. Runs on the posting thread."""
        context = self._context
        try:
            context.failures.check()
            tag = message_tag(SCATTER_KINDS[1], self.iteration, self.group)
            with named_range(f"ddp_crossover::reduce_scatter[{self.group}]"):
                self.sends += context.messages.send(self.route.scatter[1].sends(), tag)
        except Exception as error:
            self._end(error)
        else:
            context.threads.reduce(lambda: self._reduce(1), 1)

    def _reduce(self, number: int = 0) -> None:
        """Finish a round. Runs on the reducing thread of that round."""
        context = self._context
        try:
            context.failures.check()
            # A peer sends the first slices as soon as its own backward has come so far, the next when its node has.
            context.messages.wait(self._receives[number], self.label, is_proof=number == 0)
            self.route.scatter[number].finish()
        except Exception as error:
            self._end(error)
            return
        if number + 1 < len(self.route.scatter):
            context.threads.posting.put(self._post_again)
        else:
            self._end(None)

    def _end(self, error: BaseException | None) -> None:
        super()._end(error)
        self._context.threads.posting.wake()  # its gather leg has become ready


class AnnouncedLegs:
    """Scatter legs whose receives were posted before the legs are started, so that faster peers can send already.

    Args:
        context: what all legs of the link share.

    Attributes:
        legs: the announced legs, by group.
    """

    def __init__(self, context: GlooCommContext) -> None:
        self.legs: dict[int, GlooScatterLeg] = {}
        self._context = context

    def post(self, iteration: int, group: int, buffer: FusionBuffer) -> None:
        """Post the receives of this group's scatter leg in this iteration."""
        self._context.failures.check()
        leg = self.legs[group] = GlooScatterLeg(self._context, iteration, group, buffer)
        leg.is_announced = True
        self._context.threads.posting.put(leg.post_receives)

    def take(self, group: int, iteration: int) -> GlooScatterLeg | None:
        """Remove and return the group's leg; None if it was not announced in this iteration."""
        leg = self.legs.pop(group, None)
        return leg if leg is not None and leg.iteration == iteration else None
