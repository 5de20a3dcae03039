"""RMS norms."""

from __future__ import annotations

import pytest
import torch

from outrider.engine.fused_decoder.decoder import Norm
from outrider.engine.fused_decoder.norm import RmsNorm


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
    torch.testing.assert_close(RmsNorm(Norm(weight, 1e-6))(x), expected.to(dtype))
    assert torch.equal(x, before)


def test_a_float32_weight_of_a_bfloat16_model() -> None:
    """Rows are rounded once, behind the weight, as Gemma's are; the kernel and torch do so."""
    torch.manual_seed(0)
    x, weight = torch.randn(5, 48).bfloat16(), torch.rand(48) + 1.0
    exact = x.double()
    expected = exact / (exact.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    for dtype in (torch.bfloat16, None):
        found = RmsNorm(Norm(weight, 1e-6), dtype)(x)
        assert found.dtype == torch.bfloat16
        assert torch.equal(found, expected.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("other", [torch.float32, torch.bfloat16])
def test_the_norm_of_a_sum(dtype: torch.dtype, other: torch.dtype) -> None:
    """What is added stays in x, whichever dtype it has."""
    torch.manual_seed(0)
    x, added = torch.randn(5, 48).to(dtype), torch.randn(5, 48).to(other)
    norm = RmsNorm(Norm(torch.rand(48).to(dtype), 1e-6))
    total = x.clone().add_(added)
    expected = norm(total)
    torch.testing.assert_close(norm(x, added), expected)
    assert torch.equal(x, total)


def test_a_norm_with_a_row_of_weights_per_head() -> None:
    """Each head of [N, heads, D] is normalised by itself and scaled by its own weights."""
    torch.manual_seed(0)
    x, weight = torch.randn(5, 3, 8), torch.rand(3, 8)
    got = RmsNorm(Norm(weight, 1e-6))(x)
    for head in range(3):
        torch.testing.assert_close(got[:, head], RmsNorm(Norm(weight[head], 1e-6))(x[:, head]))
