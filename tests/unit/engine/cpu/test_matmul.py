"""Products with kernels of the project: right, the same bits in every batch, nothing written beside them."""

from __future__ import annotations

import os
from array import array
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad, silu

from outrider.engine.cpu import matmul
from outrider.engine.cpu.backend import Backend, matmul_type, unsupported_reason
from outrider.engine.cpu.matmul import Matmul
from outrider.engine.cpu.panels import PANEL
from outrider.engine.cpu.worker_pool import HELPED_ROWS, WorkerPool

SHAPES = [(1, 4), (PANEL - 1, 6), (PANEL, 64), (PANEL + 17, 130), (100, 4100)]
"""(out, in): one column, panels cut short at either half, more than one block of steps."""
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
BACKENDS = [
    (Backend.AVX512, torch.float32),
    (Backend.AVX512, torch.bfloat16),
    (Backend.AVX512, torch.float16),
    (Backend.AVX2, torch.float32),
    (Backend.AVX2, torch.bfloat16),
    (Backend.AVX2, torch.float16),
    (Backend.AMX, torch.bfloat16),
]


@dataclass(frozen=True)
class Kind:
    """A back end that this processor has, and a dtype that it computes."""

    make: type[Matmul]
    dtype: torch.dtype

    def random(self, *shape: int, seed: int = 0) -> Tensor:
        """Normal numbers."""
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(self.dtype)

    def counts(self) -> tuple[int, ...]:
        """Numbers of rows at the edges of passes."""
        few, most = self.make.pass_rows, self.make.max_rows
        return 1, 2, few // 2 + 1, few, few + 1, most, most + 3


