"""Widen the MLP of a Llama-style checkpoint without changing what it computes.

New rows of `gate_proj` and `up_proj` are random, and the columns of `down_proj` that read them are zero. So
every logit stays the same while a forward reads the weights of a larger model, and a small trained pair has
the memory-bound timing of a large one.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

DEMO_INTERMEDIATE_SIZE = 46336
"""Intermediate size that widens the demo target from 5.5 M to about 216 M parameters."""


def widen(source: Path, destination: Path, intermediate_size: int) -> int:
    """Write the widened checkpoint and return its number of parameters.

    Raises:
        ValueError: the checkpoint is not Llama-style, or is that wide already.
    """
    config = json.loads((source / "config.json").read_text())
    if intermediate_size <= config.get("intermediate_size", intermediate_size):
        raise ValueError(f"{source} needs an intermediate_size below {intermediate_size} in its config.json")
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: _widened(name, weight, intermediate_size, generator) for name, weight in load(source).items()
    }
    destination.mkdir(parents=True, exist_ok=True)
    copy_tokenizer(source, destination)
    save_file(tensors, destination / "model.safetensors", metadata={"format": "pt"})
    config["intermediate_size"] = intermediate_size
    (destination / "config.json").write_text(json.dumps(config, indent=2) + "\n")  # last: marks it complete
    return sum(weight.numel() for weight in tensors.values())


def load(source: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint.

    Raises:
        ValueError: it has no Llama-style MLP.
    """
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(source.glob("*.safetensors")):
        tensors |= load_file(shard)
    if not any(name.endswith("mlp.down_proj.weight") for name in tensors):
        raise ValueError(f"{source} has no Llama-style MLP (gate_proj, up_proj, down_proj) in safetensors")
    return tensors


def _widened(name: str, weight: torch.Tensor, size: int, generator: torch.Generator) -> torch.Tensor:
    """gate, up: [intermediate, hidden] grows random rows; down: [hidden, intermediate] grows zero columns."""
    if name.endswith(("mlp.gate_proj.weight", "mlp.up_proj.weight")):
        rows = torch.randn(size - weight.shape[0], weight.shape[1], generator=generator)
        return torch.cat([weight, (rows * weight.float().std()).to(weight.dtype)])
    if name.endswith("mlp.down_proj.weight"):
        return torch.nn.functional.pad(weight, (0, size - weight.shape[1]))
    return weight


def copy_tokenizer(source: Path, destination: Path) -> None:
    """Copy the files that belong to a model's text."""
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if (source / name).exists():
            shutil.copyfile(source / name, destination / name)
