"""docs/models.md says what the loader does."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from outrider.engine.fused_decoder import FusedDecoder
from outrider.engine.loading.check_forward import TOLERANCE
from outrider.engine.loading.loader import load_model
from outrider.engine.make_runner import NARROWEST_HEAD, WIDEST_HEAD
from outrider.protocol.errors import ModelError
from tests.models import ARCHITECTURES, UNSUPPORTED
from tests.unit.engine.gpu.architectures import ON_KERNELS

PAGE = (Path(__file__).parents[4] / "docs" / "models.md").read_text()


@cache
def tables() -> list[dict[str, list[str]]]:
    """The cells of each table's rows, by what the first names."""
    found: list[dict[str, list[str]]] = []
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|---"):
            found.append({})
        elif line.startswith("| `"):
            found[-1][cells[0].strip("`")] = cells[1:]
    return [rows for rows in found if rows]


def test_the_page_names_every_architecture_that_is_tested() -> None:
    """Those that run, and those that are refused."""
    runs, refused = tables()
    assert list(runs) == list(ARCHITECTURES)
    assert list(refused) == list(UNSUPPORTED)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_architecture_runs_as_the_page_says(folder_of: Callable[[str], Path], architecture: str) -> None:
    """Fast as a fused decoder, or plain with its own modules; on kernels where their test has it."""
    loaded = load_model(str(folder_of(architecture)), dtype="float32", device="cpu", threads=1)
    runs = "fast" if isinstance(loaded.model, FusedDecoder) else "plain"
    assert tables()[0][architecture] == [loaded.kind, runs, "yes" if architecture in ON_KERNELS else "no"]


@pytest.mark.parametrize("architecture", UNSUPPORTED)
def test_another_is_refused_as_the_page_says(folder_of: Callable[[str], Path], architecture: str) -> None:
    """With the reason that the page gives."""
    with pytest.raises(ModelError) as error:
        load_model(str(folder_of(architecture)), dtype="float32", device="cpu", threads=1)
    assert tables()[1][architecture][0] in str(error.value)


def test_the_page_names_what_kernels_take() -> None:
    """Dtypes and widths of heads."""
    for dtype in TOLERANCE:
        assert str(dtype).removeprefix("torch.") in PAGE
    assert f"heads of {NARROWEST_HEAD} to {WIDEST_HEAD}" in PAGE
