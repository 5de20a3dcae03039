"""Norms that centre rows, and those that do not."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import layer_norm

from outrider.engine.fused_decoder.decoder import Norm
from outrider.engine.fused_decoder.norm import RowNorm, only_add


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm(dtype: torch.dtype) -> None:
    """x / sqrt(mean(x^2) + eps) * weight, also where eps decides, without touching x."""
    torch.manual_seed(0)
    x, weight = torch.randn(5, 48).to(dtype), torch.rand(48).to(dtype)
    x[1] *= 1e-4
    x[2] = 0.0
    before = x.clone()
    exact = x.double()
    expected = exact / (exact.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    torch.testing.assert_close(RowNorm(Norm(weight, 1e-6))(x), expected.to(dtype))
    assert torch.equal(x, before)


def test_a_float32_weight_of_a_bfloat16_model() -> None:
    """Rows are rounded once, behind the weight, as Gemma's are; the kernel and torch do so."""
    torch.manual_seed(0)
    x, weight = torch.randn(5, 48).bfloat16(), torch.rand(48) + 1.0
    exact = x.double()
    expected = exact / (exact.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    for dtype in (torch.bfloat16, None):
        found = RowNorm(Norm(weight, 1e-6), dtype)(x)
        assert found.dtype == torch.bfloat16
        assert torch.equal(found, expected.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("other", [torch.float32, torch.bfloat16])
def test_the_norm_of_a_sum(dtype: torch.dtype, other: torch.dtype) -> None:
    """What is added stays in x, whichever dtype it has."""
    torch.manual_seed(0)
    x, added = torch.randn(5, 48).to(dtype), torch.randn(5, 48).to(other)
    norm = RowNorm(Norm(torch.rand(48).to(dtype), 1e-6))
    total = x.clone().add_(added)
    expected = norm(total)
    torch.testing.assert_close(norm(x, added), expected)
    assert torch.equal(x, total)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel", [False, True])
def test_a_norm_that_centres(dtype: torch.dtype, kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernel, where there is one, and by torch: what torch computes, of a sum too."""
    if not kernel:
        monkeypatch.setattr("outrider.engine.fused_decoder.norm.runs", lambda *_: False)
    torch.manual_seed(0)
    x, added, weight, bias = (torch.randn(5, 48).to(dtype) for _ in range(4))
    norm = RowNorm(Norm(weight[0], 1e-5, centred=True, bias=bias[0]), dtype)
    torch.testing.assert_close(norm(x), layer_norm(x, (48,), weight[0], bias[0]))
    total = x + added
    torch.testing.assert_close(norm(x, added), layer_norm(total, (48,), weight[0], bias[0]))
    assert torch.equal(x, total)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("centred", [False, True])
def test_a_norm_inside_wider_rows(dtype: torch.dtype, centred: bool) -> None:
    """Some columns are normalised where they are; the others stay."""
    torch.manual_seed(0)
    x, weight = torch.randn(5, 64).to(dtype), torch.randn(48).to(dtype)
    before, norm = x.clone(), RowNorm(Norm(weight, 1e-5, centred), dtype)
    norm.inside(x[:, 8:56])
    torch.testing.assert_close(x[:, 8:56], norm(before[:, 8:56].contiguous()), rtol=0, atol=0)
    assert torch.equal(x[:, :8], before[:, :8])
    assert torch.equal(x[:, 56:], before[:, 56:])


def test_without_a_norm_rows_are_added() -> None:
    """The sum is the result, and stays in x."""
    x, added = torch.randn(2, 3), torch.randn(2, 3)
    total = x + added
    assert only_add(x, None) is x
    assert only_add(x, added) is x
    assert torch.equal(x, total)


def test_a_norm_with_a_row_of_weights_per_head() -> None:
    """Each head of [N, heads, D] is normalised by itself and scaled by its own weights."""
    torch.manual_seed(0)
    x, weight = torch.randn(5, 3, 8), torch.rand(3, 8)
    got = RowNorm(Norm(weight, 1e-6))(x)
    for head in range(3):
        torch.testing.assert_close(got[:, head], RowNorm(Norm(weight[head], 1e-6))(x[:, head]))
