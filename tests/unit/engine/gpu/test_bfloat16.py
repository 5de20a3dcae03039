"""What the interpreter is mended with rounds as torch does."""

from __future__ import annotations

import numpy as np
import torch

from tests.unit.engine.gpu.bfloat16 import rounded, widened


def test_numbers_round_as_in_torch():
    """Random ones of all magnitudes, ties, infinities."""
    random = np.random.default_rng(0)
    numbers = (random.standard_normal(10_000) * 10.0 ** random.integers(-38, 38, 10_000)).astype(np.float32)
    ties = (np.arange(2000, dtype=np.uint32) << 15 | 0x3F800000).view(np.float32)
    every = np.concatenate([numbers, ties, np.array([0.0, -0.0, np.inf, -np.inf], dtype=np.float32)])
    expected = torch.from_numpy(every).bfloat16()
    assert np.array_equal(rounded(every), expected.view(torch.uint16).numpy())
    assert np.array_equal(widened(rounded(every)), expected.float().numpy())


def test_nan_stays_nan():
    """Its bits are no number that could be rounded up."""
    assert np.isnan(widened(rounded(np.array([np.nan], dtype=np.float32)))).all()
