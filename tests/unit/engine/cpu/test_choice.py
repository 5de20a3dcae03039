"""Which back end computes a model."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import Tensor

from outrider.engine.cpu import backend, choice
from outrider.engine.cpu.backend import (
    Backend,
    codes_backend,
    kernels_name,
    preferred,
    unsupported_reason,
    vector_backend,
)
from outrider.engine.cpu.choice import MEASURED_ROWS, MIN_BYTES, ROUNDS, choose_backend, sample
from outrider.protocol.errors import ModelError

EVERYTHING = frozenset(name for names in backend._FEATURES.values() for name in names)
NO_TILES = EVERYTHING - {"amx-tile", "amx-bf16"}


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A processor that has everything, and a system that allows it."""
    pretend(monkeypatch, EVERYTHING)
    monkeypatch.setattr(backend, "_tiles_allowed", lambda: True)
    return monkeypatch


def pretend(monkeypatch: pytest.MonkeyPatch, features: frozenset[str]) -> None:
    """Let the processor have these features alone."""
    monkeypatch.setattr(backend.processor, "features", lambda: features)


def test_each_dtype_has_its_best_back_end(processor: pytest.MonkeyPatch) -> None:
    """Tiles compute bfloat16 alone, AVX-512 also float16 and float32, the library everything else."""
    assert preferred(torch.bfloat16) is Backend.AMX
    assert preferred(torch.float16) is Backend.AVX512
    assert preferred(torch.float32) is Backend.AVX512
    assert preferred(torch.float64) is Backend.ONEDNN


def test_the_next_best_runs_where_the_best_cannot(processor: pytest.MonkeyPatch) -> None:
    """No tiles, then no AVX-512, then no vectors at all. AVX-512 needs no instruction for bfloat16."""
    pretend(processor, NO_TILES)
    assert preferred(torch.bfloat16) is Backend.AVX512
    pretend(processor, NO_TILES - {"avx512bf16"})
    assert (preferred(torch.bfloat16), preferred(torch.float32)) == (Backend.AVX512, Backend.AVX512)
    pretend(processor, frozenset({"avx2", "fma"}))
    assert (preferred(torch.bfloat16), preferred(torch.float32)) == (Backend.AVX2, Backend.AVX2)
    pretend(processor, frozenset())
    assert preferred(torch.float32) is Backend.ONEDNN


def test_codes_run_on_the_model_s_back_end_or_the_best(processor: pytest.MonkeyPatch) -> None:
    """The library has no products of codes, and tiles take bfloat16 alone."""
    assert codes_backend(Backend.AVX512, torch.bfloat16) is Backend.AVX512
    assert codes_backend(Backend.ONEDNN, torch.bfloat16) is Backend.AMX
    assert codes_backend(Backend.AMX, torch.float32) is Backend.AVX512
    pretend(processor, frozenset())
    assert codes_backend(Backend.ONEDNN, torch.float32) is Backend.ONEDNN


def test_kernels_with_other_bits_have_another_name(processor: pytest.MonkeyPatch) -> None:
    """Without an instruction for pairs of bfloat16 numbers, denormal numbers count."""
    for pairs, name in ((True, "avx512"), (False, "avx512 without bf16")):
        processor.setattr(backend.processor, "HAS_BF16", pairs)
        assert kernels_name(Backend.AVX512, torch.bfloat16) == name
        assert kernels_name(Backend.AVX512, torch.float16) == "avx512"
        assert kernels_name(Backend.AVX2, torch.bfloat16) == "avx2"


def test_a_system_that_refuses_tiles_is_obeyed(processor: pytest.MonkeyPatch) -> None:
    """As a seccomp filter does; using them all the same would end the process."""
    processor.setattr(backend, "_tiles_allowed", lambda: False)
    assert preferred(torch.bfloat16) is Backend.AVX512
    assert "arch_prctl" in (unsupported_reason(Backend.AMX, torch.bfloat16) or "")


def test_with_a_numba_that_cannot_be_imported_the_library_computes(processor: pytest.MonkeyPatch) -> None:
    """As one that does not take the installed numpy; whoever asks for kernels reads where the reason is."""
    processor.setattr(backend.compiling, "available", lambda: False)
    assert preferred(torch.bfloat16) is Backend.ONEDNN
    with pytest.raises(ModelError, match=r"avx512 cannot run here: .*numba cannot be imported .*log"):
        preferred(torch.float32, "avx512")


