"""Draft heads on the device: they compute what they compute on the CPU."""

from __future__ import annotations

import pytest
import torch

from outrider.engine.heads.base import Head, Rows

TOKENS = (3, 77, 120, 9, 30)


@pytest.fixture(params=["eagle", "mtp"])
def head_on(request, tmp_path):
    """Loads a random head, in float32, on a device."""
    pytest.importorskip("pydantic")  # the other tests of this folder do without
    from outrider.engine.heads.loading import load_head
    from tests.heads import build_head
    from tests.models import build_model
    from tests.mtp import build_target

    target = tmp_path / "target"
    if request.param == "mtp":
        build_target("deepseek_v3", target)
        model = target
    else:
        build_model("llama", target)
        model = build_head(tmp_path / "head")

    def load(device: str) -> Head:
        return load_head(
            str(model), str(target), kind=request.param, dtype="float32", device=device, threads=1
        )

    return load


def computed(head: Head) -> list[torch.Tensor]:
    """Features and logits of a text's rows."""
    count = len(TOKENS)
    draw = torch.Generator().manual_seed(1)
    told = torch.randn(count, len(head.feature_layers) * head.target_hidden_size, generator=draw)
    seen = torch.ones(count, count, dtype=torch.bool, device=head.device).tril()
    places = torch.arange(1, count + 1, device=head.device)
    rows = Rows(torch.tensor(TOKENS, device=head.device), places, head.fuse(told), range(count))
    with torch.inference_mode():
        found = head.compute(rows, lambda queries, entries, mix: mix(queries, entries, seen))
    assert found is not None
    return [tensor.cpu() for tensor in found]


def test_a_head_computes_what_it_computes_on_the_cpu(head_on, device):
    """But for rounding."""
    for ours, theirs in zip(computed(head_on(str(device))), computed(head_on("cpu")), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-3)
