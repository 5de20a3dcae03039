"""Kernels for few rows: right, the same bits in every batch, and nothing written beside the result."""

from __future__ import annotations

import importlib.util
import os
import threading

import pytest
import torch

from outrider.engine.kernels import rows
from outrider.engine.kernels.crew import LONG_ROWS, Crew
from outrider.engine.kernels.rows import MOST_ROWS, PackedRows, available, fits
from outrider.engine.kernels.rows_ir import MAX_ROWS, PANEL
from outrider.errors import ConfigError

SHAPES = [(1, 4), (PANEL - 1, 6), (PANEL, 64), (PANEL + 17, 130), (100, 4100)]
"""(out, in): one column, panels cut short at either half, more than one block of steps."""
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}

pytestmark = pytest.mark.skipif(
    not available(torch.float32), reason="the kernels need AVX-512 and the package llvmlite"
)
needs_bfloat16 = pytest.mark.skipif(not available(torch.bfloat16), reason="needs AVX-512 BF16")
dtypes = pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=needs_bfloat16)], ids=str
)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@dtypes
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("biased", [False, True])
def test_product_is_the_matrix_product(dtype: torch.dtype, shape: tuple[int, int], biased: bool) -> None:
    """Within the rounding of the dtype, relative to the size of the terms."""
    weight, bias = random(*shape, dtype=dtype), random(shape[0], dtype=dtype, seed=1)
    packed = PackedRows(weight, bias if biased else None, Crew())
    for count in (1, 2, MAX_ROWS, MAX_ROWS + 1, MOST_ROWS, MOST_ROWS + 3):
        given = random(count, shape[1], dtype=dtype, seed=2)
        exact = given.double() @ weight.double().T + (bias.double() if biased else 0.0)
        terms = given.double().abs() @ weight.double().abs().T + 1.0
        error = (packed.product(given).double() - exact).abs() / terms
        assert error.max() < TOLERANCE[dtype]


@dtypes
def test_bits_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    """Every number of rows gives each row what it gets alone, wherever it stands."""
    packed = PackedRows(random(70, 5000, dtype=dtype), None, Crew())
    given = random(MOST_ROWS + 2, 5000, dtype=dtype, seed=1)
    alone = torch.cat([packed.product(row[None]) for row in given])
    for count in range(1, len(given) + 1):
        assert torch.equal(packed.product(given[:count]), alone[:count])
    assert torch.equal(packed.product(given.flip(0)), alone.flip(0))


@dtypes
def test_how_weights_are_fetched_changes_no_bit(dtype: torch.dtype) -> None:
    """Past the shared cache or into it."""
    weight, given = random(70, 5000, dtype=dtype), random(MAX_ROWS + 1, 5000, dtype=dtype, seed=1)
    kept, passing = (PackedRows(weight, None, Crew(), kept=kept) for kept in (True, False))
    assert torch.equal(kept.product(given), passing.product(given))


@dtypes
def test_nothing_is_written_beside_the_result(dtype: torch.dtype) -> None:
    """With columns that do not fill a panel, what lies behind every row and the last one stays."""
    packed = PackedRows(random(PANEL + 5, 8, dtype=dtype), None, Crew())
    room = torch.full((4 * (PANEL + 5),), 7.0, dtype=dtype)
    result = room[: 3 * (PANEL + 5)].view(3, PANEL + 5)
    given = random(3, 8, dtype=dtype, seed=1)
    packed._multiply(0, (0, 2, 0, 3), given.data_ptr(), result.data_ptr())
    assert torch.equal(room[3 * (PANEL + 5) :], torch.full((PANEL + 5,), 7.0, dtype=dtype))
    assert torch.equal(result, packed.product(given))


@dtypes
@pytest.mark.parametrize(("threads", "helpers"), [(2, 0), (1, 1), (3, 1)])
def test_a_crew_shares_the_panels(
    dtype: torch.dtype, threads: int, helpers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With any number of members, in short steps and long ones, the bits are those of one."""
    weight, bias = random(9 * PANEL + 5, 64, dtype=dtype), random(9 * PANEL + 5, dtype=dtype, seed=1)
    monkeypatch.setattr(rows, "LEAST_SHARE", 1)
    crew = Crew(threads, [min(os.sched_getaffinity(0))] * helpers)
    packed, alone = PackedRows(weight, bias, crew), PackedRows(weight, bias, Crew())
    for count in (1, LONG_ROWS, LONG_ROWS + 1, MOST_ROWS + 3):
        given = random(count, 64, dtype=dtype, seed=2)
        assert torch.equal(packed.product(given), alone.product(given))


def test_every_part_is_worked_off_once() -> None:
    """By as many members as were asked for, of whom the caller is one."""
    crew, done = Crew(3), []
    crew.share(3, range(100), lambda member, part: done.append((part, member)))
    assert sorted(part for part, _ in done) == list(range(100))
    assert {member for _, member in done} <= {0, 1, 2}
    assert (crew.size(1), crew.size(1000), crew.largest) == (3, 3, 3)


def test_a_member_that_is_busy_elsewhere_is_not_waited_for() -> None:
    """Its core has other work: the caller does all parts."""
    crew, done, free = Crew(2), [], threading.Event()
    crew._others[0].submit(free.wait)
    crew.share(2, range(10), lambda member, part: done.append((part, member)))
    free.set()
    assert done == [(part, 0) for part in range(10)]


def test_a_helper_needs_its_core() -> None:
    """A core that is not there, or not for this process, is named at load and not in the first long step."""
    with pytest.raises(ConfigError, match="core 4095"):
        Crew(1, [4095])


def test_a_member_s_failure_is_the_caller_s() -> None:
    """Nothing is lost in a thread."""

    def fail(member: int, part: int) -> None:
        raise ValueError(part)

    with pytest.raises(ValueError, match=r"[12]"):
        Crew(2).share(2, [1, 2], fail)


@dtypes
def test_no_rows_make_no_result(dtype: torch.dtype) -> None:
    """An empty product has the right shape."""
    assert PackedRows(random(5, 8, dtype=dtype), None, Crew()).product(random(0, 8, dtype=dtype)).shape == (
        0,
        5,
    )


@needs_bfloat16
def test_what_does_not_fit_is_left_to_others() -> None:
    """An odd number of bfloat16 numbers does not make whole steps; other dtypes have no kernel."""
    assert fits(torch.zeros(3, 4, dtype=torch.bfloat16))
    assert not fits(torch.zeros(3, 5, dtype=torch.bfloat16))
    assert fits(torch.zeros(3, 5))
    assert not fits(torch.zeros(3, 4, dtype=torch.float16))


def test_without_the_compiler_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation that lacks it runs other kernels instead."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    rows.available.cache_clear()
    assert not available(torch.float32)
    monkeypatch.undo()
    rows.available.cache_clear()