def test_without_numba_the_library_computes(processor: pytest.MonkeyPatch) -> None:
    """An installation that lacks the compiler still serves."""
    processor.setattr(importlib.util, "find_spec", lambda name: None)
    assert preferred(torch.bfloat16) is Backend.ONEDNN


@pytest.mark.parametrize(
    ("wanted", "dtype", "reason"),
    [("amx", torch.bfloat16, "no amx-tile, amx-bf16"), ("avx512", torch.float64, "does not compute")],
)
def test_what_cannot_be_forced_says_why(
    processor: pytest.MonkeyPatch, wanted: str, dtype: torch.dtype, reason: str
) -> None:
    """And what to set instead."""
    pretend(processor, NO_TILES)
    with pytest.raises(ModelError, match=f"cpu_backend: {wanted} .*{reason}.* set cpu_backend to auto"):
        preferred(dtype, wanted)


def test_the_library_can_be_forced() -> None:
    """On any processor, without a measurement."""
    chosen = choose_backend([torch.zeros(4096, 1024)], "onednn", clock=no_clock)
    assert (chosen.backend, chosen.reason) == (Backend.ONEDNN, "asked for")


def no_clock() -> float:
    """Nobody may ask for the time."""
    raise AssertionError("measured")


class Clock:
    """Time as a measurement sees it: the second reading of a pair is later by what its arm takes. The arms
    follow each other."""

    def __init__(self, own: float, library: float) -> None:
        self._now, self._calls, self._arms = 0.0, 0, (own, library)

    def __call__(self) -> float:
        """Seconds."""
        if self._calls % 2:
            self._now += self._arms[self._calls // 2 // (len(MEASURED_ROWS) * (ROUNDS + 1))]
        self._calls += 1
        return self._now


def large() -> list[Tensor]:
    """Weights of a size that is measured."""
    return [torch.zeros(MIN_BYTES // 4 // 256 + 1, 256)]


OWN = vector_backend(torch.float32)
needs_kernels = pytest.mark.skipif(OWN is None, reason="needs a processor with AVX2 or AVX-512, and numba")


@needs_kernels
@pytest.mark.parametrize(("own", "backend"), [(1.05, OWN), (1.2, Backend.ONEDNN)])
def test_kernels_that_lose_by_more_than_a_tenth_give_way(own: float, backend: Backend) -> None:
    """The measurement decides, and is told."""
    chosen = choose_backend(large(), clock=Clock(own, 1.0), sleep=lambda _: None)
    assert chosen.backend is backend
    assert f"{own:.2f} at 1, {own:.2f} at 32" in chosen.reason


@needs_kernels
def test_threads_that_wait_busily_do_not_slow_the_kernels_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After torch's operations, as in loading, and the library's products they hold the cores for a while."""
    now, held = 0.0, True

    class Library:
        def __init__(self, *_: object) -> None: ...

        def __call__(self, rows: Tensor) -> Tensor:
            nonlocal now, held
            now, held = now + 1.0, True
            return rows

    class Kernels(Library):
        def __init__(self, *_: object, passing: bool) -> None: ...

        def __call__(self, rows: Tensor) -> Tensor:
            nonlocal now
            now += 1.5 if held else 0.8
            return rows

    def sleep(_: float) -> None:
        nonlocal held
        held = False

    monkeypatch.setattr(choice, "LibraryLinear", Library)
    monkeypatch.setattr(choice, "matmul_type", lambda backend: Kernels)
    assert choose_backend(large(), clock=lambda: now, sleep=sleep).backend is OWN


@needs_kernels
def test_small_models_and_deterministic_ones_are_not_measured() -> None:
    """There is nothing to gain, or nothing to choose."""
    assert choose_backend([torch.zeros(64, 64)], clock=no_clock).backend is OWN
    assert choose_backend(large(), measured=False, clock=no_clock).backend is OWN


def test_the_sample_is_of_the_shape_that_takes_most_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut to the most that is multiplied."""
    monkeypatch.setattr(choice, "SAMPLE_BYTES", 5 * 4 * 8)
    shapes = [(4, 8), (2, 16), (4, 8)]
    assert [tuple(weight.shape) for weight in sample([torch.zeros(shape) for shape in shapes])] == [
        (4, 8),
        (1, 8),
    ]


def test_a_model_without_linear_layers_has_a_back_end() -> None:
    """Nothing is measured."""
    assert choose_backend([], clock=no_clock).backend is Backend.ONEDNN or OWN is not None
