"""The kernel of the gated delta rule, against the modules of transformers that it stands for."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from outrider.engine.cpu.worker_pool import WorkerPool
from outrider.engine.kv.kept_states import joined, size_of
from outrider.engine.kv.pages import SequenceKv
from outrider.engine.recurrent.delta_rule import DeltaRule, computes
from outrider.engine.runner import ModelRunner, Segment
from tests.unit.engine.conftest import Pair
from tests.unit.engine.kernel_marks import dtypes, needs_kernels
from tests.unit.engine.recurrent.bench import TREE, Bench, assert_bits_of_paths, assert_near, tokens

pytestmark = needs_kernels
KNOWN = ("qwen3_5", "qwen3_next", "olmo_hybrid")
SHAPES = [(1, 1, 8, 8), (2, 6, 20, 72), (3, 3, 64, 130), (2, 2, 128, 128)]
"""Key heads, value heads, their widths."""


def bench_of(architecture: str, shape: tuple[int, ...], dtype: torch.dtype, threads: int = 1) -> Bench:
    """A module with heads of a shape."""

    def rule_of(bench: Bench) -> DeltaRule:
        assert computes(bench.module, bench.inputs, bench.output)
        return DeltaRule(bench.module, WorkerPool(threads))

    names = "num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"
    sizes = {f"linear_{name}": size for name, size in zip(names, shape, strict=True)}
    return Bench(architecture, dtype, rule_of, **sizes)


@dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("architecture", KNOWN)
def test_candidates_become_what_the_module_makes_of_each_path(
    architecture: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """And the states behind them are those of its cache."""
    bench_of(architecture, shape, dtype).assert_as_the_module()


@dtypes
def test_bits_depend_on_the_path_alone(dtype: torch.dtype) -> None:
    """A tree, its paths token by token, and several sequences on two threads: the same bits."""
    bench, shared = (bench_of("qwen3_5", (2, 6, 20, 72), dtype, threads) for threads in (1, 2))
    assert_bits_of_paths(bench, shared, dtype)


def test_a_state_is_made_whole_with_the_bits_of_the_step_behind_it() -> None:
    """Whether the module or the kernel goes on; and it is one state, however long the path."""
    bench = bench_of("olmo_hybrid", (2, 4, 16, 32), torch.float32)
    rows, family = tokens(len(TREE), torch.float32), bench.family(bench.prompt)
    bench.step([family], rows)
    state = family.pieces[4].after[bench.index]
    whole = bench.rule.whole(state)
    assert bench.rule.whole(whole) is whole
    assert size_of(whole) == size_of(bench.prompt)
    nexts = [bench.family(each) for each in (state, whole)]
    made = [bench.step([family], rows) for family in nexts]
    assert torch.equal(*made)
    cache = copy.deepcopy(bench.cache)
    vars(cache.layers[bench.index]).update(joined([whole]))
    assert_near(bench.read(rows[:1], cache), made[0][:1])


def test_candidates_have_no_states_of_their_own(pair_of: Callable[..., Pair]) -> None:
    """Those of one step share the one before it."""
    runner = ModelRunner(pair_of("qwen3_5").loaded, 64, 4)
    kv = SequenceKv.open(runner.pool, [])
    runner.forward([Segment(kv, [5, 6, 7, 8], None, [], certain=4)])
    runner.commit(kv, range(4), [5, 6, 7, 8])
    runner.forward([Segment(kv, [3, 4, 5], [-1, 0, 0], [])])
    behind = [state["state"]["recurrent_states"][0] for states in kv.states for state in states.values()]
    before = [state["recurrent_states"][0] for state in kv.end_states.values()]
    assert {id(each) for each in behind} == {id(each) for each in before}


def test_a_prompt_goes_on_behind_candidates(pair_of: Callable[..., Pair]) -> None:
    """Its tokens, computed by the module, see all that the kernel has computed."""
    pair = pair_of("qwen3_next")
    runner, text = ModelRunner(pair.loaded, 64, 4), [5, 9, 6, 7, 8, 30, 31, 32, 33, 34]
    kv = SequenceKv.open(runner.pool, [])
    runner.forward([Segment(kv, text[:3], None, [], certain=3)])
    runner.commit(kv, range(3), text[:3])
    runner.forward([Segment(kv, [40, *text[3:6], 41], [-1, -1, 1, 2, 2], [])])
    runner.commit(kv, [1, 2, 3], text[3:6])
    logits = runner.forward([Segment(kv, text[6:], None, range(4), certain=4)])
    torch.testing.assert_close(logits, pair.expected(text)[6:], rtol=1e-4, atol=5e-4)


def test_modules_that_compute_something_else_are_left_alone() -> None:
    """Another activation, a bias of the convolution, linear layers elsewhere."""
    bench = bench_of("qwen3_5", (2, 2, 8, 8), torch.float32)
    module, output = bench.module, bench.module.out_proj
    assert not computes(module, bench.inputs[1:], output)
    assert not computes(module, bench.inputs, None)
    assert not computes(bench.module.double(), bench.inputs, output)
    module.float().activation = "gelu"
    assert not computes(module, bench.inputs, output)
    module.activation = "silu"
    assert computes(module, bench.inputs, output)
    module.conv1d.bias = nn.Parameter(torch.zeros(48))
    assert not computes(module, bench.inputs, output)
    assert not computes(nn.Linear(1, 1), [], None)
