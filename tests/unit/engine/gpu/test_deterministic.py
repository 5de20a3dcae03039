"""`deterministic` on the kernels of GPUs, through Triton's interpreter: tiny models in all ways of computing.

Equal bits here are necessary. On a device they rest on what `docs/exactness.md` says besides.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.engine.gpu import ordered_plan
from outrider.engine.gpu.ordered_linear import OrderedLinear
from outrider.engine.gpu.runner import GraphRunner
from outrider.engine.loaded_model import LoadedModel
from outrider.engine.loading import check_determinism, loader
from outrider.engine.make_runner import make_runner
from outrider.protocol.errors import ModelError
from tests.models import build_model
from tests.unit.engine.gpu.fakes import FakeGraphs
from tests.unit.engine.reading import VOCABULARY, Target, read_all, token_by_token

LENGTH = 76
PAGES = 200
BUCKETS = (1, 4, 12)


@pytest.fixture(autouse=True)
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of the tests have two, and the check at load reads a short context."""
    monkeypatch.setattr(ordered_plan, "SPLIT", 64)
    monkeypatch.setattr(check_determinism, "CONTEXT", 30)


def load(folder: Path, dtype: str = "float32", **options: Any) -> LoadedModel:
    """A model as a GPU has it: on its kernels, with the linear layers of torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "pack_linears", lambda *_: 0)
        patch.setattr(loader, "_with_kernels", lambda loaded, say: replace(loaded, kernels=True))
        return loader.load_model(
            str(folder), dtype=dtype, device="cpu", threads=1, deterministic=True, **options
        )


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory) -> Callable[[str], Path]:
    """The folder of a tiny model of two layers by architecture."""

    @cache
    def build(architecture: str) -> Path:
        return build_model(architecture, tmp_path_factory.mktemp(architecture), num_hidden_layers=2)

    return build


@pytest.mark.parametrize(
    ("architecture", "dtype"), [("llama", "bfloat16"), ("qwen3", "float32"), ("mistral", "float32")]
)
def test_any_way_of_computing_gives_the_same_bits(folder_of, architecture, dtype):
    """Chunks, trees, batches, graphs, page sizes and reused prefixes against one token at a time, eagerly."""
    loaded = load(folder_of(architecture), dtype)
    generator = random.Random(1)
    texts = [[generator.randrange(VOCABULARY) for _ in range(LENGTH)] for _ in range(2)]
    texts[1] = texts[0][:20] + texts[1][:20]
    alone = [token_by_token(make_runner(loaded, PAGES, 4), text) for text in texts]
    target = Target(loaded, texts, alone)
    graphs = FakeGraphs()
    read_all(target, GraphRunner(loaded, PAGES, 4, buckets=BUCKETS, graphs=graphs), 0)
    assert graphs.replayed > 2
    read_all(target, GraphRunner(loaded, PAGES, 7, buckets=()), 1)
