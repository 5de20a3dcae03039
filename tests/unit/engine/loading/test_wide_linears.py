"""Linear layers of 16 bits that are computed in float32."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from torch.testing import assert_close

from outrider.engine.loading import wide_linears
from outrider.engine.loading.wide_linears import MIN_ROWS, WideLinears

SIXTEEN_BITS = (torch.bfloat16, torch.float16)


def layer(dtype: torch.dtype, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Input [rows, 32], weight [48, 32] and bias [48]."""
    generator = torch.Generator().manual_seed(rows)
    return tuple(torch.randn(size, generator=generator).to(dtype) for size in ((rows, 32), (48, 32), (48,)))


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight has several parts."""
    monkeypatch.setattr(wide_linears, "PART", 5 * 64)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor without instructions for 16 bits."""
    monkeypatch.setattr(wide_linears, "_has_instructions", lambda dtype: False)


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
def test_results_are_those_of_float32(slow: None, dtype: torch.dtype) -> None:
    """With a bias and without, after a layer of another width."""
    x, weight, bias = layer(dtype, MIN_ROWS)
    with WideLinears():
        functional.linear(torch.ones(MIN_ROWS, 64, dtype=dtype), torch.ones(64, 64, dtype=dtype))
        biased, plain = functional.linear(x, weight, bias), functional.linear(x, weight)
    assert_close(biased, (x.float() @ weight.float().T + bias.float()).to(dtype))
    assert_close(plain, (x.float() @ weight.float().T).to(dtype))


def test_another_thread_may_be_loading_a_model(slow: None) -> None:
    """transformers sets torch's default dtype meanwhile, which all threads have in common."""
    x, weight, _ = layer(torch.bfloat16, MIN_ROWS)
    try:
        torch.set_default_dtype(torch.bfloat16)
        with WideLinears():
            found = functional.linear(x, weight)
    finally:
        torch.set_default_dtype(torch.float32)
    assert_close(found, (x.float() @ weight.float().T).to(torch.bfloat16))


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
def test_modules_are_computed_so_too(slow: None, dtype: torch.dtype) -> None:
    """Layers of a model call the function with its names."""
    module, x = torch.nn.Linear(32, 48, dtype=dtype), layer(dtype, 3 * MIN_ROWS)[0].view(3, MIN_ROWS, 32)
    with torch.inference_mode(), WideLinears():
        found = module(x)
    expected = functional.linear(x.float(), module.weight.float(), module.bias.float())
    assert_close(found, expected.to(dtype))


@pytest.mark.parametrize(("dtype", "rows"), [(torch.float32, MIN_ROWS), (torch.bfloat16, MIN_ROWS - 1)])
def test_others_are_left_to_torch(slow: None, monkeypatch: pytest.MonkeyPatch, dtype, rows) -> None:
    """Numbers of 32 bits, and so few rows that the weights would take longer to widen."""
    monkeypatch.setattr(WideLinears, "_linear", lambda *_: pytest.fail("widened"))
    x, weight, bias = layer(dtype, rows)
    with WideLinears():
        assert torch.equal(functional.linear(x, weight, bias), functional.linear(x, weight, bias))


def test_a_processor_with_instructions_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """It multiplies 16 bits faster than float32."""
    monkeypatch.setattr(wide_linears, "_has_instructions", lambda dtype: True)
    monkeypatch.setattr(WideLinears, "_linear", lambda *_: pytest.fail("widened"))
    x, weight, _ = layer(torch.bfloat16, MIN_ROWS)
    with WideLinears():
        assert functional.linear(x, weight).dtype == torch.bfloat16


def test_weights_of_a_library_multiply_in_their_own_way(slow: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A subclass of tensors may hold other numbers than it shows."""

    class Rounded(torch.Tensor):
        pass

    monkeypatch.setattr(WideLinears, "_linear", lambda *_: pytest.fail("widened"))
    x, weight, _ = layer(torch.bfloat16, MIN_ROWS)
    with WideLinears():
        assert functional.linear(x, weight.as_subclass(Rounded)).shape == (MIN_ROWS, 48)
