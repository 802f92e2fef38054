"""DDP's buckets as they arrive under one plan: what is staged from where, and whether DDP has written there since."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ddp_crossover.fusion_buffers.staging import Staging, plan_staging
from ddp_crossover.parameters.slots import Slot
from ddp_crossover.torch_internals.ddp import GradBucket


class ArrivedBuckets:
    """The buckets of the latest backward.

    Args:
        slot_of: the slot of each parameter.
        arenas: the memory to which gradients are copied that do not travel in place.
    """

    def __init__(self, slot_of: Mapping[Tensor, Slot], arenas: Mapping[str, Tensor]) -> None:
        self._slot_of = slot_of
        self._arenas = arenas
        self._stagings: dict[int, Staging] = {}
        self._arrived: list[int] = []
        self._versions: dict[int, int] = {}

    def begin_backward(self) -> None:
        self._arrived.clear()

    def arrive(self, bucket: GradBucket, buffer: Tensor, parameters: list[Tensor]) -> Staging:
        """Note a bucket; returns how its gradients get into fusion buffers.

        Args:
            bucket: the bucket.
            buffer: its flat gradients.
            parameters: its parameters.
        """
        index = bucket.index()
        staging = self._stagings.get(index)
        if staging is None or not staging.fits(buffer, parameters):
            slots = [self._slot_of[parameter] for parameter in parameters]
            staging = self._stagings[index] = plan_staging(
                index, buffer.detach(), slots, parameters, bucket.gradients(), self._arenas
            )
        self._arrived.append(index)
        return staging

    def slots(self) -> set[Slot]:
        """The parameters whose gradients have arrived."""
        return {slot for index in self._arrived for slot in self._stagings[index].slots}

    def forget_absent(self) -> None:
        """Drop those that have not arrived, which DDP no longer has or has left out."""
        for index in self._stagings.keys() - set(self._arrived):
            del self._stagings[index]

    def note_versions(self) -> None:
        """Note what is in the buckets now, before DDP writes to them again."""
        self._versions = {index: staging.buffer._version for index, staging in self._stagings.items()}

    def is_overwritten(self, slot: Slot) -> bool:
        """Whether DDP has written into the slot's bucket since, as versions tell: legs use an alias."""
        if slot.place is None:
            return False
        staging = self._stagings.get(slot.place.bucket)
        return staging is not None and staging.buffer._version != self._versions.get(slot.place.bucket)

    def forget(self) -> None:
        """Drop all references to DDP's buckets, which would count as a script's."""
        self._stagings.clear()
        self._arrived.clear()
