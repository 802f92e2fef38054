"""How one fusion buffer is coded, and what its codes have left out, which later ones make up for: error feedback.

[Note: error feedback]
A rank sends each peer a code of its gradients of the peer's slice plus its residual; what that code leaves out is the
residual of the next step. The owner of a slice adds its own gradients as they are, and sends a code of the sum; what
that leaves out is its residual of its own slice. Every rank, the owner too, goes on with the decoded sum, so parameters
are the same everywhere. All decoded sums plus all residuals are the sum of all gradients, but for the rounding of
additions. It does not matter which rank has the residual of an element, so a rank needs one number for each element,
also where slices change hands. Inside of a node nothing is coded: a rank gives what it has left out of the slices of
others there away with its gradients.

Residuals are taken over if all of a step's sums are finite, which all ranks see alike. Else the step is left out by a
loss scaler, or training is lost anyway. So old and new residuals are both kept until then.

Source: error feedback in both directions, DoubleSqueeze (Tang et al., ICML 2019, arXiv 1905.05957).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ddp_crossover.addons.codes.codec import Codec, add_residual, all_finite


class BeforeAfter(NamedTuple):
    """State of a rank that a step changes, flat, fp32, one number for each element of a fusion buffer.

    Attributes:
        before: the state before the step.
        after: the state after it.
    """

    before: Tensor
    after: Tensor

    def of(self, low: int, high: int) -> BeforeAfter:
        return BeforeAfter(self.before[low:high], self.after[low:high])


class Coding:
    """The codecs of a fusion buffer's legs, with what they leave out.

    Args:
        scatter: codec of scatter legs.
        gather: codec of gather legs; None sends sums as they are.

    Attributes:
        finite: 0-dim tensors that tell whether the sums that this rank has seen in this step are finite.
        payload: code of this rank's sums, which its gather leg sends.
    """

    def __init__(self, scatter: Codec, gather: Codec | None) -> None:
        self.gather = gather
        self.begin_step(scatter, None)

    def begin_step(self, scatter: Codec, residual: BeforeAfter | None) -> None:
        """Begin the next step.

        Args:
            scatter: codec of the scatter leg.
            residual: the residuals; None without error feedback.
        """
        self.scatter = scatter
        self.finite: list[Tensor] = []
        self.payload: Tensor | None = None
        self._residual = residual

    def encode(self, values: Tensor, low: int, high: int, payload: Tensor) -> None:
        """Write the code of this rank's gradients of a slice.

        Args:
            values: the gradients.
            low, high: their range in the fusion buffer.
            payload: gets the code.
        """
        residual = self._residual_of(low, high)
        left_out = torch.empty_like(values) if residual is None else residual.after
        self.scatter.encode(values, None if residual is None else residual.before, left_out, payload)

    def hand_over(self, values: Tensor, low: int, high: int) -> None:
        """Add what this rank has left out of a slice that another rank of its node codes now to its gradients of it.

        Slices change hands when plans do.

        Args:
            values: the gradients, which go to that rank as they are.
            low, high: their range in the fusion buffer.
        """
        if self._residual is not None:
            residual = self._residual.of(low, high)
            values.add_(residual.before)
            residual.after.zero_()

    def own_term(self, values: Tensor, low: int, high: int, *, in_place: bool) -> Tensor:
        """This rank's term of the sum of its own slice; in the memory of ``values`` or not."""
        residual = self._residual_of(low, high)
        if residual is None:
            return values if in_place else values.clone()
        term = values if in_place else residual.after
        add_residual(values, residual.before, term)
        return term

    def encode_sum(self, total: Tensor, low: int, high: int, payload: Tensor | None) -> None:
        """Write the code of the sum of this rank's slice, and replace the sum by what the code stands for.

        Args:
            total: the sum.
            low, high: its range in the fusion buffer.
            payload: gets the code; None without a codec.
        """
        residual = self._residual_of(low, high)
        if self.gather is None or payload is None:
            if residual is not None:
                residual.after.zero_()
            self.note(total)
            return
        left_out = torch.empty_like(total) if residual is None else residual.after
        self.gather.encode_sum(total, left_out, payload)
        self.payload = payload
        self.finite.append(self.gather.is_finite(payload))

    def decode_sum(self, payload: Tensor, out: Tensor) -> None:
        """Write the sum of a slice, which its owner has sent, into ``out``."""
        assert self.gather is not None
        self.gather.decode(payload, out)
        self.finite.append(self.gather.is_finite(payload))

    def note(self, total: Tensor) -> None:
        """Note sums that travel as they are."""
        self.finite.append(all_finite(total))

    def without_residuals(self) -> Coding:
        """The same wire, for values that do not count."""
        return Coding(self.scatter, self.gather)

    def _residual_of(self, low: int, high: int) -> BeforeAfter | None:
        return None if self._residual is None else self._residual.of(low, high)
