"""The cost model of a step: the link's time per leg, and the compute times of one model.

Pure numbers that other modules measure. ``schedule_simulator`` predicts the time of a step from them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

# TCP's share of the line rate: 1448 bytes of payload per frame of 1538 bytes on the wire (Ethernet, MTU 1500).
_TCP_PAYLOAD = 1448 / 1538
# Line rate in bit/s, latency in s. The latencies are round figures for a data centre, not measurements.
_PRESETS = {"10g": (10e9, 60e-6), "25g": (25e9, 40e-6), "100g": (100e9, 20e-6)}
_PRESET_PER_LEG_S = 30e-6

Exchange = Literal["peer", "ring"]


@dataclass(frozen=True)
class LinkModel:
    """The alpha-beta model of one rank's link, with two kinds of alpha.

    Attributes:
        latency_s: seconds from sending the last byte of a leg until its result can be used; the link is free meanwhile.
        per_leg_s: seconds for which a leg occupies the link in addition to its bytes.
        s_per_byte: seconds for which each byte that a rank sends occupies its link.
    """

    latency_s: float
    per_leg_s: float
    s_per_byte: float

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} of a LinkModel must be a finite number >= 0, got {value}")

    def leg_s(self, buffer_bytes: float, world_size: int) -> float:
        """How long one reduce-scatter or all-gather of a fusion buffer occupies the link, in seconds."""
        return self.per_leg_s + self.s_per_byte * buffer_bytes * (world_size - 1) / world_size

    def at_world_size(self, world_size: int, *, measured_at: int = 2, exchange: Exchange = "peer") -> LinkModel:
        """The same hardware with another number of ranks.

        Args:
            world_size: number of ranks to predict, at least 2.
            measured_at: number of ranks with which this model was measured, at least 2.
            exchange: ``"peer"``: every rank sends each peer its slice directly, as our gloo legs do. A leg then takes
                ``world_size - 1`` messages, so ``per_leg_s`` grows with it; the latency does not, since each slice
                takes one message. ``"ring"``: slices travel ``world_size - 1`` hops, as in NCCL's ring, so
                ``latency_s`` grows with it. Neither models congestion inside the network.

        Raises:
            ValueError: if ``world_size`` or ``measured_at`` is below 2.
        """
        if world_size < 2 or measured_at < 2:
            raise ValueError(f"a link needs 2 ranks or more, got {world_size} and measured_at={measured_at}")
        growth = (world_size - 1) / (measured_at - 1)
        if exchange == "ring":
            return replace(self, latency_s=self.latency_s * growth)
        return replace(self, per_leg_s=self.per_leg_s * growth)

    @classmethod
    def preset(cls, name: str) -> LinkModel:
        """``"10g"``, ``"25g"`` or ``"100g"`` Ethernet between two ranks: TCP at line rate, with assumed latencies."""
        bit_per_s, latency_s = _PRESETS[name]
        return cls(latency_s, _PRESET_PER_LEG_S, 8 / (bit_per_s * _TCP_PAYLOAD))

    @classmethod
    def fit(cls, lone: Sequence[tuple[int, float]], bursts: Sequence[tuple[int, int, float]]) -> LinkModel:
        """Fit a model to measurements: non-negative least squares of relative errors.

        Args:
            lone: legs with nothing else on the link: (bytes that a rank sent, seconds until the result was available).
            bursts: several legs at once: (legs, bytes that a rank sent in each, seconds until the last result).
                They separate ``per_leg_s`` from ``latency_s``, because a burst pays the latency once.

        Raises:
            ValueError: if the measurements do not determine all three numbers.
        """
        measured = [(1, sent_bytes, seconds) for sent_bytes, seconds in lone] + list(bursts)
        # Divide each row by its time, so that relative errors count, and each column by its norm, because bytes and
        # legs differ by six orders of magnitude.
        terms = np.array([(1.0, legs, legs * sent_bytes) for legs, sent_bytes, _ in measured]).reshape(-1, 3)
        terms /= np.array([seconds for _, _, seconds in measured]).reshape(-1, 1)
        norms = np.maximum(np.linalg.norm(terms, axis=0), np.finfo(float).tiny)
        if np.linalg.matrix_rank(terms / norms) < 3:
            raise ValueError("a link fit needs lone legs of two sizes and a burst of two legs or more")
        latency_s, per_leg_s, s_per_byte = _non_negative_least_squares(terms / norms) / norms
        return cls(float(latency_s), float(per_leg_s), float(s_per_byte))

    def to_json(self) -> dict[str, Any]:
        """A dict for ``json.dump``; :meth:`from_json` reads it."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> LinkModel:
        """The inverse of :meth:`to_json`."""
        return cls(float(data["latency_s"]), float(data["per_leg_s"]), float(data["s_per_byte"]))


def _non_negative_least_squares(matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    """The x >= 0 that minimizes ``|matrix @ x - 1|``; tries every set of zero unknowns, as there are only three."""
    target = np.ones(len(matrix))
    best, best_error = np.zeros(3), math.inf
    for size in (1, 2, 3):
        for kept in itertools.combinations(range(3), size):
            x = np.zeros(3)
            x[list(kept)] = np.linalg.lstsq(matrix[:, kept], target, rcond=None)[0]
            error = float(np.sum((matrix @ x - target) ** 2))
            if x.min() >= 0 and error < best_error:
                best, best_error = x, error
    return best


@dataclass(frozen=True)
class ComputeProfile:
    """Compute times of one training step in seconds, without waits for communication.

    Attributes:
        use_s: per parameter, time from the start of the forward until its first use.
        arrival_s: per parameter, time from the start of the backward until its gradient is staged.
        forward_s: length of the forward.
        backward_s: length of the backward.
        rest_s: time from the end of the backward until the next forward begins: optimizer call, data loading.
    """

    use_s: tuple[float, ...]
    arrival_s: tuple[float, ...]
    forward_s: float
    backward_s: float
    rest_s: float = 0.0

    def __post_init__(self) -> None:
        if len(self.use_s) != len(self.arrival_s):
            raise ValueError(
                f"use_s and arrival_s need one time per parameter: use_s has {len(self.use_s)}, "
                f"arrival_s {len(self.arrival_s)}"
            )
        times = (*self.use_s, *self.arrival_s, self.forward_s, self.backward_s, self.rest_s)
        if not all(0 <= time_s < math.inf for time_s in times):
            raise ValueError("every time of a ComputeProfile must be a finite number of seconds >= 0")

    @property
    def compute_s(self) -> float:
        """Length in seconds of a step that never waits for communication."""
        return self.forward_s + self.backward_s + self.rest_s

    def times(self, factor: float) -> ComputeProfile:
        """The same step on a machine that takes ``factor`` times as long."""
        return ComputeProfile(
            use_s=tuple(time_s * factor for time_s in self.use_s),
            arrival_s=tuple(time_s * factor for time_s in self.arrival_s),
            forward_s=self.forward_s * factor,
            backward_s=self.backward_s * factor,
            rest_s=self.rest_s * factor,
        )

    def to_json(self) -> dict[str, Any]:
        """A dict for ``json.dump``; :meth:`from_json` reads it."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ComputeProfile:
        """The inverse of :meth:`to_json`."""
        return cls(
            use_s=tuple(map(float, data["use_s"])),
            arrival_s=tuple(map(float, data["arrival_s"])),
            forward_s=float(data["forward_s"]),
            backward_s=float(data["backward_s"]),
            rest_s=float(data["rest_s"]),
        )
