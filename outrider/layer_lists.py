"""Lists of a model's layers in text, such as `4-9` or `2,5-7`. Pure."""

from __future__ import annotations

from collections.abc import Collection

MAX_LAYERS = 10_000
"""Layers are counted from 0 to below this: more than any model has."""


def parse_layers(text: str) -> frozenset[int]:
    """Return the layers of a list, counted from 0; none if the list is empty.

    Raises:
        ValueError: the text is no such list; says what it must be.
    """
    try:
        return frozenset(layer for part in text.split(",") if part for layer in _range(part))
    except ValueError:
        raise ValueError("must be a list of layers such as 4-9 or 2,5-7") from None


def spell_layers(layers: Collection[int]) -> str:
    """Return layers as a list in text; the inverse of `parse_layers`."""
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and runs[-1][-1] + 1 == layer:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _range(part: str) -> range:
    first, to, last = part.partition("-")
    found = range(int(first), int(last if to else first) + 1)
    if not found or found.stop > MAX_LAYERS:
        raise ValueError(part)
    return found
