"""The least time of a step."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.floor import Floor, step_bytes


def checkpoint(folder: Path, **config: object) -> Path:
    """A model of three matrices and a norm."""
    tensors = {
        "model.embed_tokens.weight": torch.zeros(50, 4),
        "model.layers.0.mlp.up_proj.weight": torch.zeros(6, 4),
        "model.norm.weight": torch.zeros(4),
        "lm_head.weight": torch.zeros(50, 4),
    }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_step_reads_every_matrix_but_the_embedding(tmp_path: Path) -> None:
    """Of which it reads a row a token."""
    assert step_bytes(checkpoint(tmp_path), "float32") == 4 * (6 * 4 + 50 * 4)
    assert step_bytes(checkpoint(tmp_path, torch_dtype="bfloat16"), "auto") == 2 * (6 * 4 + 50 * 4)


def test_rounded_weights_are_fewer_bytes(tmp_path: Path) -> None:
    """A scale of two bytes for 32 numbers beside the codes; the output layer has 8 bits at least."""
    head, layer, scales = 50 * 4, 6 * 4, 2 / 32
    folder = checkpoint(tmp_path)
    assert step_bytes(folder, "bfloat16", "int8") == int((head + layer) * (1 + scales))
    assert step_bytes(folder, "bfloat16", "int4") == int(head * (1 + scales) + layer * (0.5 + scales))


def test_more_cores_read_faster() -> None:
    """Each number of cores has its own floor."""
    floor = Floor(step_bytes=26, bandwidths=(13.0, 26.0))
    assert (floor.seconds(), floor.seconds(2)) == (2.0, 1.0)
