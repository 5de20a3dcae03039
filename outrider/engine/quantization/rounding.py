"""Rounds weights to 8 or 4 bits, with a bfloat16 scale for each group of 32 numbers of a row."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from outrider.engine.quantization.weight import QuantizedWeight, quantized

GROUP = 32
"""Numbers of a row that share a scale."""
BITS = {"int8": 8, "int4": 4}
"""Bits by the name in settings."""


def rounded(weight: Tensor, bits: int) -> QuantizedWeight:
    """Round a weight [out, in] of floating-point numbers to codes around the middle of their range.

    The number of a group that is farthest from 0 gets the code farthest from the middle. With 4 bits this is
    code 0, because the range is uneven, and the scale gets the opposite sign. With 8 bits it is 127 above or
    below the middle.
    """
    exact = pad(weight.detach().float(), (0, -weight.shape[1] % GROUP)).view(len(weight), -1, GROUP)
    middle = 1 << (bits - 1)
    if bits == 4:
        largest = exact.gather(2, exact.abs().argmax(2, keepdim=True)).squeeze(2)
        scales = (largest / -middle).bfloat16()
    else:
        scales = (exact.abs().amax(2) / (middle - 1)).bfloat16()
    steps = torch.where(scales == 0, 1.0, scales.float())[..., None]
    codes = (exact / steps).round_().add_(middle).clamp_(0, 2 * middle - 1)
    return quantized(codes.to(torch.uint8).flatten(1)[:, : weight.shape[1]], scales, None, bits, GROUP)
