"""The forward of a fused decoder beside the model's own modules."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from outrider.engine.cpu import processor
from outrider.engine.cpu.backend import Backend
from outrider.engine.fused_decoder import FusedDecoder
from outrider.engine.fused_decoder.rotation import rotate
from outrider.engine.kv.pages import SequenceKv
from outrider.engine.loaded_model import LoadedModel
from outrider.engine.loading.loader import load_model
from outrider.engine.runner import ModelRunner, Segment

ARCHITECTURES = [
    *("llama", "qwen3", "mistral", "gpt_neox", "gpt2", "olmo2", "phi"),
    *("gemma4", "gemma4_dense"),
]


def test_scores_depend_on_the_distance_alone() -> None:
    """The product of a query and a key, each rotated by its position, is the same at the same distance."""
    torch.manual_seed(0)
    query, key = torch.randn(1, 1, 8), torch.randn(1, 1, 8)
    frequencies = torch.tensor([1.0, 0.3, 0.1, 0.01])

    def score(query_position: float, key_position: float) -> torch.Tensor:
        turned = [
            rotate(x, torch.polar(torch.ones(4), frequencies * position)[None, None])
            for x, position in ((query, query_position), (key, key_position))
        ]
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(score(7, 3), score(104, 100))
    torch.testing.assert_close(score(0, 0), (query * key).sum())
    assert abs(score(7, 3) - score(9, 3)) > 1e-3


def test_columns_without_a_turn_stay_as_they_are() -> None:
    """Only the first ones turn, as many as there are numbers for; perhaps none."""
    x = torch.randn(3, 2, 8)
    turned = rotate(x, torch.full((3, 1, 2), 1j))
    torch.testing.assert_close(turned, torch.cat([-x[..., 2:4], x[..., :2], x[..., 4:]], -1))
    assert torch.equal(rotate(x, torch.ones(3, 1, 0, dtype=torch.complex64)), x)


def mixed_step(loaded: LoadedModel) -> torch.Tensor:
    """Logits of a chunk too long to be folded, a tree and a sequence of another length in one forward."""
    runner = ModelRunner(loaded, 128, 4)
    tree, other, chunk = (SequenceKv.open(runner.pool, []) for _ in range(3))
    runner.forward([Segment(tree, range(5, 45), None, []), Segment(other, range(9, 29), None, [])])
    runner.commit(tree, range(40), range(5, 45))
    runner.commit(other, range(20), range(9, 29))
    segments = [
        Segment(chunk, range(100, 200), None, [0, 50, 99]),
        Segment(tree, [7, 8, 9, 10], [-1, -1, 0, 2], range(4)),
        Segment(other, [11], None, [0]),
    ]
    return runner.forward(segments)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_long_mixed_step_equals_the_modules(folder_of: Callable[[str], Path], architecture: str) -> None:
    """With kernels, where they run, and modules of transformers."""
    folder = str(folder_of(architecture))
    fused, modules = (
        mixed_step(load_model(folder, dtype="float32", device="cpu", threads=1, fused=fused))
        for fused in (True, False)
    )
    torch.testing.assert_close(fused, modules, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_without_kernels_torch_computes_the_same(
    folder_of: Callable[[str], Path], architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a processor without vectors of ours every part has its plain form."""
    folder = str(folder_of(architecture))
    results = []
    for kernels in (True, False):
        if not kernels:
            monkeypatch.setattr(processor, "features", lambda: frozenset())
        loaded = load_model(folder, dtype="float32", device="cpu", threads=1)
        assert isinstance(loaded.model, FusedDecoder)
        results.append(mixed_step(loaded))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-4)


def test_silu_is_recognised(folder_of: Callable[[str], Path]) -> None:
    """By either class that computes it; where kernels of ours run, the product opens the gate."""
    loaded = load_model(str(folder_of("llama")), dtype="float32", device="cpu", threads=1)
    assert isinstance(loaded.model, FusedDecoder)
    assert loaded.choice is not None
    assert len(loaded.model.gates) == len(loaded.model.stack)
    opened = [part.mlp.gate.opened for part in loaded.model.stack]
    assert opened == [loaded.choice.backend is not Backend.ONEDNN] * len(opened)
