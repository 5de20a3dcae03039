"""The kernel of the gated delta rule, against the modules of transformers that it stands for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache

from outrider.engine.cpu.worker_pool import WorkerPool
from outrider.engine.kv.kept_states import joined, size_of
from outrider.engine.kv.pages import SequenceKv
from outrider.engine.recurrent.delta_rule import DeltaRule, computes
from outrider.engine.recurrent.pieces import Family, Piece
from outrider.engine.recurrent.probing import recurrent_modules
from outrider.engine.runner import ModelRunner, Segment
from tests.models import ARCHITECTURES
from tests.unit.engine.conftest import Pair
from tests.unit.engine.kernel_marks import dtypes, needs_kernels

pytestmark = needs_kernels
KNOWN = ("qwen3_5", "qwen3_next", "olmo_hybrid")
SHAPES = [(1, 1, 8, 8), (2, 6, 20, 72), (3, 3, 64, 130), (2, 2, 128, 128)]
"""Key heads, value heads, their widths."""
PROMPT, HIDDEN = 6, 64
TREE = [(0, 0), (2, 1), (1, 1), (4, 2), (6, 3), (3, 0), (5, 1)]
"""Packed row and place of each candidate, depth first."""


class Bench:
    """A module behind a prompt, once as it is and once with the kernel."""

    def __init__(
        self, architecture: str, shape: tuple[int, ...], dtype: torch.dtype, threads: int = 1
    ) -> None:
        config: Any = ARCHITECTURES[architecture](
            vocab_size=300, bos_token_id=0, eos_token_id=1, pad_token_id=1
        )
        names = "num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"
        for name, size in zip(names, shape, strict=True):
            setattr(config, f"linear_{name}", size)
        torch.manual_seed(0)
        module: Any = recurrent_modules(AutoModelForCausalLM.from_config(config))[0]
        for parameter in module.parameters():
            parameter.data += 0.2 * torch.randn_like(parameter)
        self.module, self.index = module.to(dtype).eval(), module.layer_idx
        output = module.o_proj if architecture == "olmo_hybrid" else module.out_proj
        self.inputs = [
            child for child in module.children() if isinstance(child, nn.Linear) and child is not output
        ]
        assert computes(module, self.inputs, output)
        output.forward = lambda x: x
        self.rule = DeltaRule(module, WorkerPool(threads))
        self.cache = DynamicCache(config=config)
        self.read(torch.randn(PROMPT, HIDDEN).to(dtype), self.cache)

    @torch.inference_mode()
    def read(self, rows: Tensor, cache: DynamicCache) -> Tensor:
        """[N, C] -> [N, H V], by the module."""
        made: Tensor = self.module(rows[None], cache_params=cache)
        return made[0]

    @property
    def prompt(self) -> Any:
        """The state behind it."""
        return vars(copy.deepcopy(self.cache.layers[self.index]))

    @torch.inference_mode()
    def step(self, families: list[Family], rows: Tensor) -> Tensor:
        """[N, C] -> [N, H V], by the kernel."""
        results = rows.new_zeros(len(rows), self.rule.width)
        self.rule(self.index, families, {child: child(rows) for child in self.inputs}, results)
        return results

    def family(self, state: Any, tree: list[tuple[int, int]] = TREE) -> Family:
        """Candidates behind a state."""
        pieces = [Piece(row, None) for row, _ in tree]
        return Family({self.index: state}, pieces, [place for _, place in tree])


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
    """Equal but for the rounding of sums, which seldom moves a number of 16 bits."""
    if got.dtype == torch.float32:
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    else:
        torch.testing.assert_close(got, expected, rtol=0.05, atol=0.02)
        assert (got != expected).float().mean() < 0.01


@dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("architecture", KNOWN)
def test_candidates_become_what_the_module_makes_of_each_path(
    architecture: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """And the states behind them are those of its cache."""
    bench = Bench(architecture, shape, dtype)
    rows, family = tokens(len(TREE), dtype), bench.family(bench.prompt)
    got = bench.step([family], rows)
    for path, piece in zip(paths(), family.pieces, strict=True):
        cache = copy.deepcopy(bench.cache)
        expected = torch.cat([bench.read(rows[row : row + 1], cache) for row in path])
        assert_near(got[path], expected)
        whole, there = bench.rule.whole(piece.after[bench.index]), cache.layers[bench.index]
        torch.testing.assert_close(whole["conv_states"][0], there.conv_states[0])
        torch.testing.assert_close(
            whole["recurrent_states"][0],
            there.recurrent_states[0],
            rtol=1e-3,
            atol=2e-2 if dtype.itemsize == 2 else 1e-5,
        )


@dtypes
def test_bits_depend_on_the_path_alone(dtype: torch.dtype) -> None:
    """A tree, its paths token by token, and several sequences on two threads: the same bits."""
    bench, shared = (Bench("qwen3_5", (2, 6, 20, 72), dtype, threads) for threads in (1, 2))
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


def test_a_state_is_made_whole_with_the_bits_of_the_step_behind_it() -> None:
    """Whether the module or the kernel goes on; and it is one state, however long the path."""
    bench = Bench("olmo_hybrid", (2, 4, 16, 32), torch.float32)
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
    behind = [state["behind"]["recurrent_states"][0] for states in kv.states for state in states.values()]
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
    bench = Bench("qwen3_5", (2, 2, 8, 8), torch.float32)
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
