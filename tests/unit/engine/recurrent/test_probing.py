"""What a recurrent module of transformers is known by."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from outrider.engine.recurrent.probing import recurrent_modules


class _Older(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer_idx, self.convolution = 0, nn.Conv1d(2, 2, 2)

    def forward(self, hidden: Tensor, cache_params: object = None) -> Tensor:
        return hidden


class _Newer(_Older):
    def forward(self, hidden: Tensor, cache: object = None) -> Tensor:  # type: ignore[override]
        return hidden


@pytest.mark.parametrize("kind", [_Older, _Newer])
def test_a_cache_is_known_by_the_names_of_several_versions(kind: type[nn.Module]) -> None:
    """transformers 5.24 calls the cache of recurrent modules `cache`, older ones `cache_params`."""
    module = kind()
    assert recurrent_modules(nn.Sequential(module)) == [module]
