"""Names the weights of a model: the short name is the same wherever the files are the same."""

from __future__ import annotations

import hashlib
from pathlib import Path

from outrider.engine.loading.model_path import check_model_path, find_file

CHARACTERS = 8
"""Characters of a version."""
CHUNK = 1 << 22
"""Bytes that are read at once."""


def weights_version(model: str, *settings: str) -> str:
    """Return the beginning of a hash of a model's files, and of settings that change what it computes.

    This reads all files. The result is empty where the files are not local.

    Raises:
        ModelError: there is no such folder.
    """
    check_model_path(model)
    digest = hashlib.sha256("\0".join(settings).encode())
    files = _files(model)
    for path in files:
        digest.update(b"\0" + path.name.encode() + b"\0")
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
    return digest.hexdigest()[:CHARACTERS] if files else ""


def _files(model: str) -> list[Path]:
    config = find_file(model, "config.json")
    return [] if config is None else [config, *sorted(config.parent.glob("*.safetensors"))]
