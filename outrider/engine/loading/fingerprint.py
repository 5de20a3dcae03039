"""Distinguishes models that have the same name, by a digest of the configuration and of samples of all
weights."""

from __future__ import annotations

import hashlib
import json
from itertools import chain

import torch
from transformers import PreTrainedModel

SAMPLES = 256
"""Evenly spread values of each tensor that are read. A model that was trained further differs nearly
everywhere, and reading all of a large model takes minutes."""
_OF_THE_FILE = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures"}
"""Entries of a configuration that change no number."""


def fingerprint(network: PreTrainedModel) -> str:
    """32 hexadecimal digits, equal for models with equal configurations and weights."""
    digest = hashlib.blake2b(digest_size=16)
    settings = {name: value for name, value in network.config.to_dict().items() if name not in _OF_THE_FILE}
    digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
    stored = network.state_dict()
    buffers = ((name, buffer) for name, buffer in network.named_buffers() if name in stored)
    for name, weight in chain(network.named_parameters(), buffers):
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        digest.update(_samples(weight))
    return digest.hexdigest()


def _samples(weight: torch.Tensor) -> bytes:
    flat = weight.detach().reshape(-1)
    chosen = flat[:: max(1, len(flat) // SAMPLES)].cpu().contiguous()
    return chosen.view(torch.uint8).numpy().tobytes()
