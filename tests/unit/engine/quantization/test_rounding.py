"""Weights rounded to 8 and 4 bits."""

from __future__ import annotations

import pytest
import torch

from outrider.engine.quantization.rounding import GROUP, rounded


@pytest.mark.parametrize(("bits", "most"), [(8, 0.01), (4, 0.12)])
def test_numbers_change_little(bits: int, most: float) -> None:
    """Relative to all of a weight."""
    weight = torch.randn(50, 100, generator=torch.Generator().manual_seed(1))
    assert (rounded(weight, bits).values() - weight).norm() / weight.norm() < most


@pytest.mark.parametrize("bits", [8, 4])
def test_no_number_is_farther_off_than_half_a_step(bits: int) -> None:
    """Nor more than the scale's own rounding, at the end of the range."""
    weight = torch.randn(50, 96, generator=torch.Generator().manual_seed(1))
    made = rounded(weight, bits)
    step = made.scales.float().abs().repeat_interleave(GROUP, 1)
    most = step * (0.51 if bits == 8 else 1.05)  # with 4 bits the other end of the range is a step shorter
    assert ((made.values() - weight).abs() <= most).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_each_group_has_its_own_scale(bits: int) -> None:
    """A large one takes no digits from a small one, in the same row or another."""
    weight = torch.randn(2, 2 * GROUP, generator=torch.Generator().manual_seed(2))
    larger = weight.clone()
    larger[0, :GROUP] *= 1e4
    plain, mixed = rounded(weight, bits).values(), rounded(larger, bits).values()
    assert torch.equal(plain[1], mixed[1])
    assert torch.equal(plain[0, GROUP:], mixed[0, GROUP:])


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("width", [1, GROUP, GROUP + 5])
def test_zeros_stay_zeros(bits: int, width: int) -> None:
    """Though they have no largest number to divide by."""
    weight = torch.zeros(3, width)
    weight[1] = 1.0
    assert torch.equal(rounded(weight, bits).values()[::2], weight[::2])


@pytest.mark.parametrize("bits", [8, 4])
def test_what_was_rounded_is_not_changed_again(bits: int) -> None:
    """In float32, which holds codes times scales exactly."""
    once = rounded(torch.randn(20, 70, generator=torch.Generator().manual_seed(3)), bits).values()
    assert torch.equal(rounded(once, bits).values(), once)
