"""Products with weights of 4 and 8 bits: right, the same bits in every batch, nothing written beside them."""

from __future__ import annotations

import os
import subprocess
import sys
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from outrider.engine.cpu import matmul
from outrider.engine.cpu.backend import Backend, preferred, quantized_type, unsupported_reason, vector_backend
from outrider.engine.cpu.kernels.compiling import available
from outrider.engine.cpu.panels import PANEL
from outrider.engine.cpu.worker_pool import HELPED_ROWS, WorkerPool
from outrider.engine.quantization.rounding import rounded
from outrider.engine.quantization.weight import QuantizedWeight, quantized

if vector_backend(torch.float32) is None:
    pytest.skip("needs AVX2 or AVX-512 and the package numba", allow_module_level=True)

from outrider.engine.cpu import quantized_matmul as quantized_product
from outrider.engine.cpu.kernels.codes import E4M3, INT4, INT8
from outrider.engine.cpu.quantized_matmul import QuantizedMatmul

STRIP = 4 * PANEL
SHAPES = [(1, 1), (PANEL + 1, 33), (3 * PANEL, 64), (STRIP + PANEL + 17, 130), (100, 2100)]
"""(out, in): one number, panels and strips cut short, groups cut short, more than one block."""
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@dataclass(frozen=True)
class Kind:
    """Codes, dtype of the rows, and the back end that multiplies them."""

    code: str
    dtype: torch.dtype
    backend: Backend

    def __str__(self) -> str:
        return f"{self.code}-{self.dtype}-{self.backend}"

    @property
    def bits(self) -> int:
        """Of a code."""
        return 4 if self.code == INT4 else 8

    def random(self, *shape: int, seed: int = 0) -> Tensor:
        """Normal numbers."""
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(self.dtype)

    def weight(self, out: int, width: int) -> QuantizedWeight:
        """Rounded normal numbers."""
        if self.code == E4M3:
            return self.codes(out, width, 32, torch.bfloat16, zeros=False)
        return rounded(self.random(out, width), self.bits)

    def codes(self, out: int, width: int, group: int, scales: torch.dtype, *, zeros: bool) -> QuantizedWeight:
        """Codes as checkpoints have them: all of their range, groups of any length, zeros anywhere where the
        kind has some.
        """
        generator = torch.Generator().manual_seed(5)
        groups = out, -(-width // group)
        codes = torch.randint(1 << self.bits, (out, width), generator=generator, dtype=torch.uint8)
        if self.code == E4M3:
            codes = codes.where(codes & 127 != 127, 0)  # those stand for no number
        with_zeros = zeros and self.code != E4M3
        places = torch.randint(1 << self.bits, groups, generator=generator) if with_zeros else None
        sizes = torch.rand(groups, generator=generator).to(scales)
        return quantized(codes, sizes, places, self.bits, group, e4m3=self.code == E4M3)

    def make(self, weight: QuantizedWeight, bias: Tensor | None = None, **options: Any) -> QuantizedMatmul:
        """The product."""
        return self.type(weight, bias, options.pop("workers", WorkerPool()), self.dtype, **options)

    @property
    def type(self) -> type[QuantizedMatmul]:
        """The class of products."""
        return quantized_type(self.backend, self.dtype)

    def counts(self) -> tuple[int, ...]:
        """Numbers of rows that have loops of their own, or are at the edges of passes."""
        few, most = self.type.pass_rows, self.type.max_rows
        return 1, 2, 3, 4, few, few + 1, most, most + 3

    def assert_near(self, found: Tensor, weight: QuantizedWeight, given: Tensor, bias: Tensor | None) -> None:
        """Within the rounding of the dtype, relative to the size of the terms."""
        numbers, added = weight.values().double(), 0.0 if bias is None else bias.double()
        exact = given.double() @ numbers.T + added
        terms = given.double().abs() @ numbers.abs().T + 1.0
        assert ((found.double() - exact).abs() / terms).max() < TOLERANCE[self.dtype]


CODES = (INT8, INT4, E4M3)
KINDS = [
    Kind(code, dtype, backend)
    for code in CODES
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    for backend in (Backend.AMX, Backend.AVX512, Backend.AVX2)
    if unsupported_reason(backend, dtype) is None
]


@pytest.fixture(params=KINDS, ids=str)
def kind(request: pytest.FixtureRequest) -> Kind:
    """Each that runs here."""
    found: Kind = request.param
    return found


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("biased", [False, True])
def test_it_is_the_product_with_what_the_codes_stand_for(
    kind: Kind, shape: tuple[int, int], biased: bool
) -> None:
    """For every number of rows that has a loop of its own."""
    weight, bias = kind.weight(*shape), kind.random(shape[0], seed=1) if biased else None
    product = kind.make(weight, bias)
    for count in kind.counts():
        given = kind.random(count, shape[1], seed=2)
        kind.assert_near(product(given), weight, given, bias)


@pytest.mark.parametrize("group", [32, 96, 128, 320])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("scales", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [300, 320])
def test_groups_scales_and_zeros_of_other_checkpoints(
    kind: Kind, group: int, zeros: bool, scales: torch.dtype, width: int
) -> None:
    """Whatever the length of a group, up to a whole row, where the last is cut too, and wherever its zero."""
    weight = kind.codes(40, width, group, scales, zeros=zeros)
    assert weight.scales.dtype == scales
    product = kind.make(weight)
    for count in (1, 3, 8):
        given = kind.random(count, width, seed=2)
        kind.assert_near(product(given), weight, given, None)


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("least", [0, 1])
def test_every_code_is_exactly_its_number(kind: Kind, zeros: bool, least: int) -> None:
    """A row of one 1 has the numbers of a column, with and without the code farthest below the middle."""
    count, zeros = 1 << kind.bits, zeros and kind.code != E4M3
    codes = torch.arange(count).clamp(min=least).repeat(9, 1).roll(5, 1).to(torch.uint8)
    codes = torch.cat([codes, codes.flip(1), codes[:, :3]], 1)
    if kind.code == E4M3:
        codes = codes.where(codes & 127 != 127, 0)
    groups = -(-codes.shape[1] // 32)
    scales = torch.rand(9, groups, generator=torch.Generator().manual_seed(1))
    places = torch.arange(groups).repeat(9, 1) * 37 % count if zeros else None
    weight = quantized(codes, scales, places, kind.bits, 32, e4m3=kind.code == E4M3)
    found = kind.make(weight)(torch.eye(codes.shape[1], dtype=kind.dtype))
    assert torch.equal(found, weight.values().T.to(kind.dtype))


@pytest.mark.parametrize("outlier", [1, 1000])
def test_only_the_result_is_rounded_noticeably(kind: Kind, outlier: int) -> None:
    """Also where one number of a row is much larger than those around it."""
    weight, given = kind.weight(40, 512), kind.random(6, 512, seed=3) / outlier
    given[:, ::32] *= outlier
    numbers = weight.values().double()
    exact = given.double() @ numbers.T
    largest = given.view(6, 16, 32).abs().amax(2).double().repeat_interleave(32, 1)
    limit = torch.finfo(kind.dtype).eps / 2 * exact.abs() + 2**-15 * (largest @ numbers.abs().T)
    assert ((kind.make(weight)(given).double() - exact).abs() <= limit).all()


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("width", [1500, 1536])
def test_bits_do_not_depend_on_the_batch(kind: Kind, gated: bool, zeros: bool, width: int) -> None:
    """Every number of rows gives each row what it gets alone, wherever it stands."""
    out = 2 * STRIP + 38
    weight = kind.codes(out, width, 128, torch.float32, zeros=True) if zeros else kind.weight(out, width)
    product = kind.make(weight, gated=gated)
    given = kind.random(kind.type.max_rows + 2, width, seed=1)
    alone = torch.cat([product(row[None]) for row in given])
    for count in range(1, len(given) + 1):
        assert torch.equal(product(given[:count]), alone[:count])
    assert torch.equal(product(given.flip(0)), alone.flip(0))


def test_small_numbers_have_the_same_bits_in_every_batch(kind: Kind) -> None:
    """Where an instruction takes denormal numbers for 0, the one that multiplies a row alone does too."""
    weight = kind.weight(PANEL + 3, 96)
    tiny = torch.finfo(kind.dtype).tiny
    given = kind.random(5, 96, seed=1) * torch.tensor([tiny / 64, tiny, 4 * tiny, 2**-100, 1.0])[:, None]
    product, given = kind.make(weight), given.to(kind.dtype)
    assert torch.equal(product(given), torch.cat([product(row[None]) for row in given]))


@pytest.mark.parametrize("code", CODES)
def test_other_numbers_serve_where_tables_are_not_looked_up(
    code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A processor may have products of bfloat16 and no instruction for tables of bytes."""
    backend = vector_backend(torch.bfloat16)
    assert backend is not None
    kind = Kind(code, torch.bfloat16, backend)
    monkeypatch.setattr(quantized_product, "multiplies_pairs", lambda dtype: False)
    weight = kind.codes(70, 300, 128, torch.float32, zeros=True)
    given = kind.random(9, 300, seed=1)
    kind.assert_near(kind.make(weight)(given), weight, given, None)


def test_how_weights_are_fetched_changes_no_bit() -> None:
    """Past the shared cache or into it."""
    kind = KINDS[0]
    weight, given = kind.weight(70, 500), kind.random(7, 500, seed=1)
    kept, passing = (kind.make(weight, passing=passing)(given) for passing in (False, True))
    assert torch.equal(kept, passing)


def test_nothing_is_written_beside_the_result(kind: Kind) -> None:
    """With columns that do not fill a panel, what lies behind the last row stays."""
    columns = STRIP + 5
    product = kind.make(kind.weight(columns, 40))
    room = torch.full((4 * columns,), 7.0, dtype=kind.dtype)
    given = kind.random(3, 40, seed=1)
    prepared = product._prepared(given)
    stride = prepared.stride(0) * prepared.itemsize
    job = product._job(1, prepared.data_ptr(), stride, 3, room.data_ptr())
    WorkerPool().run(product._kernel, array("q", job), 1, 1)
    assert torch.equal(room[3 * columns :], torch.full((columns,), 7.0, dtype=kind.dtype))
    assert torch.equal(room[: 3 * columns].view(3, columns), product(given))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("threads", "helpers"), [(2, 0), (3, 1)])
def test_workers_share_the_strips(
    kind: Kind, threads: int, helpers: int, gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With any number of members, in short steps and long ones, the bits are those of one."""
    weight, bias = kind.weight(9 * STRIP + 10, 66), kind.random(9 * STRIP + 10, seed=1)
    monkeypatch.setattr(matmul, "MIN_SHARE", 1)
    workers = WorkerPool(threads, [min(os.sched_getaffinity(0))] * helpers)
    product, alone = (
        kind.make(weight, bias, workers=workers, gated=gated),
        kind.make(weight, bias, gated=gated),
    )
    for count in (1, HELPED_ROWS, kind.type.max_rows + 3):
        given = kind.random(count, 66, seed=2)
        assert torch.equal(product(given), alone(given))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", [(3, 32), (16, 64), (STRIP + 7, 130)], ids=str)
def test_a_gated_product_is_both_products_and_the_gate(
    kind: Kind, shape: tuple[int, int], biased: bool
) -> None:
    """SiLU(gate) up, rounded where the modules round; in 16 bits that leaves hardly any difference."""
    width, inner = shape
    weight = kind.weight(2 * width, inner)
    bias = kind.random(2 * width, seed=1) if biased else None
    gated, both = (kind.make(weight, bias, gated=opened) for opened in (True, False))
    for count in kind.counts():
        given = kind.random(count, inner, seed=2)
        gate, up = both(given).chunk(2, -1)
        expected, result = silu(gate) * up, gated(given)
        torch.testing.assert_close(result, expected)
        assert kind.dtype == torch.float32 or (result != expected).float().mean() < 2e-3


def test_no_rows_make_no_result(kind: Kind) -> None:
    """An empty product has the right shape."""
    assert kind.make(kind.weight(5, 8))(kind.random(0, 8)).shape == (0, 5)


def test_rows_of_another_width_are_refused(kind: Kind) -> None:
    """The kernel would read what lies behind them."""
    with pytest.raises(ValueError, match="rows of 9 numbers for a layer that takes 8"):
        kind.make(kind.weight(5, 8))(kind.random(1, 9))


def test_numbers_that_are_none_stay_in_their_row(kind: Kind) -> None:
    """What lies behind a row's end is another row."""
    product = kind.make(kind.weight(40, 34))
    given = kind.random(5, 34, seed=1)
    expected = product(given)
    given[3] = float("nan")
    result = product(given)
    assert result[3].isnan().all()
    kept = [0, 1, 2, 4]
    assert torch.equal(result[kept], expected[kept])


def test_a_forced_back_end_also_multiplies_codes() -> None:
    """With the bits of a processor that has no other one; the library's place takes the first that can."""
    for backend in Backend:
        if unsupported_reason(backend, torch.bfloat16) is None:
            found = quantized_type(backend, torch.bfloat16).__name__
            first = preferred(torch.bfloat16) if backend is Backend.ONEDNN else backend
            assert found == ("QuantizedTileMatmul" if first is Backend.AMX else "QuantizedMatmul")


ELSEWHERE = """
from outrider.engine.cpu import processor
processor.LANES, processor.HAS_BF16 = 16, True
from outrider.engine.cpu.kernels.prepared_rows import prepare_rows
from outrider.engine.cpu.kernels.quantized_matmul import quantized_matmul
wanted = {
    ("float32", "int4"): ["vcvtdq2ps", "vfmadd"],
    ("float32", "int8"): ["vcvtdq2ps", "vfmadd"],
    ("float32", "e4m3"): ["vcvtph2ps", "vfmadd"],
    ("float16", "int4"): ["vpsrlw", "vpdpwssd"],
    ("bfloat16", "int4"): ["vpermw", "vdpbf16ps"],
    ("bfloat16", "int8"): ["2b", "vpunpcklbw", "vdpbf16ps"],
    ("bfloat16", "e4m3"): ["2b", "vpunpcklbw", "vdpbf16ps"],
}
for (kind, code), instructions in wanted.items():
    numbers = "int16" if kind == "float16" else kind
    prepare_rows(kind, numbers)
    made = quantized_matmul(kind, code, numbers, "bfloat16", int(code != "e4m3"), 0)
    found = "".join(made.inspect_asm().values())
    assert "zmm" in found and all(name in found for name in instructions), (kind, code)
print("compiled")
"""


@pytest.mark.skipif(not available(), reason="the kernels need the package numba")
def test_it_compiles_for_processors_with_avx512(tmp_path: Path) -> None:
    """Into instructions of theirs, on any processor; running them takes one."""
    features = "+avx2,+fma,+avx512f,+avx512bw,+avx512dq,+avx512vl,+avx512bf16,+avx512vbmi"
    environment = {**os.environ, "NUMBA_CPU_NAME": "znver4", "NUMBA_CPU_FEATURES": features}
    environment["XDG_CACHE_HOME"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.stdout == "compiled\n", done.stderr
