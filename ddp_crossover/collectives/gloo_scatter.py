"""The reduce-scatter of a fusion group over gloo, see [Note: legs over gloo]."""

from __future__ import annotations

from torch import Tensor

from ddp_crossover.collectives.fusion_buffer import FusionBuffer
from ddp_crossover.collectives.gloo_leg import GlooCommContext, GlooLeg
from ddp_crossover.collectives.gloo_messages import Message, MessageKind, Slice, message_tag
from ddp_crossover.collectives.leg import ScatterLeg
from ddp_crossover.collectives.rank_order_sum import add_in_rank_order
from ddp_crossover.torch_internals.profiling import named_range


class GlooScatterLeg(GlooLeg, ScatterLeg):
    """A reduce-scatter, and the receives of the all-gather that will follow it.

    Attributes:
        is_announced: whether ``Link.announce`` announced it; its receives are then posted earlier than its sends.
        gather_receives: receives of the peers' reduced slices.
        sends: sends of both legs.
        incoming: memory for the slices of each peer, until they are added up.
        landing: the buffer that the gather leg sends from and receives into.
    """

    is_announced = False

    def __init__(self, context: GlooCommContext, iteration: int, group: int, buffer: FusionBuffer) -> None:
        super().__init__(context, f"scatter leg of fusion group {group}")
        self.iteration = iteration
        self.group = group
        self.buffer = self.landing = buffer
        self.gather_receives: list[Message] = []
        self.sends: list[Message] = []
        self.incoming: list[Tensor] = []
        self._incoming_parts: list[list[Tensor]] = []
        self._scatter_receives: list[Message] = []

    def shards(self) -> list[Tensor]:
        return self._slices_of(self._context.messages.rank)

    def start(self) -> None:
        """Queue the leg for the posting thread. Runs on the training thread."""
        context = self._context
        context.failures.check()
        self.times = context.meter.clock.leg_started("scatter", self.group)
        context.threads.posting.put(self.post)
        self._note_open()

    def post_receives(self) -> None:
        """Post the receives of the peers' slices. Runs on the posting thread."""
        messages = self._context.messages
        try:
            self._context.failures.check()
            shards = self.shards()
            numels = [shard.numel() for shard in shards]
            self.incoming = [self._context.scratch.allocate(sum(numels), shards[0].dtype) for _ in messages.peers]
            is_whole = len(numels) == 1
            self._incoming_parts = [[memory] if is_whole else list(memory.split(numels)) for memory in self.incoming]
            self._scatter_receives = messages.receive(
                [
                    Slice(peer, memory)
                    for peer, parts in zip(messages.peers, self._incoming_parts, strict=True)
                    for memory in parts
                ],
                message_tag(MessageKind.SCATTER, self.iteration, self.group),
            )
        except Exception as error:
            self._context.failures.record(self.label, error)

    def post(self) -> None:
        """Post the receives of both legs and the sends of this one. Runs on the posting thread."""
        if not self.is_announced:
            self.post_receives()
        context, messages = self._context, self._context.messages
        try:
            context.failures.check()
            with named_range(f"ddp_crossover::reduce_scatter[{self.group}]"):
                self.before_posting()
                slices = self._slices_for_peers(self.buffer)
                to_come = slices if self.landing is self.buffer else self._slices_for_peers(self.landing)
                # Safe before our sends: a peer sends its reduced slice only after it has received our slice.
                self.gather_receives = messages.receive(
                    to_come, message_tag(MessageKind.GATHER, self.iteration, self.group)
                )
                context.meter.clock.leg_posted(self.times)
                self.sends = messages.send(slices, message_tag(MessageKind.SCATTER, self.iteration, self.group))
        except Exception as error:
            self._end(error)
        else:
            context.threads.reduce(self._reduce)

    def before_posting(self) -> None:
        """Make the buffer ready to be sent. Runs on the posting thread."""

    def _reduce(self) -> None:
        """Add up the slices of all ranks. Runs on the reducing thread."""
        context = self._context
        try:
            context.failures.check()
            # A peer sends these slices as soon as its own backward has come so far.
            context.messages.wait(self._scatter_receives, self.label, is_proof=True)
            for own, *incoming in zip(self.shards(), *self._incoming_parts, strict=True):
                add_in_rank_order(
                    own, context.messages.rank, incoming, self.buffer.factor, in_fp32=context.sums_in_fp32
                )
            self._incoming_parts = []
            context.scratch.free(self.incoming)
            self.incoming = []
        except Exception as error:
            self._end(error)
        else:
            self._end(None)

    def _end(self, error: BaseException | None) -> None:
        super()._end(error)
        self._context.threads.posting.wake()  # its gather leg has become ready

    def gathered_slices(self) -> list[Tensor]:
        """This rank's slice of each part of the landing, which the gather leg sends."""
        return self.landing.slices(self._context.messages.rank, self._context.messages.world_size)

    def _slices_for_peers(self, buffer: FusionBuffer) -> list[Slice]:
        messages = self._context.messages
        return [Slice(peer, memory) for peer in messages.peers for memory in buffer.slices(peer, messages.world_size)]

    def _slices_of(self, rank: int) -> list[Tensor]:
        return self.buffer.slices(rank, self._context.messages.world_size)


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
