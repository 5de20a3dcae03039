"""A rank reads its slices of codes, scales and zeros and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from outrider.engine.loading.model_config import read_config
from outrider.engine.loading.open_weights import InMemory, OpenWeights
from outrider.engine.parallel.coded import coded_parts, common_step
from outrider.engine.parallel.cuts import Cuts
from outrider.engine.quantization import layouts
from outrider.engine.quantization.checkpoint import layout_of
from outrider.protocol.errors import ModelError
from tests.checkpoints import write
from tests.unit.engine.loading.test_stored import EXACT, WIDENED
from tests.unit.engine.parallel.test_weights import Counted, shares

OF_ALL = ("weight_shape", "input_scale", "_idx")
"""In the names of tensors that are small and read whole."""


@pytest.mark.parametrize("name", [*EXACT, *WIDENED])
def test_two_ranks_read_each_tensor_once(name: str, folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    """Together they read as many entries of codes as there are; of scales and zeros more only where one is of
    both ranks, or where groups are in no order."""
    written = write(folder_of("llama"), tmp_path / "model", *(EXACT | WIDENED)[name])
    config = read_config(str(written.folder), False)
    layout = layout_of(str(written.folder), config)
    assert layout is not None
    with OpenWeights(str(written.folder)) as opened:
        counted = {name: Counted(weight) for name, weight in opened.weights.items() if "_proj" in name}
        step = common_step(counted, layout, shares(folder_of("llama")))
        for weight in counted.values():
            weight.read = 0
        for rank in range(2):
            dict(coded_parts(counted, layout, Cuts(shares(folder_of("llama")), rank, 2, step)))
        for tensor, weight in counted.items():
            if any(kind in tensor for kind in OF_ALL):
                continue
            shape, twice = torch.Size(weight.get_shape()), "scale" in tensor or "zero" in tensor
            row = shape[-1] if tensor.endswith(".weight") else 0  # tells each rank the dtype
            assert shape.numel() <= weight.read <= (2 if twice else 1) * shape.numel() + 2 * row, tensor


def test_shapes_that_show_no_groups_are_refused(folder_of: Callable[[str], Path]) -> None:
    """7 scales for 96 numbers are of no format that is known."""
    parts = {"weight_scale": torch.ones(64, 7), "weight_packed": torch.zeros(64, 12, dtype=torch.int32)}
    weights = {f"model.layers.0.mlp.down_proj.{name}": InMemory(part) for name, part in parts.items()}
    with pytest.raises(ModelError, match="weight_scale has 7 entries for the 96 numbers of the config"):
        common_step(weights, layouts.compressed_tensors([(1, 32)]), shares(folder_of("llama")))
