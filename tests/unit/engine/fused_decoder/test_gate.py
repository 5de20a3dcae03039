"""A gate gives [M, F] whoever computes its product."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import gelu, silu

from outrider.engine.cpu.backend import Backend, unsupported_reason
from outrider.engine.cpu.linear import operators_exist, pack_linears
from outrider.engine.fused_decoder.decoder import Gate

WIDTH, INNER = 48, 40
BACKENDS = [
    pytest.param(backend, marks=pytest.mark.skipif(reason is not None, reason=f"{backend}: {reason}"))
    for backend in Backend
    for reason in [unsupported_reason(backend, torch.bfloat16)]
]


def packs(backend: Backend) -> bool:
    """The library packs no bfloat16 on old processors."""
    return backend is not Backend.ONEDNN or operators_exist(torch.bfloat16)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same numbers in every run."""
    torch.manual_seed(0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rows", [1, 7])
def test_a_packed_gate_gives_what_it_gave_before(backend: Backend, rows: int) -> None:
    """The kernels' product opens the gate itself, the library's does not; the width is one."""
    gate_up = nn.Linear(WIDTH, 2 * INNER, dtype=torch.bfloat16)
    model = nn.Sequential(Gate(gate_up, silu))
    x = torch.randn(rows, WIDTH, dtype=torch.bfloat16)
    with torch.inference_mode():
        expected = model(x)
        assert pack_linears(model, backend, gates=["0.gate_up"]) == int(packs(backend))
        assert model(x).shape == (rows, INNER)
        torch.testing.assert_close(model(x), expected, rtol=0.02, atol=0.01)
    assert model[0].opened == (backend is not Backend.ONEDNN)


@pytest.mark.parametrize("backend", BACKENDS)
def test_another_activation_is_left_to_the_gate(backend: Backend) -> None:
    """A product that is packed without opening the gate is activated behind it."""
    model = nn.Sequential(Gate(nn.Linear(WIDTH, 2 * INNER, dtype=torch.bfloat16), gelu))
    x = torch.randn(3, WIDTH, dtype=torch.bfloat16)
    with torch.inference_mode():
        expected = model(x)
        assert pack_linears(model, backend) == int(packs(backend))
        torch.testing.assert_close(model(x), expected, rtol=0.02, atol=0.01)
    assert not model[0].opened


@pytest.mark.parametrize("backend", BACKENDS[:-1])
@pytest.mark.parametrize("width", [WIDTH // 2, 2 * WIDTH])
def test_a_matmul_refuses_rows_of_another_width(backend: Backend, width: int) -> None:
    """A kernel would read memory that belongs to others; the library refuses by itself."""
    model = nn.Sequential(nn.Linear(WIDTH, INNER, dtype=torch.bfloat16))
    pack_linears(model, backend)
    with torch.inference_mode(), pytest.raises(ValueError, match=f"{width} numbers .* takes {WIDTH}"):
        model(torch.zeros(3, width, dtype=torch.bfloat16))
