"""Chooses the runner of a loaded model: with kernels and graphs where they run, otherwise with plain
torch."""

from __future__ import annotations

from collections.abc import Callable

import torch

from outrider.engine.gpu.accelerator import kernel_errors, missing
from outrider.engine.gpu.coded_linear import compute_from_codes
from outrider.engine.loaded_model import Geometry, LoadedModel
from outrider.engine.loading.fp8_kv import no_fp8
from outrider.engine.runner import ModelRunner
from outrider.engine.step import StepSize
from outrider.protocol.errors import ModelError

NARROWEST_HEAD, WIDEST_HEAD = 16, 512
"""Widths of key and value heads that the kernels take: a matrix product has at least 16 columns, and tiles of
wider heads fit neither the registers nor the shared memory of a multiprocessor."""


def make_runner(
    loaded: LoadedModel,
    num_pages: int,
    page_size: int,
    *,
    largest: StepSize | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> ModelRunner:
    """Return a runner with its KV memory. Graphs are captured for steps of up to the `largest` size; without
    it, for a short use, none are captured.

    Raises:
        ModelError: the device has no memory for the pages, or cannot run the kernels that `deterministic`
        or `kv_dtype` needs.
    """
    if loaded.kernels:
        # Imports Triton, which is installed where the kernels run.
        from outrider.engine.gpu.graphs import buckets_up_to
        from outrider.engine.gpu.runner import GraphRunner

        buckets, rows = (buckets_up_to(largest.tokens), largest.rows) if largest else ((), 0)
        try:
            return GraphRunner(loaded, num_pages, page_size, buckets=buckets, max_rows=rows, say=say)
        except kernel_errors() as error:
            if largest is None:
                raise
            reason = str(error)
        if loaded.ordered:
            raise ModelError(f"deterministic: {reason}; set deterministic off")
        if loaded.fp8_kv:
            raise no_fp8(reason)
        # The memory of the failed runner is free by now: the error held it.
        say(f"without kernels: {reason}; plain torch computes this model")
    compute_from_codes(loaded.model, False)
    return ModelRunner(loaded, num_pages, page_size)


def without_kernels(geometry: Geometry, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why a model on a GPU cannot run on the kernels; None if it can, as far as this is known without
    trying."""
    if (lacking := missing(device)) is not None:
        return lacking
    if dtype.itemsize != 2:
        return f"they compute 16-bit models, not {dtype}: exact products need more registers than there are"
    if None in geometry.places:
        return "some of its layers have no attention"
    shapes = geometry.parts or (geometry,)
    for width in (width for shape in shapes for width in (shape.head_dim, shape.value_dim)):
        if not NARROWEST_HEAD <= width <= WIDEST_HEAD:
            return f"heads are {width} wide, not {NARROWEST_HEAD} to {WIDEST_HEAD}"
    return None
