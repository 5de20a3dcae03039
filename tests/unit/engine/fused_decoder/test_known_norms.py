"""What norms of transformers compute is found out by running them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers.models.cohere2.modeling_cohere2 import Cohere2LayerNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from outrider.engine.fused_decoder.known_norms import described
from outrider.engine.fused_decoder.modules import NotFused
from outrider.engine.fused_decoder.norm import RowNorm

WIDTH = 48
NORMS = {
    "Llama": LlamaRMSNorm(WIDTH, 1e-5),
    "Olmo2": Olmo2RMSNorm(WIDTH, 1e-6),
    "Gemma3": Gemma3RMSNorm(WIDTH, 1e-6),
    "Gemma4": Gemma4RMSNorm(WIDTH, 1e-6),
    "Cohere2": Cohere2LayerNorm(WIDTH, 1e-5),
    "Nemotron": NemotronLayerNorm1P(WIDTH, 1e-5),
    "LayerNorm": nn.LayerNorm(WIDTH, 1e-5),
    "LayerNorm without bias": nn.LayerNorm(WIDTH, 1e-5, bias=False),
}
EXACT = {"Olmo2", "Gemma3", "Gemma4"}
"""Those that round behind their weight, and so keep it in float32."""


def rows(dtype: torch.dtype) -> Tensor:
    """[3, WIDTH], one of them small."""
    made = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(5)) + 1.0
    return (made * torch.tensor([[1.0], [30.0], [0.002]])).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NORMS)
def test_a_norm_is_computed_as_its_module_does(name: str, dtype: torch.dtype) -> None:
    """Also where its weights are as it was made: all ones, or zeros."""
    module = NORMS[name].to(dtype).requires_grad_(False)
    for random in (False, True):
        for weight in module.parameters() if random else ():
            weight.normal_(generator=torch.Generator().manual_seed(6))
        norm = described(module, torch.empty(0, dtype=dtype))
        computed = RowNorm(norm, dtype)(rows(dtype))
        torch.testing.assert_close(computed, module(rows(dtype)))
        assert norm.weight.dtype == (torch.float32 if name in EXACT else dtype)


def test_a_model_without_weights_tells_its_norms() -> None:
    """Ranks look at a model before they read a weight."""
    with torch.device("meta"):
        module = Cohere2LayerNorm(WIDTH)
    assert described(module, torch.empty(0)).centred


def test_another_norm_is_refused() -> None:
    """One that divides by the mean of the numbers without their signs, and one that does not run."""

    class OtherNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(WIDTH)), 1e-6

        def forward(self, x: Tensor) -> Tensor:
            return x / (x.abs().mean(-1, keepdim=True) + self.eps) * self.weight

    class BrokenNorm(OtherNorm):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("no device")

    with pytest.raises(NotFused, match="OtherNorm computes none of the known norms"):
        described(OtherNorm(), torch.empty(0))
    with pytest.raises(NotFused, match=r"BrokenNorm does not run by itself \(no device\)"):
        described(BrokenNorm(), torch.empty(0))
