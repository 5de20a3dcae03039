"""Models whose weights are rounded at load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from outrider.engine.cpu.backend import Backend, preferred, unsupported_reason, vector_backend
from outrider.engine.cpu.choice import BackendChoice
from outrider.engine.cpu.experts import PackedExperts
from outrider.engine.cpu.linear import KernelLinear
from outrider.engine.kv.pages import SequenceKv
from outrider.engine.loaded_model import LoadedModel
from outrider.engine.loading import loader
from outrider.engine.loading.loader import load_model
from outrider.engine.quantization.rounding import BITS, rounded
from outrider.engine.runner import ModelRunner, Segment
from outrider.protocol.errors import ModelError
from tests.models import ARCHITECTURES, build_model, plain_model

Folders = Callable[[str], Path]
TOKENS = [5, 6, 7, 8, 250]
UNLIKE = ("llama", "gpt2", "mixtral", "deepseek_v3", "qwen3_5", "jamba")
"""With both codes: fused and plain, transposed weights, experts of both kinds, recurrent layers."""
EVERY = [
    pytest.param(name, weights, marks=() if weights == "int4" or name in UNLIKE else pytest.mark.slow)
    for name in ARCHITECTURES
    for weights in BITS
]

needs_kernels = pytest.mark.skipif(vector_backend(torch.float32) is None, reason="needs AVX2 or AVX-512")


def load(folder: Path, **settings: Any) -> LoadedModel:
    """Load on the CPU in float32 unless told otherwise."""
    return load_model(str(folder), **{"dtype": "float32", "device": "cpu", "threads": 1, **settings})


def logits(loaded: LoadedModel) -> Tensor:
    """[T, V] of TOKENS over paged memory."""
    runner = ModelRunner(loaded, 8, 4)
    kv = SequenceKv.open(runner.pool, [])
    return runner.forward([Segment(kv, TOKENS, None, range(len(TOKENS)))])


def expected(folder: Path, bits: int, *, experts: bool = True) -> Tensor:
    """The same by transformers with the numbers that the codes stand for; the output layer has 8 bits.

    Without `experts` these are not rounded. Routers (`wg`, `router`, `router.proj`) and steps (`dt_proj`)
    never are.
    """
    network = plain_model(folder)
    head = network.get_output_embeddings()
    for name, module in list(network.named_modules()):
        if name.endswith((".wg", ".router", ".router.proj", ".dt_proj")):
            continue
        if isinstance(module, nn.Linear):
            numbers = rounded(module.weight, 8 if module is head else bits).values()
            module.weight = nn.Parameter(numbers, requires_grad=False)
        elif isinstance(module, Conv1D):
            numbers = rounded(module.weight.t(), bits).values().t()
            module.weight = nn.Parameter(numbers, requires_grad=False)
        elif experts and hasattr(module, "gate_up_proj") and isinstance(module.gate_up_proj, nn.Parameter):
            _round_experts(module, bits)
    with torch.inference_mode():
        found: Tensor = network(torch.tensor([TOKENS])).logits[0]
    return found


def _round_experts(experts: Any, bits: int) -> None:
    for stacked in (experts.gate_up_proj.data, experts.down_proj.data):
        for weight in stacked.transpose(1, 2) if experts.is_transposed else stacked:
            weight.copy_(rounded(weight, bits).values())


@needs_kernels
@pytest.mark.parametrize(("architecture", "weights"), EVERY)
def test_a_model_is_transformers_with_rounded_weights(
    architecture: str, weights: str, folder_of: Folders
) -> None:
    """For every architecture, fused or plain, tied embeddings (which stay as they are) included."""
    loaded = load(folder_of(architecture), weights=weights)
    found, wanted = logits(loaded), expected(folder_of(architecture), BITS[weights])
    assert torch.allclose(found, wanted, atol=2e-3 * wanted.std().item())
    assert loaded.arithmetic.startswith(f"{weights} float32 ")


@needs_kernels
def test_a_forced_back_end_multiplies_the_codes(folder_of: Folders) -> None:
    """The library has no products of codes: its place takes the first that can run here."""
    for backend in Backend:
        if unsupported_reason(backend, torch.bfloat16) is None:
            asked = load(folder_of("llama"), weights="int8", dtype="bfloat16", cpu_backend=backend.value)
            assert asked.choice is not None
            first = preferred(torch.bfloat16) if backend is Backend.ONEDNN else backend
            assert asked.choice.backend is first


@needs_kernels
def test_codes_are_named_beside_the_library(folder_of: Folders) -> None:
    """Replicas whose other products are the library's differ if different kernels multiply codes."""
    written = load(folder_of("llama"), weights="int8")
    by_library = replace(written, choice=BackendChoice(Backend.ONEDNN, "asked for"))
    assert by_library.arithmetic.endswith(f" {vector_backend(torch.float32)} codes")


@needs_kernels
@pytest.mark.parametrize("tied", [False, True])
def test_every_linear_layer_runs_from_codes(tied: bool, tmp_path: Path) -> None:
    """With a tied embedding too: that keeps its own weight."""
    loaded = load(build_model("llama", tmp_path, tie_word_embeddings=tied), weights="int4", dtype="bfloat16")
    kinds = [module for module in loaded.model.modules() if isinstance(module, KernelLinear)]
    assert [module.dtype for module in kinds] == [torch.int8] * (3 * 4 + 1)
    assert not any(type(module) is nn.Linear for module in loaded.model.modules())
    whole = load(tmp_path, dtype="bfloat16")
    assert torch.equal(loaded.model.embed.weight, whole.model.embed.weight)
    shrunk, full = (
        sum(layer.nbytes for layer in model.modules() if isinstance(layer, KernelLinear))
        for model in (loaded.model, whole.model)
    )
    assert shrunk < 0.36 * full  # 4 bits and a sixteenth of 32 numbers each; the output layer twice as much


@needs_kernels
@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_experts_run_from_codes(architecture: str, folder_of: Folders) -> None:
    """Fused or plain; nothing is left of their numbers."""
    loaded = load(folder_of(architecture), weights="int4", dtype="bfloat16")
    found = [module for module in loaded.model.modules() if isinstance(module, PackedExperts)]
    assert found
    assert not [weight for weight in loaded.model.parameters() if weight.ndim == 3]


@needs_kernels
@pytest.mark.parametrize("weights", BITS)
def test_rounded_weights_change_little(weights: str, folder_of: Folders) -> None:
    """The logits are near those of the whole model; random weights are the worst case."""
    exact, found = logits(load(folder_of("llama"))), logits(load(folder_of("llama"), weights=weights))
    spread = (exact - exact.mean(-1, keepdim=True)).norm()
    assert 0.0 < (found - exact).norm() / spread < {"int8": 0.05, "int4": 0.6}[weights]


@needs_kernels
def test_bits_do_not_depend_on_the_batch(folder_of: Folders) -> None:
    """A rounded model may be deterministic: the check at load finds no other bits."""
    for dtype in ("bfloat16", "float16"):
        assert load(folder_of("llama"), weights="int4", dtype=dtype, deterministic=True)


def test_without_kernels_it_is_refused(folder_of: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sentence says what they take."""
    monkeypatch.setattr(loader, "vector_backend", lambda dtype: None)
    with pytest.raises(ModelError, match=r"weights: int4 takes a processor with AVX2 .* package numba"):
        load(folder_of("llama"), weights="int4")
