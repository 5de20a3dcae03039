"""Linear layers with packed weights."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from outrider.engine.cpu import linear, matmul
from outrider.engine.cpu.backend import Backend, matmul_type, preferred, vector_backend
from outrider.engine.cpu.linear import KernelLinear, LibraryLinear, only_kernels, pack_linears, row_edges
from outrider.engine.cpu.matmul import Matmul
from outrider.engine.cpu.panels import in_panels
from outrider.engine.cpu.worker_pool import MIN_SHARE, WorkerPool

needs_kernels = pytest.mark.skipif(
    vector_backend(torch.bfloat16) is None, reason="needs AVX2 or AVX-512 and the package numba"
)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same numbers in every run."""
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
def test_computes_what_the_linear_layer_computes(dtype: torch.dtype, bias: bool) -> None:
    """Packing changes the layout of the weight alone."""
    model = nn.Sequential(nn.Linear(48, 80, bias=bias, dtype=dtype))
    x = torch.randn(2, 5, 48, dtype=dtype)
    with torch.inference_mode():
        expected = model(x)
        assert pack_linears(model, preferred(dtype)) == 1
        torch.testing.assert_close(model(x), expected)


def test_computes_what_gpt2s_layer_computes() -> None:
    """Conv1D keeps its weight the other way round."""
    model = nn.Sequential(Conv1D(80, 48))
    x = torch.randn(5, 48)
    with torch.inference_mode():
        expected = model(x)
        assert pack_linears(model, preferred(torch.float32)) == 1
        torch.testing.assert_close(model(x), expected)


def test_subclasses_and_other_dtypes_stay() -> None:
    """A subclass may compute something else, and oneDNN packs no float64."""

    class Odd(nn.Linear):
        pass

    model = nn.Sequential(Odd(8, 8), nn.Linear(8, 8, dtype=torch.float64), nn.Embedding(8, 8))
    assert pack_linears(model, preferred(torch.float32)) == 0


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_layers_without_numbers_stay() -> None:
    """Models with room for shared experts, and none of them, have such layers (GLM 4.5)."""
    model = nn.Sequential(nn.Linear(8, 0, bias=False), nn.Linear(0, 8))
    assert pack_linears(model, preferred(torch.float32)) == 0


def test_without_the_operators_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch build without oneDNN, on a processor without kernels of the project, runs the plain layers."""
    monkeypatch.setattr(linear, "operators_exist", lambda dtype: False)
    model = nn.Sequential(nn.Linear(8, 8))
    assert pack_linears(model, Backend.ONEDNN) == 0
    assert type(model[0]) is nn.Linear


@needs_kernels
def test_what_does_not_fill_steps_is_left_to_the_library() -> None:
    """An odd number of bfloat16 numbers does not make whole steps of 4 bytes."""
    model = nn.Sequential(nn.Linear(5, 8, dtype=torch.bfloat16), nn.Linear(8, 4, dtype=torch.bfloat16))
    packed = linear.operators_exist(torch.bfloat16)
    assert pack_linears(model, preferred(torch.bfloat16)) == 1 + packed
    assert [type(layer) for layer in model] == [LibraryLinear if packed else nn.Linear, KernelLinear]


@pytest.mark.parametrize("dtype", list(filter(linear.operators_exist, [torch.float32, torch.bfloat16])))
def test_helpers_share_the_library_s_matmuls(dtype: torch.dtype) -> None:
    """Each has some of the columns; the result is that of one thread but for the order of sums."""
    weight, bias = (
        torch.randn(2 * MIN_SHARE // 256, 256).to(dtype),
        torch.randn(2 * MIN_SHARE // 256).to(dtype),
    )
    x = torch.randn(3, 20, 256).to(dtype)
    torch.set_num_threads(1)
    alone, shared = LibraryLinear(weight, bias), LibraryLinear(weight, bias, WorkerPool(2))
    with torch.inference_mode():
        torch.testing.assert_close(shared(x), alone(x))


@needs_kernels
def test_weights_are_arranged_by_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """One takes minutes for the codes of a large model; later torch has as many as before."""
    seen: list[int] = []

    def arrange(weight: torch.Tensor, multiple: int) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        return in_panels(weight, multiple)

    monkeypatch.setattr(matmul, "in_panels", arrange)
    torch.set_num_threads(1)
    pack_linears(nn.Sequential(nn.Linear(8, 8)), preferred(torch.float32), WorkerPool(3))
    assert (seen, torch.get_num_threads()) == ([3], 1)


def test_the_unpacked_weight_is_freed() -> None:
    """Memory holds each weight once, but for an embedding that shares it."""
    shared = nn.Parameter(torch.randn(32, 16), requires_grad=False)
    model = nn.ModuleDict(
        {"embed": nn.Embedding(32, 16), "mlp": nn.Linear(16, 16), "head": nn.Linear(16, 32)}
    )
    model["embed"].weight = model["head"].weight = shared
    unpacked = weakref.ref(model["mlp"].weight)
    assert pack_linears(model, preferred(torch.float32)) == 2
    assert unpacked() is None
    assert model["embed"].weight is shared


@needs_kernels
def test_the_weights_of_all_layers_decide_whether_they_pass_the_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two layers that are too large together are both fetched past it."""
    found: list[bool] = []
    backend = preferred(torch.float32)
    real = matmul_type(backend)
    assert real is not None

    def note(*args: Any, passing: bool, **others: Any) -> Matmul:
        found.append(passing)
        return real(*args, passing=passing, **others)

    monkeypatch.setattr(linear, "matmul_type", lambda backend: note)
    for limit in (2 * 4 * 8 * 8, 2 * 4 * 8 * 8 - 1):
        monkeypatch.setattr(linear, "KEPT_BYTES", limit)
        assert pack_linears(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), backend) == 2
    assert found == [False, False, True, True]


@needs_kernels
def test_edges_are_where_the_largest_layers_take_another_pass() -> None:
    """The library's are not known."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 64))
    assert list(row_edges(model)) == []
    backend = preferred(torch.float32)
    kind = matmul_type(backend)
    assert kind is not None
    pack_linears(model, backend)
    assert list(row_edges(model))[:2] == [kind.pass_rows, 2 * kind.pass_rows]


class WithEmbedding(nn.Module):
    """A model with a matrix beside its linear layer."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.other, self.linear = other, nn.Linear(8, 8)


@needs_kernels
def test_only_kernels_compute_a_model_whose_other_matrices_are_embeddings() -> None:
    """A matrix that something else multiplies counts, and so does a layer that the library computes."""
    backend = preferred(torch.float32)
    for other, expected in (
        (nn.Embedding(4, 8), True),
        (nn.Bilinear(8, 8, 8), False),
        (nn.LayerNorm(8), True),
    ):
        model = WithEmbedding(other)
        assert not only_kernels(model)
        pack_linears(model, backend)
        assert only_kernels(model) is expected
    by_library = WithEmbedding(nn.Embedding(4, 8))
    pack_linears(by_library, Backend.ONEDNN)
    assert not only_kernels(by_library)
