"""The kernel of Mamba-2's state space, against the modules of transformers that it stands for."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from outrider.engine.cpu.worker_pool import WorkerPool
from outrider.engine.kv.kept_states import joined, size_of
from outrider.engine.recurrent.state_space import StateSpace, computes
from tests.unit.engine.kernel_marks import dtypes, needs_kernels
from tests.unit.engine.recurrent.bench import TREE, Bench, assert_bits_of_paths, assert_near, tokens

pytestmark = needs_kernels
KNOWN = ("bamba", "granitemoehybrid", "falcon_h1", "nemotron_h")
SHAPES = [(4, 32, 16, 1), (8, 24, 20, 2), (2, 64, 128, 2), (8, 16, 70, 4)]
"""Heads, their width, that of their states, groups."""


def sizes_of(architecture: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """How a configuration says a shape."""
    heads, width, states, groups = shape
    if architecture == "nemotron_h":
        return {
            "mamba_num_heads": heads,
            "mamba_head_dim": width,
            "ssm_state_size": states,
            "n_groups": groups,
        }
    sizes = {"n_heads": heads, "d_head": width, "d_state": states, "n_groups": groups, "d_ssm": heads * width}
    # the width of all heads is a multiple of the model's
    return {f"mamba_{name}": size for name, size in sizes.items()} | {"mamba_expand": heads * width // 64}


def bench_of(
    architecture: str, shape: tuple[int, ...], dtype: torch.dtype, threads: int = 1, **changes: Any
) -> Bench:
    """A module with heads of a shape."""

    def rule_of(bench: Bench) -> StateSpace:
        assert computes(bench.module, bench.inputs, bench.output)
        return StateSpace(bench.module, WorkerPool(threads))

    return Bench(architecture, dtype, rule_of, **sizes_of(architecture, shape), **changes)


@dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("architecture", KNOWN)
def test_candidates_become_what_the_module_makes_of_each_path(
    architecture: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """And the states behind them are those of its cache."""
    bench_of(architecture, shape, dtype).assert_as_the_module()


@dtypes
@pytest.mark.parametrize("architecture", ["bamba", "falcon_h1"])
def test_bits_depend_on_the_path_alone(architecture: str, dtype: torch.dtype) -> None:
    """A tree, its paths token by token, and several sequences on two threads: the same bits."""
    bench, shared = (bench_of(architecture, (8, 24, 20, 2), dtype, threads) for threads in (1, 2))
    assert_bits_of_paths(bench, shared, dtype)


def test_a_module_goes_on_behind_a_candidate() -> None:
    """The state that is made whole has the bits of the step behind it, and the size of any."""
    bench = bench_of("bamba", (4, 32, 16, 1), torch.float32)
    rows, family = tokens(len(TREE), torch.float32), bench.family(bench.prompt)
    bench.step([family], rows)
    state = family.pieces[4].after[bench.index]
    whole = bench.rule.whole(state)
    assert size_of(whole) == size_of(bench.prompt)
    made = [bench.step([bench.family(each)], rows) for each in (state, whole)]
    assert torch.equal(*made)
    cache = copy.deepcopy(bench.cache)
    vars(cache.layers[bench.index]).update(joined([whole]))
    assert_near(bench.read(rows[:1], cache), made[0][:1])


class NormOfAll(nn.Module):
    """The gated norm of older versions of transformers, over all columns together."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = weight, 1e-6

    def forward(self, hidden: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """[..., W] of the weight's dtype."""
        rows = hidden.float() * nn.functional.silu(gate.float())
        rows = rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * rows.to(hidden.dtype)


def test_a_norm_without_groups_takes_all_columns_together() -> None:
    """So it is in transformers 5.17."""

    def rule_of(bench: Bench) -> StateSpace:
        bench.module.norm = NormOfAll(bench.module.norm.weight)
        return StateSpace(bench.module, WorkerPool())

    Bench("bamba", torch.float32, rule_of, **sizes_of("bamba", (8, 24, 20, 2))).assert_as_the_module()


def test_modules_that_compute_something_else_are_left_alone() -> None:
    """Another activation, a norm of Falcon H1, other dtypes, linear layers elsewhere."""
    bench = bench_of("falcon_h1", (4, 32, 16, 1), torch.float32)
    module, output = bench.module, bench.output
    assert not computes(module, [], output)
    assert not computes(module, bench.inputs, None)
    module.mamba_rms_norm = True
    assert not computes(module, bench.inputs, output)
    module.mamba_rms_norm = False
    module.D.data = module.D.data.double()
    assert not computes(module, bench.inputs, output)
    module.D.data = module.D.data.float()
    module.activation = "gelu"
    assert not computes(module, bench.inputs, output)
    assert not computes(nn.Linear(1, 1), [], None)
