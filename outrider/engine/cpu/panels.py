"""Weights as the kernels read them: in panels of two vectors of columns of W^T, each from front to back.

A step is 4 bytes of each row of W: two numbers of 16 bits or one float32. A panel holds its steps one after
the other, and a step holds the 4 bytes of each column; of float16, first one number of each column, then the
other one (see `outrider.engine.cpu.kernels.steps`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from outrider.engine.cpu.processor import LANES

PANEL = 2 * LANES
"""Columns of a panel. In a gated panel the first half belong to the gate, the second half are the matching
columns of up."""
STEP_BYTES = 4
"""Bytes of a row of weights that one step takes."""
STRIDE = STEP_BYTES * PANEL
"""Bytes of a step of a panel, and of a row of its sums, which are float32."""
_ALIGNMENT = 64


def in_panels(weight: Tensor, multiple: int = 1) -> Tensor:
    """[out, in] -> [panels, steps, PANEL, numbers of a step], with zeros after `out` and `in`; of float16 the
    last two axes are in the other order.

    The steps are a multiple of `multiple`.
    """
    per_step = STEP_BYTES // weight.itemsize
    padded = _padded(weight, -weight.shape[0] % PANEL, -weight.shape[1] % (per_step * multiple))
    if weight.dtype == torch.float16:
        steps = padded.view(-1, PANEL, padded.shape[1] // per_step, per_step).permute(0, 2, 3, 1)
        return aligned(steps)
    whole = padded.view(torch.int32)  # a step's numbers stay together, so torch moves them as one
    moved = aligned(whole.view(-1, PANEL, whole.shape[1]).transpose(1, 2))
    return moved.view(weight.dtype).view(*moved.shape, per_step)


def _padded(weight: Tensor, rows: int, columns: int) -> Tensor:
    """The weight followed by `rows` rows and `columns` columns of zeros, contiguous."""
    return pad(weight, (0, columns, 0, rows)) if rows or columns else weight.contiguous()


def bias_in_panels(bias: Tensor) -> Tensor:
    """[out] -> [panels * PANEL] float32, with zeros after `out`."""
    return aligned(pad(bias.float(), (0, -len(bias) % PANEL)))


def paired(values: Tensor) -> Tensor:
    """[2 F, ...] -> [panels * PANEL, ...]: half a panel of the gate, the same columns of up, and so on."""
    half, rest = values.shape[0] // 2, values.shape[1:]
    width = PANEL // 2
    count = -(-half // width)
    filled = values.view(2, half, *rest)
    if half % width:
        filled = values.new_zeros(2, count * width, *rest)
        filled[:, :half] = values.view(2, half, *rest)
    return filled.view(2, count, width, *rest).transpose(0, 1).reshape(count * PANEL, *rest)


def aligned(values: Tensor) -> Tensor:
    """A contiguous copy whose storage begins at a multiple of 64 bytes, as torch allocates it."""
    copy = values.clone(memory_format=torch.contiguous_format)
    assert copy.data_ptr() % _ALIGNMENT == 0, "torch aligns its storage to 64 bytes"
    return copy
