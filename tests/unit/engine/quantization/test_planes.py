"""Codes in the order of the kernels of GPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from outrider.engine.quantization import planes
from outrider.engine.quantization.planes import in_planes, joined_planes, rounded_in_planes, takes_planes
from outrider.engine.quantization.rounding import rounded
from outrider.engine.quantization.weight import QuantizedWeight, quantized

CPU = torch.device("cpu")


def some(
    bits: int, group: int = 32, out: int = 5, width: int = 70, *, zeros: bool = False, seed: int = 0
) -> QuantizedWeight:
    """Random codes of the whole range, and scales of bfloat16."""
    random = torch.Generator().manual_seed(seed)
    shape = (out, -(-width // group))
    codes = torch.randint(1 << bits, (out, width), generator=random, dtype=torch.uint8)
    given = torch.randint(1 << bits, shape, generator=random).float() if zeros else None
    return quantized(codes, torch.rand(shape, generator=random).bfloat16(), given, bits, group)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("group", "width"), [(32, 1), (32, 70), (64, 600), (96, 256), (608, 600)])
def test_numbers_are_the_same_in_planes(bits: int, zeros: bool, group: int, width: int) -> None:
    """Whole blocks and others, groups of a plane, of several, and whole rows."""
    check_same(some(bits, group, width=width, zeros=zeros))


def test_numbers_of_e4m3_are_the_same_in_planes() -> None:
    """In another order of rows too."""
    weight = some(8, 64, width=600)
    weight = replace(weight, words=weight.words & 0x77777777, e4m3=True)
    check_same(weight)
    order = torch.tensor([4, 2, 0, 1, 3])
    turned = in_planes(weight, CPU).rows(order).values(torch.float32)
    assert torch.equal(turned, weight.rows(order).values())
    assert torch.equal(turned, weight.values()[order])


def check_same(weight: QuantizedWeight) -> None:
    """What planes stand for, in two dtypes."""
    made = in_planes(weight, CPU)
    assert made.shape == weight.shape
    assert torch.equal(made.values(torch.float32), weight.values())
    assert torch.equal(made.values(torch.bfloat16), weight.values().bfloat16())


@pytest.mark.parametrize("bits", [4, 8])
def test_a_place_of_the_words_is_a_plane(bits: int) -> None:
    """32 numbers that follow each other in a row, down a column of words."""
    numbers = torch.arange(128 // bits * 8).remainder(1 << bits).to(torch.uint8)[None]
    weight = quantized(numbers, torch.ones(1, len(numbers[0]) // 32), None, bits, 32)
    words = in_planes(weight, CPU).words[:32, 0]
    for place in range(32 // bits):
        codes = (words >> bits * place) & ((1 << bits) - 1)
        assert codes.tolist() == numbers[0, 32 * place : 32 * place + 32].tolist()


@pytest.mark.parametrize("bits", [4, 8])
def test_a_weight_is_rounded_in_parts(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the same codes as in one piece; no part has more numbers than are computed at once."""
    weight = torch.randn(50, 70, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(planes, "AT_ONCE", 300)
    seen: list[int] = []

    def noted(part: torch.Tensor, bits: int) -> QuantizedWeight:
        seen.append(part.numel())
        return rounded(part, bits)

    monkeypatch.setattr(planes, "rounded", noted)
    made = rounded_in_planes(weight, bits, CPU)
    assert torch.equal(made.values(torch.float32), rounded(weight, bits).values())
    assert max(seen) <= 300 < sum(seen) == weight.numel()


@pytest.mark.parametrize("zeros", [(False, False), (False, True), (True, True)])
def test_rows_of_several_weights_are_one_weight_in_planes(zeros: tuple[bool, bool]) -> None:
    """And each of them is columns of it, in the same memory."""
    parts = [in_planes(some(4, zeros=has, seed=seed), CPU) for seed, has in enumerate(zeros)]
    whole = joined_planes(parts)
    assert whole is not None
    assert torch.equal(whole.values(torch.float32), torch.cat([part.values(torch.float32) for part in parts]))
    second = whole.rows(slice(5, 10))
    assert torch.equal(second.values(torch.float32), parts[1].values(torch.float32))
    assert second.words.untyped_storage().data_ptr() == whole.words.untyped_storage().data_ptr()


def test_other_groups_do_not_join_in_planes() -> None:
    """A product has one kernel."""
    assert joined_planes([in_planes(some(4), CPU), in_planes(some(8), CPU)]) is None


def test_zeros_between_codes_are_not_taken() -> None:
    """The difference of code and zero has to be a number that 16 bits hold."""
    weight = some(4, zeros=True)
    assert weight.zeros is not None
    assert takes_planes(weight)
    assert takes_planes(some(8))
    assert not takes_planes(replace(weight, zeros=weight.zeros + 0.5))
    assert not takes_planes(replace(weight, zeros=weight.zeros - 16))
