"""Blocks of 64 elements as 8-bit integers, each with a scale of 16 bits.

A block with the largest magnitude ``m`` has the scale ``s = m / 127``, rounded up to bfloat16, and the codes
``round(x / s)``, halves to even, from -127 to 127. So an element is off by at most ``s / 2``. The product of a code and
a scale has at most 15 significant bits: it is exact in fp32, and so is what remains of the element.

A block whose scale is below the normal numbers has the scale 0, and decodes to zeros. A block with an element that is
not finite has a scale that is not, and decodes to elements that are not.

Payload: all codes, then all scales; 66 bytes a block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ddp_crossover.addons.codes.codec import Codec, add_residual, chunk_numel

BLOCK_NUMEL = 64
LARGEST_CODE = 127
_SCALE_BYTES = torch.bfloat16.itemsize
SMALLEST_SCALE = torch.finfo(torch.bfloat16).tiny
# Of the 32 bits of a float, bfloat16 keeps the upper half: adding this to the bits before rounds up.
LOWER_HALF = 2**16 - 1
NAN_BITS = 0x7FC00000  # other NaN have larger bits, which could overflow


class BlockInt8(Codec):
    """The codec of ``wire_dtype=torch.int8``."""

    align_numel = BLOCK_NUMEL

    def payload_bytes(self, numel: int) -> int:
        assert numel % BLOCK_NUMEL == 0
        return numel + numel // BLOCK_NUMEL * _SCALE_BYTES

    def encode(self, values: Tensor, residual: Tensor | None, left_out: Tensor, payload: Tensor) -> None:
        codes, scales = codes_and_scales(payload)
        step = max(min(chunk_numel(values), values.numel()), 1)
        scratch = torch.empty(step, device=values.device)
        for low in range(0, values.numel(), step):
            part = slice(low, low + step)
            rest = left_out[part]
            add_residual(values[part], None if residual is None else residual[part], rest)
            blocks = slice(low // BLOCK_NUMEL, (low + step) // BLOCK_NUMEL)
            _encode_blocks(in_blocks(rest), in_blocks(codes[part]), scales[blocks], in_blocks(scratch[: len(rest)]))

    def decode(self, payload: Tensor, out: Tensor) -> None:
        codes, scales = codes_and_scales(payload)
        torch.mul(in_blocks(codes), scales.float().unsqueeze(1), out=in_blocks(out))

    def add(self, payload: Tensor, total: Tensor) -> None:
        codes, scales = codes_and_scales(payload)
        wide = scales.float().unsqueeze(1)
        step = chunk_numel(total)
        for low in range(0, total.numel(), step):
            part = slice(low, low + step)
            blocks = slice(low // BLOCK_NUMEL, (low + step) // BLOCK_NUMEL)
            in_blocks(total[part]).add_(in_blocks(codes[part]) * wide[blocks])

    def is_finite(self, payload: Tensor) -> Tensor:
        return codes_and_scales(payload)[1].isfinite().all()


def _encode_blocks(rest: Tensor, codes: Tensor, scales: Tensor, scratch: Tensor) -> None:
    """Encode ``rest``, of shape (blocks, 64), and leave in it what the code leaves out."""
    scale = torch.abs(rest, out=scratch).amax(1).div_(LARGEST_CODE)
    scale.view(torch.int32).clamp_(max=NAN_BITS).add_(LOWER_HALF).bitwise_and_(~LOWER_HALF)
    scale.masked_fill_(scale < SMALLEST_SCALE, 0.0)
    scales.view(torch.int16).copy_(scale.view(torch.int32) >> 16)  # as a cast, which gives NaN other bits by machine
    torch.div(rest, scale.clamp(min=SMALLEST_SCALE).unsqueeze(1), out=scratch).round_()
    codes.copy_(scratch)
    torch.addcmul(rest, scratch, scale.unsqueeze(1), value=-1, out=rest)


def codes_and_scales(payload: Tensor) -> tuple[Tensor, Tensor]:
    """The two parts of a payload: int8, and bfloat16, one for each block."""
    numel = payload.numel() // (BLOCK_NUMEL + _SCALE_BYTES) * BLOCK_NUMEL
    return payload[:numel].view(torch.int8), payload[numel:].view(torch.bfloat16)


def in_blocks(flat: Tensor) -> Tensor:
    """The same memory, of shape (blocks, 64)."""
    return flat.view(-1, BLOCK_NUMEL)
