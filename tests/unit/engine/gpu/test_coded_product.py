"""The product with coded weights through Triton's interpreter."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.engine.gpu import coded_product as launching
from outrider.engine.gpu.coded_product import coded_product, parts_of
from outrider.engine.quantization.planes import in_planes
from outrider.engine.quantization.weight import QuantizedWeight, quantized

CPU = torch.device("cpu")
NEAR = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}
"""Relative to all of a result; half a step of a dtype is the most that a number of it may be off."""
RANDOM = torch.Generator().manual_seed(0)
Kind = int | str
"""Bits of codes, or e4m3."""
KINDS: list[Kind] = [4, 8, "e4m3"]
SHAPES = [(1, 33, 32, 70), (3, 130, 64, 300), (17, 96, 96, 200), (70, 40, 512, 500)]
"""Rows, columns, group, numbers: one tile and several, whole blocks and others, a group for whole rows."""


def weight_of(kind: Kind, out: int, group: int, width: int, *, zeros: bool) -> QuantizedWeight:
    """Random codes; scales of bfloat16 without zeros, and of float32 with some."""
    shape, bits = (out, -(-width // group)), 8 if kind == "e4m3" else kind
    codes = torch.randint(1 << bits, (out, width), generator=RANDOM, dtype=torch.uint8)
    scales = torch.rand(shape, generator=RANDOM)
    if kind == "e4m3":
        codes[(codes & 127) == 127] = 0  # no number
        return quantized(codes, scales if zeros else scales.bfloat16(), None, bits, group, e4m3=True)
    given = torch.randint(1 << bits, shape, generator=RANDOM).float() if zeros else None
    return quantized(codes, scales if zeros else scales.bfloat16(), given, bits, group)


def rows_of(count: int, width: int, dtype: torch.dtype) -> Tensor:
    """Standard normal numbers."""
    return torch.randn(count, width, generator=RANDOM).to(dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize(("count", "out", "group", "width"), SHAPES)
def test_a_product_is_that_with_the_numbers(kind, zeros, dtype, count, out, group, width):
    """In float64, rounded once."""
    weight = weight_of(kind, out, group, width, zeros=zeros)
    x, bias = rows_of(count, width, dtype), rows_of(1, out, dtype)[0]
    for added in (bias, None):
        exact = x.double() @ weight.values().double().T + (0.0 if added is None else added.double())
        found = coded_product(x, in_planes(weight, CPU), added)
        assert (found.dtype, found.shape) == (dtype, (count, out))
        assert (found.double() - exact).norm() / exact.norm() < NEAR[dtype]


@pytest.mark.parametrize("bits", [4, 8])
def test_numbers_are_not_rounded(bits):
    """Codes times scales take more digits than bfloat16 has: a row with one 1 gives them exactly."""
    weight = weight_of(bits, 40, 32, 64, zeros=True)
    found = coded_product(torch.eye(64), in_planes(weight, CPU), None)
    assert torch.equal(found, weight.values().T)


@pytest.fixture
def in_order(monkeypatch):
    """Matrix instructions add up in order here; numpy's order depends on the shapes."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(self, left, right, added, *_):
        sums = np.zeros(added.data.shape, np.float32)
        for index in range(left.data.shape[1]):
            sums += left.data[:, index, None] * right.data[None, index]
        return TensorHandle(sums + added.data, added.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


@pytest.mark.parametrize("dtype", NEAR)
def test_every_number_of_e4m3_is_exact(dtype):
    """The smallest too, which have no leading 1, and the largest: all dtypes of models hold them."""
    codes = torch.tensor([code for code in range(256) if code & 127 != 127], dtype=torch.uint8)
    weight = quantized(codes[:, None].repeat(1, 32), torch.ones(254, 1), None, 8, 32, e4m3=True)
    found = coded_product(torch.eye(32, dtype=dtype), in_planes(weight, CPU), None)
    assert torch.equal(found, codes.view(torch.float8_e4m3fn).to(dtype).expand(32, -1))


@pytest.fixture(params=[1, 4])
def parts(request, monkeypatch) -> int:
    """Into how many parts the sums of wide rows are divided."""
    monkeypatch.setattr(launching, "parts_of", lambda columns, numbers, programs: request.param)
    return request.param


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_in_every_batch(in_order, parts, kind):
    """Alone, with others, and with so many that there are other tiles. In float32, where every bit shows."""
    weight = in_planes(weight_of(kind, 140, 64, 600, zeros=kind == 4), CPU)
    x = rows_of(70, 600, torch.float32)
    whole = coded_product(x, weight, None)
    assert all(torch.equal(coded_product(x[:count], weight, None), whole[:count]) for count in (1, 5, 17, 33))
    assert torch.equal(coded_product(x[69:], weight, None), whole[69:])


@pytest.mark.parametrize("width", [70, 600])
def test_parts_add_up_to_the_whole(parts, width):
    """Also where a part has no block, and with a bias, which is added once."""
    weight, x = in_planes(weight_of(8, 140, 32, width, zeros=False), CPU), rows_of(3, width, torch.float32)
    bias = torch.randn(140, generator=RANDOM)
    expected = x @ weight.values(torch.float32).T + bias
    found = coded_product(x, weight, bias)
    assert float((found - expected).norm() / expected.norm()) < NEAR[torch.float32]


def test_columns_of_a_wider_weight_are_taken_as_they_are():
    """As parts of a fused layer have them; rows of x may be parts of wider ones too."""
    weight = in_planes(weight_of(4, 90, 32, 96, zeros=True), CPU)
    x = rows_of(4, 200, torch.float32)[:, 50:146]
    found = coded_product(x, weight.rows(slice(20, 61)), None)
    torch.testing.assert_close(found, x @ weight.values(torch.float32)[20:61].T, rtol=1e-4, atol=1e-4)


def test_other_shapes_are_refused():
    """The kernel reads what it is told is there."""
    weight = in_planes(weight_of(8, 40, 32, 64, zeros=False), CPU)
    with pytest.raises(ValueError, match="x is"):
        coded_product(torch.zeros(2, 32), weight, None)
    with pytest.raises(ValueError, match="bias is"):
        coded_product(torch.zeros(2, 64), weight, torch.zeros(20))


@pytest.mark.parametrize(
    ("columns", "numbers"), list(product((64, 4096, 6144, 28672, 128256), (4096, 14336)))
)
def test_narrow_weights_have_parts_for_every_program(columns, numbers):
    """But no more than that, and none so short that adding it up costs more."""
    parts, tiles = parts_of(columns, numbers, 264), -(-columns // 64)
    assert tiles * parts >= 264 or parts == 8
    assert parts == 1 or tiles * parts // 2 < 264
    assert parts_of(columns, 500, 264) == 1
