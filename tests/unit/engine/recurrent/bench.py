"""A recurrent module behind a prompt, once as it is and once by what computes its candidates."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache

from outrider.engine.recurrent.pieces import Family, Piece
from outrider.engine.recurrent.probing import StatefulModule, recurrent_modules
from tests.models import config_of

PROMPT, HIDDEN = 6, 64
TREE = [(0, 0), (2, 1), (1, 1), (4, 2), (6, 3), (3, 0), (5, 1)]
"""Packed row and place of each candidate, depth first."""


class Bench:
    """The first recurrent module of an architecture, noisy; `rule_of` makes what computes its candidates."""

    def __init__(
        self, architecture: str, dtype: torch.dtype, rule_of: Callable[[Any], Any], **changes: Any
    ) -> None:
        config: Any = config_of(architecture, **changes)
        torch.manual_seed(0)
        module: Any = recurrent_modules(AutoModelForCausalLM.from_config(config))[0]
        for parameter in module.parameters():
            parameter.data += 0.2 * torch.randn_like(parameter)
        self.module, self.index, self.dtype = module.to(dtype).eval(), module.layer_idx, dtype
        self.cache = DynamicCache(config=config)
        # Where transformers asks the last recurrent layer whether there is a state, it has to be this one.
        self.cache.layers = self.cache.layers[: self.index + 1]
        self._stateful = StatefulModule(module, copy.deepcopy(self.cache), HIDDEN)
        self.inputs, self.output = self._stateful.linear_ends(module)
        self.rule = rule_of(self)
        assert self.output is not None
        self.output.forward = lambda x: x
        self.read(torch.randn(PROMPT, HIDDEN).to(dtype), self.cache)

    @torch.inference_mode()
    def read(self, rows: Tensor, cache: DynamicCache) -> Tensor:
        """[N, C] -> [N, width], by the module."""
        self._stateful._cache = cache
        made: Tensor = self._stateful(rows[None])
        return made[0]

    @property
    def prompt(self) -> Any:
        """The state behind it."""
        return vars(copy.deepcopy(self.cache.layers[self.index]))

    @torch.inference_mode()
    def step(self, families: list[Family], rows: Tensor) -> Tensor:
        """[N, C] -> [N, width], by the rule."""
        results = rows.new_zeros(len(rows), self.rule.width)
        made: dict[nn.Module, Tensor] = {child: child(rows) for child in self.inputs}
        self.rule(self.index, families, made, results)
        return results

    def family(self, state: Any, tree: list[tuple[int, int]] = TREE) -> Family:
        """Candidates behind a state."""
        pieces = [Piece(row, None) for row, _ in tree]
        return Family({self.index: state}, pieces, [place for _, place in tree])

    def assert_as_the_module(self) -> None:
        """Candidates become what the module makes of each path, and so do the states behind them."""

        rows, family = tokens(len(TREE), self.dtype), self.family(self.prompt)
        got = self.step([family], rows)
        for path, piece in zip(paths(), family.pieces, strict=True):
            cache = copy.deepcopy(self.cache)
            expected = torch.cat([self.read(rows[row : row + 1], cache) for row in path])
            assert_near(got[path], expected)
            self.assert_state(self.rule.whole(piece.after[self.index]), vars(cache.layers[self.index]))

    def assert_state(self, whole: Any, there: Any) -> None:
        """Two states are alike."""
        torch.testing.assert_close(whole["conv_states"][0], there["conv_states"][0])
        if there["recurrent_states"][0] is not None:
            torch.testing.assert_close(
                whole["recurrent_states"][0],
                there["recurrent_states"][0],
                rtol=1e-3,
                atol=2e-2 if whole["conv_states"][0].dtype.itemsize == 2 else 1e-5,
            )


def assert_bits_of_paths(bench: Bench, shared: Bench, dtype: torch.dtype) -> None:
    """A tree, its paths token by token, and several sequences with another bench: the same bits."""
    rows = tokens(len(TREE), dtype)
    tree = bench.step([bench.family(bench.prompt)], rows)
    for path in paths():
        state = bench.prompt
        for row in path:
            family = bench.family(state, [(row, 0)])
            assert torch.equal(bench.step([family], rows)[row], tree[row])
            state = family.pieces[0].after[bench.index]
    other = [(len(TREE) + place, place) for place in range(20)]
    families = [shared.family(shared.prompt, other), shared.family(shared.prompt)]
    both = shared.step(families, torch.cat([rows, tokens(20, dtype, 2)]))
    assert torch.equal(both[: len(TREE)], tree)


def tokens(count: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    """[count, HIDDEN] what goes into a module."""
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(dtype)


def paths(tree: list[tuple[int, int]] = TREE) -> list[list[int]]:
    """Packed rows of the path to each candidate."""
    path: list[int] = []
    found = []
    for row, place in tree:
        path[place:] = [row]
        found.append(list(path))
    return found


def assert_near(got: Tensor, expected: Tensor) -> None:
    """Equal but for the rounding of sums, which seldom moves a number of 16 bits. One that goes into a head
    may move all of the head's: with AVX512-FP16 17 of 256 in float16."""
    if got.dtype == torch.float32:
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    else:
        torch.testing.assert_close(got, expected, rtol=0.05, atol=0.02)
        assert (got != expected).float().mean() < (0.1 if got.dtype == torch.float16 else 0.01)
