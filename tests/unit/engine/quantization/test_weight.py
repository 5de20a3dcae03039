"""Codes in words, and what they stand for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outrider.engine.quantization.weight import QuantizedWeight, joined, packed, quantized, unpacked


def codes(bits: int, *shape: int, seed: int = 0) -> Tensor:
    """Random ones of the whole range."""
    return torch.randint(1 << bits, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def some(bits: int, out: int = 3, width: int = 40, *, zeros: bool = False, seed: int = 0) -> QuantizedWeight:
    """A weight of two groups a row."""
    scales = torch.rand(out, 2, generator=torch.Generator().manual_seed(seed)).bfloat16()
    given = codes(bits, out, 2, seed=seed + 1).float() if zeros else None
    return quantized(codes(bits, out, width, seed=seed), scales, given, bits, 32)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("width", [1, 7, 8, 33])
def test_codes_come_out_of_their_words(bits: int, width: int) -> None:
    """In order, whether the last word is full or not."""
    given = codes(bits, 5, width)
    words = packed(given, bits)
    assert words.shape == (5, -(-width * bits // 32))
    assert torch.equal(unpacked(words, bits)[:, :width], given)


def test_the_first_code_is_lowest() -> None:
    """As in the formats that are published."""
    assert packed(torch.tensor([[1, 2, 3]], dtype=torch.uint8), 4).tolist() == [[0x321]]
    assert packed(torch.tensor([[1, 2, 255, 128]], dtype=torch.uint8), 8).tolist() == [[0x80FF0201 - 2**32]]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zeros", [False, True])
def test_a_number_is_its_code_less_the_zero_times_the_scale(bits: int, zeros: bool) -> None:
    """Of its group; without zeros the middle of the range is taken away."""
    weight = some(bits, zeros=zeros)
    given, found = codes(bits, 3, 40), weight.values()
    assert found.shape == weight.shape == (3, 40)
    for row, column in [(0, 0), (1, 31), (2, 32), (0, 39)]:
        zero = 1 << (bits - 1) if weight.zeros is None else int(weight.zeros[row, column // 32])
        expected = (int(given[row, column]) - zero) * float(weight.scales[row, column // 32])
        assert found[row, column].item() == expected


def test_a_code_may_be_a_number_of_e4m3() -> None:
    """One bit of sign, four of exponent, three of fraction; the smallest ones have no leading 1."""
    every = torch.tensor([[code for code in range(256) if code & 0x7F != 0x7F]], dtype=torch.uint8)
    found = quantized(every, torch.tensor([[0.5]]), None, 8, 256, e4m3=True).values()[0]
    for code, number in zip(every[0].tolist(), found.tolist(), strict=True):
        exponent, fraction = code >> 3 & 15, code & 7
        size = (1 + fraction / 8) * 2.0 ** (exponent - 7) if exponent else fraction / 8 * 2.0**-6
        assert number == (-size if code & 128 else size) / 2
    assert found.abs().max() == 448 / 2


def test_numbers_of_e4m3_do_not_join_with_other_codes() -> None:
    """Nor do they stop being such when they join."""
    one, other = (
        quantized(codes(8, 2, 32) & 63, torch.ones(2, 1), None, 8, 32, e4m3=kind) for kind in (True, False)
    )
    assert joined([one, other]) is None
    whole = joined([one, one])
    assert whole is not None
    assert torch.equal(whole.values(), torch.cat([one.values()] * 2))


def test_scales_are_kept_exactly() -> None:
    """In 16 bits where these hold them, else in 32."""
    exact = torch.tensor([[0.5], [0.3]])
    kept = quantized(codes(4, 2, 32), exact.half(), None, 4, 32)
    assert (kept.scales.dtype, torch.equal(kept.scales, exact.half().float())) == (torch.float32, True)
    assert quantized(codes(4, 2, 32), exact.bfloat16().half(), None, 4, 32).scales.dtype == torch.bfloat16


def test_zeros_in_the_middle_are_left_out() -> None:
    """They cost time and memory."""
    middle = torch.full((2, 1), 8, dtype=torch.uint8)
    assert quantized(codes(4, 2, 32), torch.ones(2, 1), middle, 4, 32).zeros is None


@pytest.mark.parametrize("zeros", [(False, False), (False, True), (True, True)])
def test_rows_of_several_weights_are_one_weight(zeros: tuple[bool, bool]) -> None:
    """With the same numbers, whether all have zeros or some."""
    parts = [some(4, zeros=has, seed=seed) for seed, has in enumerate(zeros)]
    whole = joined(parts)
    assert whole is not None
    assert torch.equal(whole.values(), torch.cat([part.values() for part in parts]))


def test_other_groups_do_not_join() -> None:
    """A product has one kernel."""
    assert joined([some(4), some(8)]) is None
    assert joined([some(4), some(4, width=33)]) is None
