"""A draft that has become bad: the same model with noise on its weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def noised_copy(source: Path, destination: Path, noise: float) -> Path:
    """Copy a checkpoint, adding to each matrix normal noise of `noise` times its standard deviation."""
    generator = torch.Generator().manual_seed(0)
    shutil.copytree(source, destination, dirs_exist_ok=True)
    for shard in destination.glob("*.safetensors"):
        tensors = load_file(shard)
        noised = {name: _noised(weight, noise, generator) for name, weight in tensors.items()}
        save_file(noised, shard, metadata={"format": "pt"})
    return destination


def _noised(weight: torch.Tensor, noise: float, generator: torch.Generator) -> torch.Tensor:
    if weight.ndim < 2:
        return weight
    change = torch.randn(weight.shape, generator=generator) * (noise * weight.float().std())
    return (weight.float() + change).to(weight.dtype)
