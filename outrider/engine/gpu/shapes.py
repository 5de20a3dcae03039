"""Checks the arguments of kernels: they address memory by expected shapes, and would misread a tensor of
another shape."""

from __future__ import annotations

from torch import Tensor


def check_shape(name: str, tensor: Tensor, *shape: int) -> None:
    """Make sure that a tensor has this shape and no gaps.

    Raises:
        ValueError: it has not; the text names the tensor.
    """
    check_rows(name, tensor, *shape)
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {tensor.stride()}; the kernel takes it without gaps")


def check_rows(name: str, tensor: Tensor, *shape: int) -> None:
    """Make sure that a tensor has this shape, and that the numbers of a row follow each other.

    Raises:
        ValueError: it has not; the text names the tensor.
    """
    if tensor.shape != shape or tensor.stride(-1) != 1:
        found = f"{list(tensor.shape)} with strides {tensor.stride()}"
        raise ValueError(f"{name} is {found}; the kernel takes {list(shape)} with rows in one piece")
