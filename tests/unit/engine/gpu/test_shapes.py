"""Kernels take the shapes that they are told, and no others."""

from __future__ import annotations

import pytest
import torch

from outrider.engine.gpu.shapes import check_rows, check_shape


def test_the_shape_that_is_told_passes():
    """Whole tensors, and for rows also parts of wider ones."""
    check_shape("x", torch.zeros(3, 4), 3, 4)
    check_rows("x", torch.zeros(3, 8)[:, :4], 3, 4)


@pytest.mark.parametrize("tensor", [torch.zeros(3, 2), torch.zeros(4, 3).T, torch.zeros(3, 8)[:, :4]])
def test_another_width_or_gaps_are_refused(tensor):
    """Half of the width, columns for rows, rows of a wider tensor: each would be read wrong."""
    with pytest.raises(ValueError, match="gate"):
        check_shape("gate", tensor, 3, 4)


def test_rows_of_scattered_numbers_are_refused():
    """A kernel is told where a row begins, not how its numbers lie."""
    with pytest.raises(ValueError, match="key is"):
        check_rows("key", torch.zeros(4, 3).T, 3, 4)
