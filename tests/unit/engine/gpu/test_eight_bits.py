"""Bytes of keys and values against torch's float8_e4m3fn, through Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from outrider.engine.gpu.kernels.eight_bits import as_read, as_stored
from outrider.engine.loading.fp8_kv import rounded

BLOCK = 1 << 12


@triton.jit
def store_all(numbers, memory, BLOCK: tl.constexpr):  # noqa: N803
    """Write what memory holds of numbers."""
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(memory + places, as_stored(tl.load(numbers + places), memory))


@triton.jit
def read_all(memory, numbers, BLOCK: tl.constexpr):  # noqa: N803
    """Read memory as numbers."""
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(numbers + places, as_read(tl.load(memory + places), numbers.dtype.element_ty))


def stored(numbers: torch.Tensor) -> torch.Tensor:
    """As bytes, by the kernel."""
    memory = torch.empty(len(numbers), dtype=torch.uint8)
    store_all[(len(numbers) // BLOCK,)](numbers, memory, BLOCK=BLOCK)
    return memory


def every(dtype: torch.dtype) -> torch.Tensor:
    """All numbers of 16 bits; for float32 those of bfloat16 and what lies a little beside them."""
    bits = torch.arange(1 << 16, dtype=torch.int32)
    if dtype == torch.float32:
        bits = torch.cat([(bits << 16) + by for by in (-1, 0, 1)])
        return bits.view(torch.float32)
    return bits.to(torch.int16).view(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_number_becomes_the_byte_of_torch(dtype):
    """Ties, subnormals, both zeros; what is too large, infinities too, becomes 448."""
    numbers = every(dtype)
    numbers = numbers[: len(numbers) // BLOCK * BLOCK]
    expected = numbers.float().clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    known = ~numbers.isnan()
    found = stored(numbers)
    assert torch.equal(found[known], expected[known])
    assert set((found[~known] & 0x7F).tolist()) == {0x7E}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_byte_is_read_exactly(dtype):
    """But for the two of NaN, which are never stored."""
    memory = torch.arange(256).to(torch.uint8).repeat(BLOCK // 256)
    numbers = torch.empty(BLOCK, dtype=dtype)
    read_all[(1,)](memory, numbers, BLOCK=BLOCK)
    known = (memory & 0x7F) != 0x7F
    assert torch.equal(numbers[known], memory.view(torch.float8_e4m3fn).to(dtype)[known])


def test_what_memory_holds_is_what_the_check_expects():
    """The kernel's roundings are those of the cache that stands in for it at load."""
    numbers = torch.randn(BLOCK, generator=torch.Generator().manual_seed(0)).bfloat16() * 10
    assert torch.equal(stored(numbers).view(torch.float8_e4m3fn).bfloat16(), rounded(numbers))
