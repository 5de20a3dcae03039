"""Linear layers with packed weights."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from outrider.engine import packed_linear
from outrider.engine.kernels.rows import PackedRows, available
from outrider.engine.packed_linear import PackedLinear, pack_linears


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same numbers in every run."""
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_computes_what_the_linear_layer_computes(dtype: torch.dtype, bias: bool) -> None:
    """Packing changes the layout of the weight alone."""
    model = nn.Sequential(nn.Linear(48, 80, bias=bias, dtype=dtype))
    x = torch.randn(2, 5, 48, dtype=dtype)
    with torch.inference_mode():
        expected = model(x)
        assert pack_linears(model) == 1
        torch.testing.assert_close(model(x), expected)


def test_computes_what_gpt2s_layer_computes() -> None:
    """Conv1D keeps its weight the other way round."""
    model = nn.Sequential(Conv1D(80, 48))
    x = torch.randn(5, 48)
    with torch.inference_mode():
        expected = model(x)
        assert pack_linears(model) == 1
        torch.testing.assert_close(model(x), expected)


def test_subclasses_and_other_dtypes_stay() -> None:
    """A subclass may compute something else, and oneDNN packs no float64."""

    class Odd(nn.Linear):
        pass

    model = nn.Sequential(Odd(8, 8), nn.Linear(8, 8, dtype=torch.float64), nn.Embedding(8, 8))
    assert pack_linears(model) == 0


def test_without_the_operators_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch build without oneDNN, on a processor without our kernels, runs the plain layers."""
    monkeypatch.setattr(packed_linear, "_operators_exist", lambda: False)
    monkeypatch.setattr(packed_linear, "fits", lambda weight: False)
    model = nn.Sequential(nn.Linear(8, 8))
    assert pack_linears(model) == 0
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    """From two rows on, the first row's bits are the same in every batch."""
    layer = PackedLinear(torch.randn(96, 256, dtype=dtype), None)
    x = torch.randn(64, 256, dtype=dtype)
    with torch.inference_mode():
        first = layer(x)[0]
        assert all(torch.equal(layer(x[:rows])[0], first) for rows in (2, 3, 4, 5, 8, 17, 33))


def test_the_unpacked_weight_is_freed() -> None:
    """Memory holds each weight once, but for an embedding that shares it."""
    shared = nn.Parameter(torch.randn(32, 16), requires_grad=False)
    model = nn.ModuleDict(
        {"embed": nn.Embedding(32, 16), "mlp": nn.Linear(16, 16), "head": nn.Linear(16, 32)}
    )
    model["embed"].weight = model["head"].weight = shared
    unpacked = weakref.ref(model["mlp"].weight)
    assert pack_linears(model) == 2
    assert unpacked() is None
    assert model["embed"].weight is shared


@pytest.mark.skipif(not available(torch.float32), reason="the processor has no kernels of ours")
def test_the_weights_of_all_layers_decide_whether_they_stay_in_the_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two layers that are too large together are both fetched past it."""
    found: list[bool] = []

    def note(*args: Any, kept: bool, **others: Any) -> PackedRows:
        found.append(kept)
        return PackedRows(*args, kept=kept, **others)

    monkeypatch.setattr(packed_linear, "PackedRows", note)
    for limit in (2 * 4 * 8 * 8, 2 * 4 * 8 * 8 - 1):
        monkeypatch.setattr(packed_linear, "KEPT_BYTES", limit)
        assert pack_linears(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))) == 2
    assert found == [True, True, False, False]
