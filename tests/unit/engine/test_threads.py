"""How many threads compute a model, and which of them torch has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from outrider.engine import threads
from outrider.engine.cpu.backend import Backend
from outrider.engine.loading.loader import load_model
from outrider.engine.threads import set_threads


@pytest.fixture(autouse=True)
def same_threads_afterwards() -> Iterator[None]:
    """They belong to the process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("wanted", "device", "expected"), [(0, "cpu", 5), (0, "cuda", 1), (2, "cpu", 2)])
def test_who_does_not_say_gets_a_thread_per_core(
    wanted: int, device: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU computes by itself."""
    monkeypatch.setattr(threads, "default_threads", lambda: 5)
    assert set_threads(wanted, torch.device(device)) == torch.get_num_threads() == expected


@pytest.mark.parametrize("fused", [True, False])
def test_torch_s_threads_do_not_wait_beside_the_pool_s(folder_of: Callable[[str], Path], fused: bool) -> None:
    """The project's kernels compute a fused decoder with threads of their own; a model's own modules, and
    oneDNN, need torch's."""
    loaded = load_model(str(folder_of("llama")), dtype="float32", device="cpu", threads=3, fused=fused)
    assert loaded.choice is not None
    by_kernels = fused and loaded.choice.backend is not Backend.ONEDNN
    assert torch.get_num_threads() == (1 if by_kernels else 3)
