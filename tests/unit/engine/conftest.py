"""Tiny models, built once, beside the same models as transformers runs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from outrider.engine.loaded_model import LoadedModel
from outrider.engine.loading.loader import load_model
from tests.models import build_model, plain_model


@dataclass(frozen=True, slots=True)
class Pair:
    """One model: in this engine, and plain."""

    loaded: LoadedModel
    plain: PreTrainedModel

    def expected(self, tokens: list[int]) -> torch.Tensor:
        """[T, V] logits of the plain model."""
        with torch.no_grad():
            return self.plain(torch.tensor([tokens]), use_cache=False).logits[0].float()


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny model by architecture."""

    @cache
    def build(architecture: str) -> Path:
        return build_model(architecture, tmp_path_factory.mktemp(architecture))

    return build


@pytest.fixture(scope="session")
def pair_of(folder_of: Callable[[str], Path]) -> Callable[..., Pair]:
    """A tiny model by architecture and dtype."""

    @cache
    def load(architecture: str, dtype: str = "float32") -> Pair:
        folder = str(folder_of(architecture))
        plain = plain_model(folder, getattr(torch, dtype))
        return Pair(load_model(folder, dtype=dtype, device="cpu", threads=1), plain)

    return load
