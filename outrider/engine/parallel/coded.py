"""A rank's part of a quantized checkpoint: its slices of each layer's codes, scales and zeros."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import lcm
from typing import TypeAlias

import torch

from outrider.engine.fused_decoder.shares import IN, OUT, Share, share_of
from outrider.engine.loading.open_weights import Weight, by_module
from outrider.engine.parallel.cuts import WHOLE, Along, Cuts
from outrider.engine.parallel.weights import part_of
from outrider.engine.quantization.layouts import ORDER, SHAPE, Layout, Parts
from outrider.protocol.errors import ModelError

_OF_GROUPS = ("scale", "zero")
"""Parts of the names of tensors that have one entry per group."""
_CODES = (".weight", "qweight", ".weight_packed")
"""How the names of tensors of codes end: a word of theirs holds as many numbers as there are bits for."""
_Layer: TypeAlias = Mapping[str, Weight]


def common_step(weights: Mapping[str, Weight], layout: Layout, shares: Mapping[str, Share]) -> int:
    """Return how many numbers stay together where a rank could otherwise have any: those of a group, a block
    or a word.

    Raises:
        ModelError: the shapes of tensors do not show it.
    """
    step = 1
    for share, _, axes in _coded(weights, layout, shares):
        cut = [numbers for side, numbers in axes if side == share.side and numbers < share.shape[side]]
        step = step if share.piece else lcm(step, *cut)
    return step


def check_coded(weights: Mapping[str, Weight], layout: Layout, cuts: Cuts) -> None:
    """Check that all layers can be cut; this reads hardly any of their data.

    Raises:
        ModelError: a cut would fall between numbers that share an entry.
    """
    for _, name, axes in _coded(weights, layout, cuts.shares):
        cuts.cut(name, weights[name].get_shape(), axes)


def unquantized(weights: Mapping[str, Weight], layout: Layout | None) -> Mapping[str, Weight]:
    """Return the weights of layers that are not quantized."""
    if layout is None:
        return weights
    layers = by_module(weights).items()
    kept = [(module, layer) for module, layer in layers if not layout.mark(frozenset(layer))]
    return {f"{module}.{name}": weight for module, layer in kept for name, weight in layer.items()}


def coded_parts(weights: Mapping[str, Weight], layout: Layout, cuts: Cuts) -> Iterator[tuple[str, Parts]]:
    """Yield a rank's tensors of every module, with the module's name. They are read on demand."""
    for module, layer in by_module(weights).items():
        share = share_of(cuts.shares, module)
        axes: Mapping[str, Along | None] = dict.fromkeys(layer)
        if share is not None and layout.mark(frozenset(layer)):
            axes = _axes(module, layer, layout, share)
        parts = {
            name: part_of(layer[name], cuts.cut(f"{module}.{name}", layer[name].get_shape(), along))
            for name, along in axes.items()
        }
        if share is not None and SHAPE in parts:
            parts[SHAPE] = torch.tensor(cuts.shape(share))
        yield module, parts


def _coded(
    weights: Mapping[str, Weight], layout: Layout, shares: Mapping[str, Share]
) -> Iterator[tuple[Share, str, Along]]:
    """Yield all tensors of shared quantized layers: the share, the name, and what the axes run along."""
    for module, layer in by_module(weights).items():
        share = share_of(shares, module)
        if share is not None and layout.mark(frozenset(layer)):
            for name, along in _axes(module, layer, layout, share).items():
                yield share, f"{module}.{name}", along


def _axes(module: str, layer: _Layer, layout: Layout, share: Share) -> dict[str, Along]:
    """Return what the axes of each of a layer's tensors run along.

    Groups of consecutive numbers need no list of the group of each number. With such a list a rank may have
    numbers of any group, so it gets the scales and zeros of all.
    """
    axes = {
        name: _along(module, name, weight.get_shape(), layout.sides, layout.entries, share)
        for name, weight in layer.items()
    }
    (order, *_) = [name for name in layer if name in ORDER] or [""]
    if not order or share.side != IN:
        return axes
    shown = max(numbers for along in axes.values() for side, numbers in along if side == IN)
    size = layout.group if layout.group > 0 else shown
    groups = torch.arange(share.shape[IN]) // size
    if torch.equal(layer[order][...].long(), groups):
        return {name: along for name, along in axes.items() if name != order}
    return {
        name: [(WHOLE, numbers) for _, numbers in along] if any(of in name for of in _OF_GROUPS) else along
        for name, along in axes.items()
    }


def _along(
    module: str, name: str, shape: list[int], sides: tuple[int, int], known: tuple[int, ...], share: Share
) -> Along:
    if name == SHAPE:
        return []
    if len(shape) < 2:
        sides = (IN, OUT) if name in ORDER else (OUT, IN)
    return [
        (side, _numbers(share.shape[side], count, known, f"{module}.{name}"))
        for side, count in zip(sides, shape, strict=False)
    ]


def _numbers(size: int, count: int, known: tuple[int, ...], name: str) -> int:
    """Return how many of `size` numbers share one of `count` entries."""
    if count in (1, size):
        return size // count
    whole = size % count == 0 and not name.endswith(_CODES)
    exact = [size // count] if whole else []
    found = [numbers for numbers in (*known, *exact) if -(-size // numbers) == count]
    if not found:
        raise ModelError(
            f"tensor_parallel: {name} has {count} entries for the {size} numbers of the config.json, which "
            "cannot be divided between ranks; use the config.json that belongs to the weights, or set "
            "tensor_parallel to 1"
        )
    return found[0]
