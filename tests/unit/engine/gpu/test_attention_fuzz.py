"""Random steps through the attention kernels, against the reference attention."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from outrider.engine.loaded_model import Geometry
from outrider.engine.step import Segment
from tests.unit.engine.gpu.cases import SLOTS, Case, chain, tree

CASES = 300
TOLERANCE = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Distance of all results together, relative to the length of the expected ones."""
MAX_QUICK_ROWS = 150


@dataclass(frozen=True)
class Drawn:
    """A random step."""

    page: int
    geometry: Geometry
    dtype: torch.dtype
    sequences: list[tuple[int, int, list[int] | None]]
    """Committed entries, new tokens, and the parents of earlier scratch; None: a chain."""
    options: dict[str, Any] = field(default_factory=dict)
    padding: int = 0
    items: int = 1
    planned: int | None = None
    """Query heads per kv head of the layers that the step is planned for; None: of this one."""


def drawn(seed: int) -> Drawn:
    """Pages, heads, sequences at the edges of pages and blocks, and what models ask for beside."""
    random = np.random.default_rng(seed)
    page, kv_heads, width = (
        int(random.choice(each)) for each in ([1, 4, 12, 16], [1, 2, 3], [16, 32, 64, 80])
    )
    queries = int(random.choice([1, 2, 3, 4, 5, 6, 7, 8])) * kv_heads
    value_width = width if random.random() < 0.7 else int(random.choice([16, 32]))
    options: dict[str, Any] = {}
    if random.random() < 0.4:
        options["sliding_window"] = int(random.choice([1, 3, 16, 63, 64, 65, 100]))
    if random.random() < 0.3:
        options["softcap"] = float(random.choice([3.0, 30.0]))
    if random.random() < 0.3:
        options["s_aux"] = torch.randn(queries, generator=torch.Generator().manual_seed(seed))
    if random.random() < 0.3:
        options["scaling"] = 0.3
    return Drawn(
        page,
        Geometry(1, queries, kv_heads, width, value_width),
        [torch.float32, torch.float16, torch.bfloat16][seed % 3],
        _sequences(random, page),
        options,
        padding=int(random.choice([0, 0, 3, 8])),
        items=int(random.choice([1, 3, 6, 33])),
    )


def drawn_mixed(seed: int) -> Drawn:
    """The same of a layer with the widest heads, or with others than the step is planned for."""
    step, random = drawn(seed), np.random.default_rng((seed, 1))
    shape, wide = step.geometry, int(random.choice([0, 320, 512]))
    if wide:
        shape = replace(shape, head_dim=wide, value_dim=wide)
    return replace(step, geometry=shape, planned=int(random.integers(1, 9)))


def _sequences(random: np.random.Generator, page: int) -> list[tuple[int, int, list[int] | None]]:
    """Up to eight that fit the slots together; at least one."""
    edges = [edge + by for edge in (0, page, 16, 64, 128) for by in (-1, 0, 1) if edge + by >= 0]
    room, found = SLOTS - 4 * page, []
    for _ in range(int(random.integers(1, 9))):
        committed = int(random.choice([*edges, int(random.integers(200))]))
        tokens = int(random.choice([1, 1, 2, 5, 9, 17, 33]))
        earlier = None
        if random.random() < 0.5:
            earlier = [int(random.integers(-1, index)) for index in range(int(random.integers(6)))]
        room -= committed + tokens + 6 + page
        if room >= 0:
            found.append((committed, tokens, earlier))
    return found


def quick() -> list[int]:
    """The first dozen that the interpreter is done with soon: of few rows, each of one query head."""
    rows = {
        seed: each.geometry.query_heads * sum(tokens for _, tokens, _ in each.sequences)
        for seed, each in ((seed, drawn(seed)) for seed in range(CASES))
    }
    return [seed for seed, count in rows.items() if count <= MAX_QUICK_ROWS][:12]


def run(seed: int, *, fp8: bool = False, mixed: bool = False) -> float:
    """The distance of a random step's results from the reference's."""
    step = drawn_mixed(seed) if mixed else drawn(seed)
    case = Case(step.geometry, seed, step.dtype, step.page, fp8=fp8, planned=step.planned)

    def segment(committed: int, tokens: int, earlier: list[int] | None) -> Segment:
        if earlier is None:
            return chain(case.sequence(committed), tokens)
        return tree(case.sequence(committed, earlier), tokens, seed)

    segments = [segment(*each) for each in step.sequences]
    found, expected, padding = case.attend(segments, step.padding, step.items, **step.options)
    assert not padding.any(), "padding is zero"
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("seed", quick())
def test_a_random_step_is_that_of_the_reference(seed):
    """As near as the dtype's roundings."""
    assert run(seed) < TOLERANCE[drawn(seed).dtype], drawn(seed)


@pytest.mark.parametrize("seed", quick()[:6])
def test_a_random_step_over_8_bits_is_that_of_the_reference(seed):
    """Which is given the numbers that 8 bits hold, those of the step's own tokens included."""
    assert run(seed, fp8=True) < TOLERANCE[drawn(seed).dtype], drawn(seed)


@pytest.mark.parametrize("seed", quick()[:6])
def test_a_random_step_of_layers_that_differ_is_that_of_the_reference(seed):
    """Wide heads, and tiles that are planned for other layers."""
    assert run(seed, mixed=True) < TOLERANCE[drawn(seed).dtype], drawn_mixed(seed)


@pytest.mark.slow
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("seed", range(CASES))
def test_more_random_steps_are_those_of_the_reference(seed, fp8, mixed):
    """The same for all of them."""
    assert run(seed, fp8=fp8, mixed=mixed) < TOLERANCE[drawn(seed).dtype], drawn(seed)
