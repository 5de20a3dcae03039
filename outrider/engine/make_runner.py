"""Chooses the runner of a loaded model: with kernels and graphs where they run, else with plain torch."""

from __future__ import annotations

from collections.abc import Callable

from outrider.engine.gpu.accelerator import has_kernels
from outrider.engine.loaded_model import LoadedModel
from outrider.engine.runner import ModelRunner

WIDEST_HEAD = 256
"""Widest key or value head whose tiles fit the registers and the shared memory of a multiprocessor."""


def make_runner(
    loaded: LoadedModel,
    num_pages: int,
    page_size: int,
    *,
    graphs: bool = True,
    say: Callable[[str], None] = lambda _: None,
) -> ModelRunner:
    """A runner with its KV memory; without `graphs` nothing is captured, for a short use.

    Raises:
        ModelError: the device has no memory for so many slots.
    """
    if not _kernels_fit(loaded):
        return ModelRunner(loaded, num_pages, page_size)
    # Imports Triton, which is there when the kernels fit.
    from outrider.engine.gpu.graphs import BUCKETS
    from outrider.engine.gpu.runner import GraphRunner

    return GraphRunner(loaded, num_pages, page_size, buckets=BUCKETS if graphs else (), say=say)


def _kernels_fit(loaded: LoadedModel) -> bool:
    """True when a model runs on kernels here; others run as they do on the CPU.

    Those are 32-bit ones, whose exact products need more registers than there are.
    """
    widest = max(loaded.geometry.head_dim, loaded.geometry.value_dim)
    return has_kernels(loaded.device) and loaded.dtype.itemsize == 2 and widest <= WIDEST_HEAD
