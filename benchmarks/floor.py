"""Computes the least time of a step: the weights' bytes over the rate at which this machine reads memory.

Nothing computes a token faster without reading less: every weight of the linear layers is read once a step.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from outrider.engine.quantization.modules import HEAD_BITS
from outrider.engine.quantization.rounding import BITS, GROUP

READ_BYTES = 2**29
"""Bytes that a measurement reads: more than the caches hold."""
ROUNDS = 9


@dataclass(frozen=True, slots=True)
class Floor:
    """The bytes that one step reads, and how fast cores read."""

    step_bytes: int
    bandwidths: tuple[float, ...]
    """Bytes per second of 1, 2, ... cores."""

    def seconds(self, cores: int = 1) -> float:
        """The least time of a step on `cores` cores."""
        return self.step_bytes / self.bandwidths[cores - 1]

    def __str__(self) -> str:
        each = ", ".join(
            f"{rate / 1e9:.1f} GB/s by {cores} = {self.seconds(cores) * 1e3:.1f} ms a step"
            for cores, rate in enumerate(self.bandwidths, 1)
        )
        return f"{self.step_bytes / 1e6:.0f} MB of weights; read at {each}"


def measure_floor(folder: Path, dtype: str, cores: int, weights: str = "full") -> Floor:
    """The floor of a checkpoint in a folder, on up to `cores` cores."""
    return Floor(
        step_bytes(folder, dtype, weights), tuple(read_bandwidth(count) for count in range(1, cores + 1))
    )


def step_bytes(folder: Path, dtype: str, weights: str = "full") -> int:
    """Bytes of the weights that every step reads: all matrices but an embedding that is no output layer.

    With rounded `weights` each group has a scale of 2 bytes, and the output layer 8 bits at least.
    """
    config = json.loads((folder / "config.json").read_text())
    dtype = dtype if dtype != "auto" else config.get("dtype") or config.get("torch_dtype") or "float32"
    bits = 8 * getattr(torch, dtype).itemsize if weights == "full" else BITS[weights]
    min_head_bits, scales = (0, 0.0) if weights == "full" else (HEAD_BITS, 16 / GROUP)
    tied = config.get("tie_word_embeddings", False)
    count = 0.0
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  # not a dictionary
                shape = file.get_slice(name).get_shape()
                if len(shape) == 2 and (tied or "embed" not in name):
                    looks_like_head = "lm_head" in name or "embed" in name
                    each = max(bits, min_head_bits) if looks_like_head else bits
                    count += shape[0] * shape[1] * (each + scales) / 8
    return int(count)


def read_bandwidth(cores: int) -> float:
    """Bytes per second that `cores` threads of torch read, at best."""
    before = torch.get_num_threads()
    torch.set_num_threads(cores)
    memory = torch.ones(READ_BYTES // 4)
    best = float("inf")
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        memory.sum()
        best = min(best, time.perf_counter() - begun)
    torch.set_num_threads(before)
    return READ_BYTES / best
