"""Checks that all ranks have the same model.

Ranks that are started one by one may have different models: a rollout left an old rank, or a path is wrong.
Together they would compute neither model, so they compare what they have before they load it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import torch
from transformers import PretrainedConfig

from outrider import __version__
from outrider.config import VerifyConfig
from outrider.engine.loading.open_weights import Weight, first_row
from outrider.engine.parallel.ranks import Ranks
from outrider.protocol.errors import ModelError

SETTINGS = {
    *("context_length", "deterministic", "dtype", "kv_dtype", "kv_tokens", "max_step_tokens", "weights"),
}
"""Settings that determine what all ranks compute, and on GPUs how a step is padded."""


def digest_of(settings: VerifyConfig, config: PretrainedConfig, weights: Mapping[str, Weight]) -> str:
    """Return the digest of this version, the settings, a model's configuration and the first row of each of
    its weights.

    A model that was trained further differs in most rows, and reading all of a large model takes minutes.
    """
    told = [__version__, settings.model_dump(include=SETTINGS), config.to_dict() | {"_name_or_path": ""}]
    digest = hashlib.blake2b(json.dumps(told, sort_keys=True, default=str).encode(), digest_size=16)
    for name, weight in sorted(weights.items()):
        first = first_row(weight)
        digest.update(f"{name} {weight.get_shape()} {first.dtype}".encode())
        digest.update(first.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def check_same(ranks: Ranks, digest: str) -> None:
    """Compare the digests of all ranks.

    Raises:
        ModelError: a rank has another digest than rank 0.
    """
    ranks.report("digest", digest)
    first, *others = ranks.wait_for("digest")
    ranks.report("compared")
    different = [rank for rank, other in enumerate(others, 1) if other != first]
    if different:
        if ranks.rank == 0:  # the others can read what was reported only while it runs
            ranks.wait_for("compared")
        raise ModelError(
            f"tensor_parallel: rank {different[0]} has another model, version or settings "
            f"({', '.join(sorted(SETTINGS))}) than rank 0; start all ranks with the same"
        )
