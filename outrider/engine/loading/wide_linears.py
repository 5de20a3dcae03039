"""Linear layers of 16 bits that torch computes in float32, where the processor has no instructions for them.

There torch's own products of 16 bits take three to four times as long as those of float32, and the self check
would take most of a start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

MIN_ROWS = 8
"""For fewer rows the conversion of the weights takes longer than torch's own product."""
PART = 1 << 22
"""Numbers of a weight that are converted at once: 16 MB, which stay in the processor's cache."""


class WideLinears(TorchFunctionMode):
    """While it is entered, such layers on the CPU widen their weights, and round only their results."""

    def __init__(self) -> None:
        super().__init__()
        self._part = torch.empty(PART, dtype=torch.float32)
        """Part of a weight in float32. New memory for each would take as long as its conversion."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """See TorchFunctionMode."""
        if func is functional.linear and _is_slow(*args[:2]):
            return self._linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """See torch.nn.functional.linear."""
        rows, wide = max(1, PART // weight.shape[1]), input.float()
        product = torch.cat(
            [functional.linear(wide, self._widened(part)) for part in torch.split(weight, rows)], -1
        )
        return (product if bias is None else product + bias.float()).to(input.dtype)

    def _widened(self, part: Tensor) -> Tensor:
        return self._part[: part.numel()].view(part.shape).copy_(part)


def _is_slow(input: Tensor, weight: Tensor) -> bool:
    if weight.device.type != "cpu" or input.dtype != weight.dtype:
        return False
    if type(weight) not in (Tensor, torch.nn.Parameter):
        return False  # a quantized weight of a library, which multiplies in its own way
    if input.numel() < MIN_ROWS * input.shape[-1]:
        return False
    return weight.dtype.itemsize == 2 and not _has_instructions(weight.dtype)


@cache
def _has_instructions(dtype: torch.dtype) -> bool:
    """True if oneDNN multiplies 16 bits of this kind on this processor."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    mkldnn = torch.ops.mkldnn
    known = {
        torch.bfloat16: mkldnn._is_mkldnn_bf16_supported,
        torch.float16: mkldnn._is_mkldnn_fp16_supported,
    }
    return dtype in known and bool(known[dtype]())