@pytest.fixture(params=BACKENDS, ids=lambda pair: f"{pair[0]}-{pair[1]}")
def kind(request: pytest.FixtureRequest) -> Kind:
    """Each back end that can run here."""
    backend, dtype = request.param
    if (reason := unsupported_reason(backend, dtype)) is not None:
        pytest.skip(f"{backend}: {reason}")
    make = matmul_type(backend)
    assert make is not None
    return Kind(make, dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("biased", [False, True])
def test_matmul_is_the_matrix_product(kind: Kind, shape: tuple[int, int], biased: bool) -> None:
    """Within the rounding of the dtype, relative to the size of the terms."""
    weight, bias = kind.random(*shape), kind.random(shape[0], seed=1)
    packed = kind.make(weight, bias if biased else None, WorkerPool())
    for count in kind.counts():
        given = kind.random(count, shape[1], seed=2)
        exact = given.double() @ weight.double().T + (bias.double() if biased else 0.0)
        terms = given.double().abs() @ weight.double().abs().T + 1.0
        error = (packed(given).double() - exact).abs() / terms
        assert error.max() < TOLERANCE[kind.dtype]


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("numbers", [5000, 2048])
def test_bits_do_not_depend_on_the_batch(kind: Kind, gated: bool, numbers: int) -> None:
    """Every number of rows gives each row what it gets alone, wherever it stands; also where they are copied
    further apart."""
    packed = kind.make(kind.random(70, numbers), None, WorkerPool(), gated=gated)
    given = kind.random(kind.make.max_rows + 2, numbers, seed=1)
    alone = torch.cat([packed(row[None]) for row in given])
    for count in range(1, len(given) + 1, 1 if len(given) < 150 else 3):
        assert torch.equal(packed(given[:count]), alone[:count])
    assert torch.equal(packed(given.flip(0)), alone.flip(0))


def test_many_rows_stand_apart_in_a_cache() -> None:
    """More rows than a cache has ways never begin a multiple of its ways' bytes apart."""
    rows = torch.randn(matmul.WAYS + 1, 2 * matmul.WAY_BYTES // 4)
    apart = matmul.padded(rows)
    assert torch.equal(apart, rows)
    assert apart.stride(0) * 4 % matmul.WAY_BYTES == 64
    assert matmul.padded(rows[1:]).stride(0) == rows.shape[1]


def test_how_weights_are_fetched_changes_no_bit(kind: Kind) -> None:
    """Past the shared cache or into it."""
    weight, given = kind.random(70, 5000), kind.random(kind.make.pass_rows + 1, 5000, seed=1)
    kept, passing = (kind.make(weight, None, WorkerPool(), passing=passing) for passing in (False, True))
    assert torch.equal(kept(given), passing(given))


def test_nothing_is_written_beside_the_result(kind: Kind) -> None:
    """With columns that do not fill a panel, what lies behind the last row stays."""
    columns = PANEL + 5
    packed = kind.make(kind.random(columns, 8), None, WorkerPool())
    room = torch.full((4 * columns,), 7.0, dtype=kind.dtype)
    given = kind.random(3, 8, seed=1)
    read = packed._prepared(given)
    job = packed._job(1, read.data_ptr(), read.stride(0) * read.itemsize, 3, room.data_ptr())
    WorkerPool().run(packed._kernel, array("q", job), 1, 1)
    assert torch.equal(room[3 * columns :], torch.full((columns,), 7.0, dtype=kind.dtype))
    assert torch.equal(room[: 3 * columns].view(3, columns), packed(given))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("threads", "helpers"), [(2, 0), (1, 1), (3, 1)])
def test_workers_share_the_panels(
    kind: Kind, threads: int, helpers: int, gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With any number of members, in short steps and long ones, the bits are those of one."""
    weight, bias = kind.random(18 * PANEL + 10, 66), kind.random(18 * PANEL + 10, seed=1)
    monkeypatch.setattr(matmul, "MIN_SHARE", 1)
    workers = WorkerPool(threads, [min(os.sched_getaffinity(0))] * helpers)
    packed, alone = (kind.make(weight, bias, members, gated=gated) for members in (workers, WorkerPool()))
    for count in (1, HELPED_ROWS - 1, HELPED_ROWS, kind.make.max_rows + 3):
        given = kind.random(count, 66, seed=2)
        assert torch.equal(packed(given), alone(given))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", [(3, 4), (16, 64), (39, 4100)], ids=str)
def test_a_gated_matmul_is_both_products_and_the_gate(
    kind: Kind, shape: tuple[int, int], biased: bool
) -> None:
    """SiLU(gate) up, rounded where the modules round; in 16 bits that leaves hardly any difference."""
    width, inner = shape
    weight = kind.random(2 * width, inner)
    bias = kind.random(2 * width, seed=1) if biased else None
    gated, both = (kind.make(weight, bias, WorkerPool(), gated=opened) for opened in (True, False))
    for count in kind.counts():
        given = kind.random(count, inner, seed=2)
        gate, up = both(given).chunk(2, -1)
        expected, result = silu(gate) * up, gated(given)
        torch.testing.assert_close(result, expected)
        assert kind.dtype == torch.float32 or (result != expected).float().mean() < 1e-3


def test_no_rows_make_no_result(kind: Kind) -> None:
    """An empty product has the right shape."""
    assert kind.make(kind.random(5, 8), None, WorkerPool())(kind.random(0, 8)).shape == (0, 5)


def test_numbers_that_are_none_stay_in_their_row(kind: Kind) -> None:
    """What lies behind a row's end is another row, and must not be read as weights of 0 would hide it."""
    packed = kind.make(kind.random(40, 34), None, WorkerPool())
    given = kind.random(5, 34, seed=1)
    expected = packed(given)
    given[3] = float("nan")
    result = packed(given)
    assert result[3].isnan().all()
    kept = [0, 1, 2, 4]
    assert torch.equal(result[kept], expected[kept])


def tile_order(x: Tensor, weight: Tensor) -> Tensor:
    """The sums of TDPBF16PS in float32: per 32 numbers one chain of even and one of odd terms, then both."""
    x, weight = (pad(values, (0, -values.shape[1] % 32)).float() for values in (x, weight))
    total = torch.zeros(x.shape[0], weight.shape[0])
    for tile in range(0, x.shape[1], 32):
        chains = [torch.zeros_like(total), torch.zeros_like(total)]
        for k in range(32):
            product = x[:, tile + k, None].double() * weight[None, :, tile + k].double()
            chains[k % 2] = (product + chains[k % 2].double()).float()
        total = total + (chains[0] + chains[1])
    return total


@pytest.mark.skipif(
    unsupported_reason(Backend.AMX, torch.bfloat16) is not None, reason="needs a processor with AMX"
)
def test_the_order_of_a_sum_on_tiles_is_fixed() -> None:
    """It can be computed without tiles, bit for bit, from fused multiply-adds."""
    kind = Kind(matmul_type(Backend.AMX), torch.bfloat16)  # type: ignore[arg-type]
    weight, given = kind.random(70, 2300), kind.random(40, 2300, seed=1)
    assert torch.equal(kind.make(weight, None, WorkerPool())(given), tile_order(given, weight).bfloat16())
