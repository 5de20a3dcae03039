"""Layers that are a short convolution between two gates: LFM2 and its relatives.

Such a layer keeps the last inputs of its convolution. So candidates need no levels: the inputs on the path of
each are gathered, and all candidates are computed at once, each number by itself.

Shapes: N packed tokens, n candidates of a step, T taps of the convolution and C its channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from outrider.engine.recurrent.pieces import Family, Made

_KNOWN = ("Lfm2ShortConv", "Lfm2MoeShortConv", "Lfm3ShortConv")


def computes(module: Any, inputs: Sequence[nn.Module], output: nn.Module | None) -> bool:
    """True for a module that `ShortConvolution` knows, whose linear layers are `inputs` and `output`."""
    if type(module).__name__ not in _KNOWN:
        return False
    return [*inputs, output] == [module.in_proj, module.out_proj]


class ShortConvolution:
    """The candidates of one module."""

    def __init__(self, module: Any) -> None:
        weight, bias = module.conv.weight, module.conv.bias
        self._input, self._dtype = module.in_proj, weight.dtype
        self.width, _, self._taps = weight.shape
        """C, also the width of the last linear layer's input."""
        with torch.inference_mode():
            self._weights = weight[:, 0].t().float().contiguous()
            self._bias = None if bias is None else bias.float()

    def __call__(self, index: int, families: Sequence[Family], made: Made, results: Tensor) -> None:
        """Write the candidates' results before the last linear layer to their rows of `results` [N, C].

        Each candidate gets its state for layer `index`.
        """
        if not families:
            return
        device, states = results.device, [family.before[index] for family in families]
        rows = torch.tensor([piece.row for family in families for piece in family.pieces], device=device)
        before, after, inner = made[self._input].index_select(0, rows).chunk(3, -1)
        pasts = [state["conv_states"][0][0].t()[1:] for state in states]
        places = torch.tensor(_windows(families, self._taps), device=device)
        windows = torch.cat([*pasts, before * inner]).index_select(0, places.flatten())
        windows = windows.view(len(rows), self._taps, self.width)
        results.index_copy_(0, rows, after * self._convolved(windows))
        parts = torch.split(windows.mT, [len(family.pieces) for family in families])
        for family, state, part in zip(families, states, parts, strict=True):
            own = part.clone()  # so that a kept candidate does not keep those of other sequences
            for piece, kept in zip(family.pieces, torch.split(own, 1), strict=True):
                piece.after[index] = {**state, "conv_states": {0: kept}}

    def whole(self, state: Any) -> Any:
        """Return the state in the form of transformers' cache, which all states here have."""
        return state

    def _convolved(self, windows: Tensor) -> Tensor:
        """[n, T, C] -> [n, C]; products and sums are computed one by one, with bits that do not depend on
        places in a tensor."""
        total: Tensor = windows[:, 0] * self._weights[0]
        for tap in range(1, self._taps):
            total = total + windows[:, tap] * self._weights[tap]
        return (total if self._bias is None else total + self._bias).to(self._dtype)


def _windows(families: Sequence[Family], taps: int) -> list[list[int]]:
    """Return [n, T]: where the last inputs on each candidate's path are, its own last.

    Inputs are numbered: first the T - 1 past ones of each family, then those of the candidates.
    """
    windows, count = [], len(families) * (taps - 1)
    for number, family in enumerate(families):
        path = list(range(number * (taps - 1), (number + 1) * (taps - 1)))
        for place in family.places:
            path[taps - 1 + place :] = [count]
            windows.append(path[place:])
            count += 1
    return windows
