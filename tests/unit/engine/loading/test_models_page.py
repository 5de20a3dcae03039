"""docs/models.md says what the loader does."""

from __future__ import annotations

import re
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
def runs() -> dict[str, tuple[str, str]]:
    """How each architecture runs, and whether it does on the kernels of GPUs in tests."""
    rows = re.findall(r"^\| (fast|plain) \| (yes|no) \| (.*) \|$", PAGE, re.M)
    return {name: (kind, kernels) for kind, kernels, names in rows for name in re.findall(r"`(\w+)`", names)}


@cache
def refused() -> dict[str, str]:
    """Why an architecture is refused."""
    return dict(re.findall(r"^\| `(\w+)` \| ([^|]*) \|$", PAGE, re.M))


def test_the_page_names_every_architecture_that_is_tested() -> None:
    """Those that run, and those that are refused."""
    assert sorted(runs()) == sorted(ARCHITECTURES)
    assert list(refused()) == list(UNSUPPORTED)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_architecture_runs_as_the_page_says(folder_of: Callable[[str], Path], architecture: str) -> None:
    """Fast as a fused decoder, or plain with its own modules; on kernels where their test has it."""
    loaded = load_model(str(folder_of(architecture)), dtype="float32", device="cpu", threads=1)
    kind = "fast" if isinstance(loaded.model, FusedDecoder) else "plain"
    assert runs()[architecture] == (kind, "yes" if architecture in ON_KERNELS else "no")


@pytest.mark.parametrize("architecture", UNSUPPORTED)
def test_another_is_refused_as_the_page_says(folder_of: Callable[[str], Path], architecture: str) -> None:
    """With the reason that the page gives."""
    with pytest.raises(ModelError) as error:
        load_model(str(folder_of(architecture)), dtype="float32", device="cpu", threads=1)
    assert refused()[architecture] in str(error.value)


def test_the_page_names_what_kernels_take() -> None:
    """Dtypes and widths of heads."""
    for dtype in TOLERANCE:
        assert str(dtype).removeprefix("torch.") in PAGE
    assert f"heads of {NARROWEST_HEAD} to {WIDEST_HEAD}" in PAGE
