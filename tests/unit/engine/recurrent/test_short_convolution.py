"""Candidates of short convolutions, against the modules of transformers that compute single tokens."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from outrider.engine.kv.kept_states import joined, size_of
from outrider.engine.recurrent.short_convolution import ShortConvolution, computes
from tests.unit.engine.recurrent.bench import TREE, Bench, assert_bits_of_paths, assert_near, tokens

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def rule_of(bench: Bench) -> ShortConvolution:
    """Of a known module."""
    assert computes(bench.module, bench.inputs, bench.output)
    return ShortConvolution(bench.module)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("taps", [1, 3, 4])
@pytest.mark.parametrize("architecture", ["lfm2", "lfm2_moe", "lfm3"])
def test_candidates_become_what_the_module_makes_of_each_path(
    architecture: str, taps: int, bias: bool, dtype: torch.dtype
) -> None:
    """And the states behind them are those of its cache."""
    Bench(architecture, dtype, rule_of, conv_L_cache=taps, conv_bias=bias).assert_as_the_module()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_depend_on_the_path_alone(dtype: torch.dtype) -> None:
    """A tree, its paths token by token, and two sequences: the same bits."""
    bench = Bench("lfm2", dtype, rule_of)
    assert_bits_of_paths(bench, bench, dtype)


def test_a_module_goes_on_behind_a_candidate() -> None:
    """Its state is one of transformers' cache, of the same size."""
    bench = Bench("lfm2", torch.float32, rule_of)
    rows, family = tokens(len(TREE), torch.float32), bench.family(bench.prompt)
    bench.step([family], rows)
    state = family.pieces[4].after[bench.index]
    assert size_of(state) == size_of(bench.prompt)
    following = bench.step([bench.family(state)], rows)
    cache = copy.deepcopy(bench.cache)
    vars(cache.layers[bench.index]).update(joined([state]))
    assert_near(bench.read(rows[:1], cache), following[:1])


def test_a_step_without_candidates_computes_nothing() -> None:
    """That of a prompt."""
    bench = Bench("lfm2", torch.float32, rule_of)
    assert not bench.step([], tokens(2, torch.float32)).any()


def test_modules_that_compute_something_else_are_left_alone() -> None:
    """Linear layers elsewhere, or another class."""
    bench = Bench("lfm2", torch.float32, rule_of)
    assert not computes(bench.module, [], bench.output)
    assert not computes(bench.module, bench.inputs, None)
    assert not computes(nn.Linear(1, 1), [], None)
