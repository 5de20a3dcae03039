"""Arithmetic of a device in Triton's interpreter.

It keeps numbers of bfloat16 as integers and would add those, and it cuts off what becomes one. Here both
operands are widened to float32, and results are rounded, as a device does it. Its products are numpy's, which
add up the last rows of a tile in another order; here, as on a device, every row is added up like the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


def mend() -> None:
    """Replace the interpreter's products, elementwise operations of two operands, and rounding."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    original: Callable[..., Any] = InterpreterBuilder.binary_op
    truncate: Callable[..., Any] = InterpreterBuilder.create_fp_trunc

    def binary_op(self: Any, left: Any, right: Any, operation: Callable[..., Any]) -> Any:
        if {left.dtype.scalar, right.dtype.scalar} != {tl.bfloat16}:
            return original(self, left, right, operation)
        result = operation(widened(left.data), widened(right.data))
        data = result if result.dtype == np.bool_ else rounded(result)
        return TensorHandle(data, left.dtype.scalar)

    def create_dot(self: Any, left: Any, right: Any, added: Any, *_: Any) -> Any:
        parts = [
            widened(each.data) if each.dtype.scalar == tl.bfloat16 else each.data for each in (left, right)
        ]
        product = np.matmul(parts[0][:, None], parts[1], dtype=added.data.dtype)
        return TensorHandle(product[:, 0] + added.data, added.dtype.scalar)

    def create_fp_trunc(self: Any, source: Any, kind: Any) -> Any:
        if (source.dtype.scalar, kind.scalar) != (tl.float32, tl.bfloat16):
            return truncate(self, source, kind)
        return TensorHandle(rounded(source.data), tl.bfloat16)

    InterpreterBuilder.binary_op = binary_op
    InterpreterBuilder.create_fp_trunc = create_fp_trunc
    InterpreterBuilder.create_dot = create_dot


def widened(bits: Any) -> Any:
    """bfloat16 as uint16 -> float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def rounded(numbers: Any) -> Any:
    """float32 -> bfloat16 as uint16, to nearest, ties to even; infinities stay, NaN stays NaN."""
    bits = np.asarray(numbers, dtype=np.float32).view(np.uint32)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(numbers), 0x7FC0, nearest).astype(np.uint16)
