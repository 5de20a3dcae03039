"""The files of a draft's weights, by which a change is noticed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeAlias

Seen: TypeAlias = tuple[tuple[str, int, int], ...]
"""For each file: its real path, its size and the time of its last change."""


def files_of(model: str) -> Seen:
    """Return the present files of a model's folder; empty while some are missing."""
    folder = Path(model)
    try:
        paths = [folder / "config.json", *sorted(folder.glob("*.safetensors"))]
        stats = [(os.path.realpath(path), path.stat()) for path in paths]
    except OSError:
        return ()
    return tuple((path, stat.st_size, stat.st_mtime_ns) for path, stat in stats) if stats[1:] else ()
