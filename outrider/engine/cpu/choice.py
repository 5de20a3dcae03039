"""Chooses a model's back end on the CPU, and measures that it is not slower than the library.

Kernels that are fast on one processor can be slow on the next. So before a model is packed, both multiply its
largest kind of layer, with as few rows as a step has and with as many as a batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.engine.cpu.backend import AUTO, Backend, matmul_type, preferred
from outrider.engine.cpu.linear import LibraryLinear, operators_exist
from outrider.engine.cpu.matmul import Matmul
from outrider.engine.cpu.worker_pool import WorkerPool

MEASURED_ROWS = (1, 32)
"""Rows of a step, and of a batch."""
SAMPLE_BYTES = 96 * 2**20
"""Most bytes of weights that the measurement multiplies."""
MIN_BYTES = 4 * 2**20
"""Bytes of sampled weights below which nothing is measured. Products then take little of a step's time, and a
measurement would be noise."""
ROUNDS = 5
"""Timed rounds, of which the fastest counts."""
BUSY_SECONDS = 0.25
"""Longer than threads of OpenMP wait busily for their next operation: Intel's for 0.2 s unless told
otherwise, GNU's for some milliseconds."""
MAX_LOSS = 1.1
"""Mean time, relative to the library's, above which the library computes. Results that do not depend on the
batch are worth a tenth more time."""


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """A back end and why it was chosen."""

    backend: Backend
    reason: str


def choose_backend(
    weights: Sequence[Tensor],
    wanted: str = AUTO,
    *,
    measured: bool = True,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> BackendChoice:
    """The back end for a model with these weights [out, in] of linear layers, all of one dtype.

    Without `measured`, only the processor's features decide.

    Raises:
        ModelError: the back end that is wanted cannot run here.
    """
    dtype = weights[0].dtype if weights else torch.float32
    backend = preferred(dtype, wanted)
    if wanted != AUTO:
        return BackendChoice(backend, "asked for")
    kind = matmul_type(backend)
    if kind is None or not weights:
        return BackendChoice(backend, f"no kernels of the project for {dtype} on this processor")
    chosen = sample(weights)
    if not measured or not operators_exist(dtype) or sum(weight.nbytes for weight in chosen) < MIN_BYTES:
        return BackendChoice(backend, "the first that this processor can run")
    ratios = _ratios(kind, chosen, clock, sleep)
    figures = ", ".join(f"{ratio:.2f} at {rows}" for rows, ratio in zip(MEASURED_ROWS, ratios, strict=True))
    reason = f"time of {backend} / onednn by rows: {figures}"
    return BackendChoice(backend if sum(ratios) <= MAX_LOSS * len(ratios) else Backend.ONEDNN, reason)


def sample(weights: Sequence[Tensor]) -> list[Tensor]:
    """Return weights of the shape that takes the most bytes, at most SAMPLE_BYTES in all."""
    total: dict[torch.Size, int] = {}
    for weight in weights:
        total[weight.shape] = total.get(weight.shape, 0) + weight.nbytes
    largest = max(total, key=lambda shape: total[shape])
    chosen: list[Tensor] = []
    room = SAMPLE_BYTES
    for weight in (weight for weight in weights if weight.shape == largest):
        rows = min(room * weight.shape[0] // weight.nbytes, weight.shape[0])
        if rows:
            chosen.append(weight[:rows])
            room -= chosen[-1].nbytes
    return chosen


def _ratios(
    kind: type[Matmul],
    weights: Sequence[Tensor],
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> list[float]:
    """Return the time of the project's kernels / the library's for each of MEASURED_ROWS.

    They do not take turns: after each operation threads of torch and the library wait busily, on the cores of
    the project's.
    """
    workers = WorkerPool(torch.get_num_threads())
    kernels = [kind(weight, None, workers, passing=True) for weight in weights]
    sleep(BUSY_SECONDS)
    with torch.inference_mode():
        own = [_best_time(kernels, weights[0], rows, clock) for rows in MEASURED_ROWS]
        library_layers = [LibraryLinear(weight, None) for weight in weights]
        library = [_best_time(library_layers, weights[0], rows, clock) for rows in MEASURED_ROWS]
    return [ours / theirs for ours, theirs in zip(own, library, strict=True)]


def _best_time(
    layers: Sequence[Callable[[Tensor], Tensor]], weight: Tensor, rows: int, clock: Callable[[], float]
) -> float:
    """Return the least time of some rounds in which all layers multiply `rows` rows."""
    x = torch.zeros(rows, weight.shape[1], dtype=weight.dtype)
    best = float("inf")
    for _ in range(ROUNDS + 1):  # the first one is slow
        begun = clock()
        for layer in layers:
            layer(x)
        best = min(best, clock() - begun)
    return best
