"""Measures one product of a linear layer, with weights of 16, 8 and 4 bits.

    python -m benchmarks.products --shapes 2048x2048 46336x256 --rows 1 4 5 8 32

Each arm has as many copies of a weight [out, in] as pass the caches, so that every product reads memory. The
time of this thread, all arms in turn, least of the rounds; in ms for all copies, and ÷ the time of 16 bits.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from benchmarks import machine
from outrider.engine.cpu.backend import matmul_type, preferred, quantized_type
from outrider.engine.cpu.kernels.codes import E4M3
from outrider.engine.cpu.linear import LibraryLinear
from outrider.engine.cpu.worker_pool import WorkerPool
from outrider.engine.quantization.rounding import BITS, rounded
from outrider.engine.quantization.weight import QuantizedWeight, quantized
from scripts import console

PASSING_WEIGHTS = 48 * 2**20
"""Fewest numbers of all copies together."""
Product: TypeAlias = Callable[[Tensor], Tensor]


def main() -> int:
    """Measure and print."""
    flags = _flags()
    torch.set_num_threads(1)
    print(machine.lines(machine.describe()) + "\n")
    for shape in flags.shapes:
        out, width = (int(size) for size in shape.split("x"))
        arms = _arms(out, width)
        print(f"{shape:>14}" + "".join(f"{name:>18}" for name in arms))
        for rows in flags.rows:
            fastest = _fastest(list(arms.values()), torch.randn(rows, width).bfloat16(), flags.rounds)
            print(
                f"{rows:9} rows" + "".join(f"{ms:11.2f} {ms / fastest[0]:6.2f}" for ms in fastest), flush=True
            )
    return 0


def _flags() -> argparse.Namespace:
    parser = console.new_parser(__doc__)
    parser.add_argument("--shapes", nargs="+", default=["2048x2048", "46336x256", "1408x256"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 5, 8, 32])
    parser.add_argument("--rounds", type=int, default=15)
    return parser.parse_args()


def _arms(out: int, width: int) -> dict[str, Sequence[Product]]:
    """Copies of a layer by how they are held."""
    weights = [torch.randn(out, width).bfloat16() for _ in range(-(-PASSING_WEIGHTS // (out * width)))]
    workers, backend = WorkerPool(), preferred(torch.bfloat16)
    kind = matmul_type(backend)
    plain = (
        partial(kind, bias=None, workers=workers, passing=True) if kind else partial(LibraryLinear, bias=None)
    )
    arms: dict[str, Sequence[Product]] = {"bfloat16": [plain(weight) for weight in weights]}
    codes = {name: [rounded(weight, bits) for weight in weights] for name, bits in BITS.items()}
    codes[E4M3] = [_e4m3(weight) for weight in weights]
    kind_of_codes = quantized_type(backend, torch.bfloat16)
    for name, held in codes.items():
        arms[name] = [kind_of_codes(each, None, workers, torch.bfloat16, passing=True) for each in held]
    return arms


def _e4m3(weight: Tensor) -> QuantizedWeight:
    """Return a weight as e4m3 codes with a scale for each row, as published checkpoints have."""
    scales = weight.float().abs().amax(1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
    codes = (weight / scales).to(torch.float8_e4m3fn).view(torch.uint8)
    return quantized(codes, scales, None, 8, weight.shape[1], e4m3=True)


def _fastest(arms: Sequence[Sequence[Product]], x: Tensor, rounds: int) -> list[float]:
    """Milliseconds of each arm."""
    best = [float("inf")] * len(arms)
    with torch.inference_mode():
        for _ in range(rounds + 1):
            for place, products in enumerate(arms):
                begun = time.thread_time()
                for product in products:
                    product(x)
                best[place] = min(best[place], (time.thread_time() - begun) * 1e3)
    return best


if __name__ == "__main__":
    console.run(main)
