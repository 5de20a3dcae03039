"""The kernels of attention against FlashInfer's, over the same pages."""

from __future__ import annotations

import random

import pytest
import torch

from outrider.engine.loaded_model import Geometry
from tests.gpu.cases import PAGE, SLOTS, Case, chain, tree

pytest.importorskip("flashinfer")
GEOMETRY = Geometry(1, 32, 8, 128, 128)


def distance(case, segments, options, **theirs) -> float:
    """Of the kernel's results from FlashInfer's, relative to their length."""
    from benchmarks.gpu_flashinfer import FlashInferStep

    found, _ = case.attend(segments, **options)
    peer = FlashInferStep(segments, GEOMETRY, PAGE, case.dtype, case.device, **theirs)
    memory = [part[0, :SLOTS] for part in case.kernel.stores()]
    expected = peer.attend(case.query.contiguous(), *memory)[case.order].float()
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kind", ["decode", "chains", "trees"])
def test_a_random_step_is_that_of_flashinfer(device, seed, kind):
    """One token of each sequence, chunks of prompts, or trees among chains, over contexts of any length."""
    draw, case = random.Random(seed), Case(GEOMETRY, device)
    texts = [case.sequence(draw.choice([0, 1, 15, 16, 17, 300, 2000])) for _ in range(draw.randint(1, 6))]
    sizes = [1 if kind == "decode" else draw.choice([1, 2, 17, 64]) for _ in texts]
    segments = [chain(*each) for each in zip(texts, sizes, strict=True)]
    if kind == "trees":
        segments[0] = tree(texts[0], 33)
    assert distance(case, segments, {}) < 1e-2


@pytest.mark.parametrize(
    ("options", "theirs"),
    [({"sliding_window": 100}, {"window_left": 99}), ({"softcap": 20.0}, {"logits_soft_cap": 20.0})],
)
def test_windows_and_softcaps_are_those_of_flashinfer(device, options, theirs):
    """Over chains: FlashInfer counts a window by entries, which positions are there."""
    case = Case(GEOMETRY, device)
    assert distance(case, [chain(case.sequence(300), 33)], options, **theirs) < 1e-2


def test_the_distance_is_seen(device):
    """Another scale is another attention: the guard that the tests above can fail."""
    case = Case(GEOMETRY, device)
    segments = [chain(case.sequence(300), 5)]
    assert distance(case, segments, {"scaling": torch.finfo(case.dtype).eps}) > 0.1
